"""Dropout: the very mask that Philox says, everywhere and in the backward too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS
from tests.kernels.targets import Target
from tilewise import masks
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


@pytest.mark.parametrize(
    ("seed", "p"),
    [(0, 0.3), (1, 0.0001), (2**32, 0.1), (2**63 - 1, 0.5), (0x1234_5678_9ABC_DEF0, 0.999)],
)
def test_mask_is_philox(target: Target, seed: int, p: float) -> None:
    """Bit for bit, with the kept ones scaled by 1 / (1 - p)."""
    out = kept(37, 203, target.backend, dropout_p=p, seed=seed)
    mask = expected(seed, p, 37, 203)
    assert bool(((out > 0) == mask).all())
    torch.testing.assert_close(out[mask], torch.full_like(out[mask], 1 / 203 / (1 - p)))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_mask_is_the_same_in_every_dtype(target: Target, dtype: torch.dtype) -> None:
    """The counter knows nothing of dtypes."""
    out = kept(129, 65, target.backend, dtype, dropout_p=0.5, seed=7)
    assert bool(((out > 0) == expected(7, 0.5, 129, 65)).all())


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
