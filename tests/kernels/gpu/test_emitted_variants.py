"""Emitted masks and scores of whole variants, and their ranges, against the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu import emitted as run
from tests.kernels.gpu.emitted import emitted, problem, reference, value
from tests.variants.calls import Call
from tests.variants.drawn import SHAPES, Extents, expressions
from tests.variants_catalogue import CATALOGUE, Sizes, Variant
from tilelab.cases.variants import MASKS, SCORES, Draw
from tilewise.reference.blocks import Block
from tilewise.reference.programs import apply_score, visible
from tilewise.variants.derive import differentiate
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.program import Program, fitted
from tilewise.variants.program import decode as program_of
from tilewise.variants.recognise import as_expression

_CPU = torch.device("cpu")
_CALLS = (
    Extents(2, 4, 19, 23),
    pytest.param(Extents(1, 2, 53, 37), marks=pytest.mark.slow),
    pytest.param(Extents(3, 1, 1, 70), marks=pytest.mark.slow),
)


def _whole(extents: Extents) -> Block:
    B, H, M, N = extents
    return Block(range(M), range(N), M, N, range(B), range(H))


@pytest.mark.parametrize("extents", _CALLS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_built_in_masks(name: str, extents: Extents) -> None:
    """Every pair as the reference has it, and no pair outside of the ranges."""
    generator = torch.Generator().manual_seed(7)
    mask = MASKS[name](Draw(*extents, extents.keys, torch.float32, _CPU, generator))
    tensors = lower_mask(mask.program, mask.captured, Extent(*extents), _CPU)
    _check_mask(mask.program, extents, tensors)


def test_blocks() -> None:
    """A boolean per rectangle, in kernel form, and a table that changes nothing."""
    extents = Extents(2, 2, 19, 23)
    table = torch.rand(2, 1, 5, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    known = torch.ones(1, 1, 2, 2, dtype=torch.uint8)
    mask = program_of("blocks(4,6)[0] band(9,2,1) or tiles(16,16,0,0,19,23,0)[1]")
    _check_mask(mask, extents, [table, known])


def _check_mask(mask: Program, extents: Extents, tensors: Sequence[Tensor]) -> Tensor:
    """The emitted mask is the reference's, and fits its ranges; which pairs it shows."""
    variant = emitted(problem(extents, mask), tensors)
    expected = visible(mask, tensors, _whole(extents), _CPU).expand(*extents)
    assert torch.equal(run.seen(variant.seen, extents, tensors), expected)
    _check_ranges(variant, extents, tensors, expected)
    return expected


@pytest.mark.parametrize("extents", _CALLS, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_built_in_scores(name: str, extents: Extents) -> None:
    """Captured tensors in half precision where a call leaves them so."""
    generator, dtype = torch.Generator().manual_seed(7), torch.bfloat16
    score = SCORES[name](Draw(*extents, extents.keys, dtype, _CPU, generator))
    tensors = lower_score(score.program, score.captured, Extent(*extents), dtype, _CPU)
    tensors = tuple([tensor.detach() for tensor in tensors])
    variant = emitted(problem(extents, (), score.program), (), tensors)
    s = torch.randn(*extents, generator=generator) * 4
    expected, _ = apply_score(score.program, tensors, s, _whole(extents))
    found = run.scored(variant.score, extents, tensors, s)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


# ---- ranges


def _check_ranges(variant: Any, extents: Extents, tensors: Sequence[Tensor], shown: Tensor) -> None:
    """Of runs of queries and of keys, against what the mask says of every pair."""
    some, every = shown.any(1), shown.all(1)  # [B, M, N]
    for function, size, visible_pairs, all_pairs in (
        (variant.keys_of, extents.queries, some, every),
        (variant.queries_of, extents.keys, some.mT, every.mT),
    ):
        found = run.ranges(function, extents, tensors, size, longest=2)
        for b, first, more in np.ndindex(*found.shape[:3]):
            low, full_low, full_high, high = found[b, first, more].tolist()
            assert 0 <= low <= full_low <= full_high <= high <= visible_pairs.shape[2]
            rows = slice(first, min(first + more + 1, size))
            assert not visible_pairs[b, rows, :low].any()
            assert not visible_pairs[b, rows, high:].any()
            assert all_pairs[b, rows, full_low:full_high].all()


@pytest.mark.parametrize(
    ("program", "extents", "row", "expected"),
    [
        ("band(-1,0,1)", Extents(1, 1, 5, 9), 2, (0, 0, 7, 7)),
        ("band(2,1,0)", Extents(1, 1, 9, 9), 4, (2, 2, 6, 6)),
        ("band(2,1,0)", Extents(1, 1, 9, 9), 8, (6, 6, 9, 9)),
        ("band(-1,0,0) below(4) or", Extents(1, 1, 9, 9), 1, (0, 0, 4, 4)),
        ("band(-1,0,0) below(4) or", Extents(1, 1, 9, 9), 6, (0, 0, 7, 7)),
        ("band(-1,0,0) below(4) and", Extents(1, 1, 9, 9), 6, (0, 0, 4, 4)),
        ("band(-1,0,0) not", Extents(1, 1, 9, 9), 6, (0, 0, 0, 9)),
        ("band(0,0,0) below(0) or", Extents(1, 1, 9, 9), 6, (6, 6, 7, 7)),
        ("band(1099511627776,0,0)", Extents(1, 1, 9, 9), 6, (0, 0, 7, 7)),
        ("band(2,0,0)", Extents(1, 1, 9, 2**24), 6, (4, 4, 7, 7)),
    ],
)
def test_ranges_are_tight(
    program: str, extents: Extents, row: int, expected: tuple[int, ...]
) -> None:
    """Of one query: exactly the keys that it sees, where the mask is bands and lengths."""
    variant = emitted(problem(extents, program_of(program)))
    found = run.ranges(variant.keys_of, extents, (), extents.queries, longest=1)
    assert tuple(found[0, row, 0].tolist()) == expected


# ---- the catalogue


@pytest.mark.parametrize("variant", CATALOGUE, ids=str)
def test_catalogue(variant: Variant) -> None:
    """Masks bit for bit; scores and all of their derivatives."""
    _check_call(Call(variant, torch.float32, Sizes(2, 4, 19, 23)))


@pytest.mark.slow
@pytest.mark.parametrize("variant", CATALOGUE, ids=str)
@pytest.mark.parametrize("sizes", [Sizes(), Sizes(1, 4, 1, 40), Sizes(3, 4, 70, 17)], ids=str)
def test_catalogue_in_other_sizes(variant: Variant, sizes: Sizes) -> None:
    """One row, and more of either."""
    _check_call(Call(variant, torch.float32, sizes))


def _check_call(call: Call) -> None:
    problem, operands = call.asked()
    extents = Extents(problem.batch, problem.heads, problem.queries, problem.keys)
    seen = torch.ones(*extents, dtype=torch.bool)
    if problem.mask:
        seen = _check_mask(problem.mask, extents, operands.mask_tensors)
    if problem.score:
        tensors = [tensor.detach() for tensor in operands.score_tensors]
        _check_derivatives(problem.score, extents, tensors, seen)


def _check_derivatives(
    score: Program, extents: Extents, tensors: Sequence[Tensor], seen: Tensor
) -> None:
    """The score and every derivative against float64, as far as float32 in torch comes near it."""
    variant = emitted(problem(extents, (), score), (), tensors)
    whole = differentiate(as_expression(fitted(score), [tensor.dim() for tensor in tensors])).expr
    s = torch.randn(*extents, generator=torch.Generator().manual_seed(2)) * 3
    wide = [each.double() if each.is_floating_point() else each for each in tensors]
    exact = reference(whole, extents, wide, s, torch.float64)
    near = reference(whole, extents, tensors, s)
    functions = (variant.score, variant.gain, *variant.loads)
    for function, wanted, torch_has in zip(functions, exact, near, strict=True):
        if function is None:
            assert (wanted == 1).all()
            continue
        found = run.scored(function, extents, tensors, s).double()
        known = seen & wanted.isfinite()
        error = (torch_has - wanted)[known].abs().amax()
        allowed = float(2 * error + 1e-6 * wanted[known].abs().amax())
        torch.testing.assert_close(found[seen], wanted[seen], rtol=1e-6, atol=allowed)


# ---- drawn expressions

_SLOTS = ("int", "bool", "int", "float", "int", "float")


def _tables(seed: int) -> list[Tensor]:
    """A captured tensor for each slot; floats are multiples of a quarter."""
    generator = torch.Generator().manual_seed(seed)
    tables = []
    for slot, kind in enumerate(_SLOTS):
        table = torch.randint(-8, 9, SHAPES[slot % len(SHAPES)], generator=generator)
        tables.append(table > 0 if kind == "bool" else table / 4 if kind == "float" else table)
    return tables


@settings(max_examples=40)
@given(st.data(), st.integers(0, 99))
def test_drawn_masks(data: st.DataObject, seed: int) -> None:
    """Of integers and booleans: bit for bit."""
    expr = data.draw(expressions("bool", kinds=_SLOTS, floats=False))
    (expected,) = reference(expr, Extents(), _tables(seed))
    assert torch.equal(value(expr, Extents(), _tables(seed)), expected)


@settings(max_examples=40)
@given(st.data(), st.integers(0, 99))
def test_drawn_scores(data: st.DataObject, seed: int) -> None:
    """Where float32 in torch is near float64, so is the kernel."""
    extents, loads = Extents(), _tables(seed)
    expr = data.draw(expressions("float", kinds=_SLOTS, with_s=True))
    s = torch.randint(-8, 9, tuple(extents), generator=torch.Generator().manual_seed(seed)) / 4
    found = value(expr, extents, loads, s).double()
    (near,) = reference(expr, extents, loads, s)
    wide = [each.double() if each.is_floating_point() else each for each in loads]
    (exact,) = reference(expr, extents, wide, s, torch.float64)
    stable = exact.isfinite() & (exact.abs() < 1e30) & ((near - exact).abs() <= 1e-6 * exact.abs())
    torch.testing.assert_close(found[stable], exact[stable], rtol=1e-4, atol=1e-5)
