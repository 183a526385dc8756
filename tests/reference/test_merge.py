"""Merging: equal to attention over all keys at once, associative, neutral, differentiable."""

from __future__ import annotations

import math
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.reference.merge import merge_partial

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


@given(rows=triples)
def test_empty_is_neutral(rows: list[tuple[float, float, float]]) -> None:
    """Merging with a result that saw no key changes nothing, whatever its output holds."""
    some = _partial([row[0] for row in rows], 0, packed=False)
    nothing = torch.full_like(some[0], math.nan), torch.full_like(some[1], -math.inf)
    _close(merge(some, nothing), some)
    _close(merge(nothing, some), some)
    out, lse = merge(nothing, nothing)
    assert bool((out == 0).all())
    assert bool((lse == -math.inf).all())


def test_gradcheck() -> None:
    """In outputs and lse, with a row that one part does not see."""
    outs = [torch.randn(1, 2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rows = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    hidden = torch.zeros(1, 2, 3, dtype=torch.bool)
    hidden[0, 1, 2] = True

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        first = tensors[3].masked_fill(hidden, -math.inf)
        return merge_partial(tensors[:3], (first, *tensors[4:]))

    torch.autograd.gradcheck(function, (*outs, *rows))


def test_no_gradient_is_nan_where_nothing_was_seen() -> None:
    """Rows that no part sees."""
    out = torch.zeros(1, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    lse = torch.full((1, 1, 2), -math.inf, dtype=torch.float64, requires_grad=True)
    merged, merged_lse = merge_partial([out, out], [lse, lse])
    grads = torch.autograd.grad([merged.sum(), merged_lse.exp().sum()], [out, lse])
    assert all(bool((grad == 0).all()) for grad in grads)


def test_wrong_shapes_are_refused() -> None:
    """An output of three dimensions is packed; the rest is in tests/test_merging.py."""
    one = _partial([0.0, 1.0], 0, packed=False)
    with pytest.raises(InvalidArgument, match="packed"):
        merge_partial([one[0][0]], [one[1]])
