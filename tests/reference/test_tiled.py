"""The tiled algorithm: its tile covers, and that what it skips and keeps is right."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, mask_words
from tests.inputs import build
from tests.oracle import problem_of
from tilewise.problem import Needs
from tilewise.reference import tiled, tiles
from tilewise.reference.blocks import Block
from tilewise.reference.ledger import Walk
from tilewise.reference.programs import Cover, cover, visible


@given(
    words=mask_words(3),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    data=st.data(),
)
def test_covers_are_sound(
    words: tuple[str, ...], queries: int, keys: int, data: st.DataObject
) -> None:
    """EMPTY sees nothing and FULL everything, for whatever block of whatever mask."""
    case = Case("cover", batch=2, queries=queries, keys=keys, mask=words, head_dim=1, value_dim=1)
    problem, operands = problem_of(build(case))
    top, left = data.draw(st.integers(0, queries - 1)), data.draw(st.integers(0, keys - 1))
    block = Block(
        range(top, data.draw(st.integers(top + 1, queries))),
        range(left, data.draw(st.integers(left + 1, keys))),
        queries,
        keys,
        range(2),
        range(case.heads),
    )
    found = cover(problem.mask, operands.mask_tensors, block)
    seen = visible(problem.mask, operands.mask_tensors, block, torch.device("cpu"))
    if found is Cover.EMPTY:
        assert not bool(seen.any())
    if found is Cover.FULL:
        assert bool(seen.all())


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("causal", [Cover.FULL, Cover.PARTIAL, Cover.EMPTY]),
        ("nothing", [Cover.EMPTY, Cover.EMPTY, Cover.EMPTY]),
        ("window", [Cover.PARTIAL, Cover.PARTIAL, Cover.PARTIAL]),
        ("diagonal", [Cover.EMPTY, Cover.PARTIAL, Cover.EMPTY]),
    ],
)
def test_covers_are_tight(word: str, expected: list[Cover]) -> None:
    """The tile left of the diagonal, on it, and right of it."""
    case = Case("tight", queries=48, keys=48, mask=(word,))
    problem, operands = problem_of(build(case))
    blocks = [
        Block(range(16, 32), range(n, n + 16), 48, 48, range(2), range(2)) for n in (0, 16, 32)
    ]
    assert [cover(problem.mask, operands.mask_tensors, block) for block in blocks] == expected


def test_only_tiles_inside_the_mask_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal mask over 8 x 8 tiles runs 36 of the 64."""
    computed = 0
    inner_product = tiles.inner_product

    def counted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal computed
        computed += 1
        return inner_product(a, b)

    monkeypatch.setattr(tiles, "inner_product", counted)
    problem, operands = problem_of(build(Case("skip", queries=128, keys=128, mask=("causal",))))
    tiled.forward(problem, operands, walk=Walk(16, 16))
    assert computed == 36


@given(tile=st.sampled_from([(1, 9), (3, 5), (16, 7), (500, 2)]), words=mask_words())
@settings(max_examples=12)
def test_any_tile_size_agrees(tile: tuple[int, int], words: tuple[str, ...]) -> None:
    """Tiles are how, not what."""
    case = Case(
        "tile", queries=19, keys=23, mask=words, score=("softcap",), sinks=True, dtype=torch.float64
    )
    problem, operands = problem_of(build(case).detached())
    needs = Needs(True, True, True, (), True)
    results = []
    for size in (tile, (128, 128)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "_WHOLE", 8)
            walk = Walk(*size)
            result = tiled.forward(problem, operands, walk=walk)
            grad_out, grad_lse = torch.ones_like(result.out), torch.ones_like(result.lse)
            grads = tiled.backward(problem, operands, result, grad_out, grad_lse, needs, walk=walk)
            results.append([result.out, result.lse, grads.q, grads.k, grads.v, grads.sinks])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected)


def test_gradients_that_nobody_needs_are_not_made() -> None:
    """``needs`` is honoured one by one."""
    case = Case("needs", queries=9, keys=9, score=("bias", "softcap", "bias_keys"), sinks=True)
    problem, operands = problem_of(build(case))
    with torch.no_grad():
        result = tiled.forward(problem, operands)
        grad = torch.ones_like(result.out)
        for wanted in range(6):
            flags = [i == wanted for i in range(6)]
            needs = Needs(flags[0], flags[1], flags[2], tuple(flags[3:5]), flags[5])
            grads = tiled.backward(problem, operands, result, grad, None, needs)
            flat = [*grads[:3], *grads.score_tensors, grads.sinks]
            assert [value is not None for value in flat] == flags
