"""The plain mathematics: against torch, against loops, and its gradients by gradcheck."""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import TABLE, Case, build, mask_words
from tests.extended import extended, has_extended_precision
from tests.oracle import problem_of
from tilelab.cases.dense import dense
from tilewise.problem import Needs
from tilewise.reference import tiled, tiles
from tilewise.reference.blocks import Block, Walk
from tilewise.reference.merge import merge_partial
from tilewise.reference.programs import Cover, cover, visible


def _case(name: str) -> Case:
    return next(case for case in TABLE if case.name == name).of(torch.float64)


@pytest.mark.skipif(not has_extended_precision(), reason="long double is float64 here")
def test_extended_is_more_precise() -> None:
    """Its rounding is far below float64's: the softmax of a constant row is exact to 1e-18."""
    inputs = build(Case("extended", queries=3, keys=3, dtype=torch.float64, scale=0.0))
    result = extended(*problem_of(inputs))
    mean = inputs.v.detach().numpy().astype("longdouble").mean(axis=2, keepdims=True)
    assert float(abs(result.out - mean).max()) < 1e-18
    assert result.grads is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_in_any_dtype(dtype: torch.dtype) -> None:
    """The plain implementation keeps to its dtype, and near the oracle."""
    inputs = build(_case("causal").of(dtype))
    problem, operands = problem_of(inputs)
    result, truth = dense(problem, operands, dtype=dtype), dense(problem, operands)
    assert result.out.dtype == result.lse.dtype == dtype
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.out.double(), truth.out, atol=rounding, rtol=rounding)


# ---- The tiled algorithm: its tile covers, and that what it skips and keeps is right.


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


# ---- Merging: equal to attention over all keys at once, associative, neutral, differentiable.


lses = st.one_of(st.just(-math.inf), st.floats(-1e4, 1e4), st.floats(-3, 3))


Partial: TypeAlias = tuple[Tensor, Tensor]


def _partial(lse: list[float], seed: int, packed: bool) -> Partial:
    """A result over some keys: random rows, zero where the lse says that there was no key."""
    generator = torch.Generator().manual_seed(seed)
    row_lse = torch.tensor(lse, dtype=torch.float64)
    out = torch.randn(len(lse), 3, generator=generator, dtype=torch.float64)
    out = torch.where(row_lse[:, None] == -math.inf, 0.0, out)
    if packed:  # out [T, H, Dv], lse [H, T]
        return out[:, None], row_lse[None]
    return out[None, None], row_lse[None, None]


def merge(*results: Partial) -> Partial:
    return merge_partial(*zip(*results, strict=True))


def _close(got: Partial, expected: Partial) -> None:
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)


triples = st.lists(st.tuples(lses, lses, lses), min_size=1, max_size=5)


@given(rows=triples, packed=st.booleans())
def test_associative_and_commutative(rows: list[tuple[float, float, float]], packed: bool) -> None:
    """Any order and any grouping, rows without a key included."""
    a, b, c = (_partial([row[i] for row in rows], i, packed) for i in range(3))
    together = merge(a, b, c)
    _close(merge(merge(a, b), c), together)
    _close(merge(a, merge(b, c)), together)
    _close(merge(c, a, b), together)
