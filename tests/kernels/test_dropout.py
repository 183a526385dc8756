"""Dropout: the very mask that Philox says, everywhere and in the backward too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS
from tests.kernels.targets import Target
from tilewise import masks
from tilewise.problem import Needs, Operands
from tilewise.reference.philox import keep_mask


def kept(
    queries: int, keys: int, backend: str, dtype: torch.dtype = torch.float32, **keywords: object
) -> Tensor:
    """The mask that a backend drops with, read off uniform weights over an identity of values."""
    batch, heads = 2, 3
    q = torch.zeros(batch, heads, queries, 8, dtype=dtype)
    k = torch.zeros(batch, heads, keys, 8, dtype=dtype)
    v = torch.eye(keys, dtype=dtype).expand(batch, heads, keys, keys)
    out: Tensor = tilewise.attention(q, k, v, backend=backend, **keywords)  # type: ignore[arg-type]
    return out


def expected(seed: int, p: float, queries: int, keys: int) -> Tensor:
    """The reference's mask for the shape of ``kept``."""
    return keep_mask(
        seed, p, batches=range(2), heads=range(3), queries=range(queries), keys=range(keys)
    )


SEEDS = [(0, 0.3), (1, 0.0001), (2**32, 0.1), (2**63 - 1, 0.5), (0x1234_5678_9ABC_DEF0, 0.999)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("seed", "p"), SEEDS)
def test_mask_is_philox(target: Target, seed: int, p: float, dtype: torch.dtype) -> None:
    """Bit for bit in every dtype, with the kept ones scaled by 1 / (1 - p)."""
    out = kept(129, 203, target.backend, dtype, dropout_p=p, seed=seed)
    mask = expected(seed, p, 129, 203)
    assert bool(((out > 0) == mask).all())
    torch.testing.assert_close(out[mask], torch.full_like(out[mask], 1 / 203 / (1 - p)))


def check_part(backend: str, queries: int, origin: tuple[int, int, int, int]) -> None:
    """A part of a longer call drops what the call drops there, forward and backward.

    Values are an identity, so that the output and the gradient of v show the mask.
    """
    keys, p, seed = 93, 0.4, 0x1234_5678_9ABC_DEF0
    q, k = torch.zeros(2, 3, queries, 8), torch.zeros(2, 3, keys, 8)
    v = torch.eye(keys).expand(2, 3, keys, keys)
    plan = tilewise.plan(q, k, v, backend=backend, dropout_p=p)
    operands = Operands(q, k, v, seed=seed, origin=origin, for_backward=queries > 8)
    result = plan.forward(operands)
    item, head, row, key = origin
    places = ((item, 2), (head, 3), (row, queries), (key, keys))
    spans = [range(first, first + count) for first, count in places]
    names = ("batches", "heads", "queries", "keys")
    mask = keep_mask(seed, p, **dict(zip(names, spans, strict=True)))
    assert bool(((result.out > 0) == mask).all())
    ones = torch.ones_like(result.out)
    grads = plan.backward(operands, result, ones, None, Needs(False, False, True))
    # Each key's value is weighted by how many rows keep it.
    weights = mask.sum(2)[..., None] / keys / (1 - p)
    torch.testing.assert_close(grads.v, weights.expand_as(grads.v).float())


# Where a word of four keys begins, and within one; few rows, which have a kernel of their own.
ORIGINS = ((0, 0, 0, 8), (3, 0, 0, 0), (1, 2, 37, 5), (0, 5, 64, 3), (0, 0, 2**31, 2**20 + 2))


@pytest.mark.parametrize("origin", ORIGINS, ids=str)
@pytest.mark.parametrize("queries", [3, 70])
def test_a_part_drops_what_the_whole_drops(
    target: Target, queries: int, origin: tuple[int, int, int, int]
) -> None:
    check_part(target.backend, queries, origin)


def test_mask_is_the_same_under_a_mask(target: Target) -> None:
    """Skipped tiles do not shift the counter."""
    out = kept(300, 300, target.backend, dropout_p=0.4, seed=11, mask=masks.window(5, 0))
    band = torch.ones(300, 300, dtype=torch.bool).tril().triu(-5)
    assert bool(((out > 0) == (expected(11, 0.4, 300, 300) & band)).all())


def test_varlen_counts_within_sequences(target: Target) -> None:
    """b is the sequence's index, m and n start again in each."""
    lengths = ((5, 9), (0, 4), (70, 33))
    cu_q = torch.tensor([0, 5, 5, 75])
    cu_k = torch.tensor([0, 9, 13, 46])
    q, k = torch.zeros(75, 2, 8), torch.zeros(46, 2, 8)
    v = torch.zeros(46, 2, 33)
    for start, (_, n) in zip(cu_k.tolist(), lengths, strict=False):
        v[start : start + n, :, :n] = torch.eye(n)[:, None]
    out = tilewise.attention_varlen(
        q, k, v, cu_q, cu_k, dropout_p=0.3, seed=5, backend=target.backend
    )
    for b, (m, n) in enumerate(lengths):
        mask = keep_mask(
            5, 0.3, batches=range(b, b + 1), heads=range(2), queries=range(m), keys=range(n)
        )
        rows = out[int(cu_q[b]) : int(cu_q[b]) + m, :, :n].transpose(0, 1)
        assert bool(((rows > 0) == mask[0]).all())
