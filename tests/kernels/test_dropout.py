"""Dropout: the very mask that Philox says, everywhere and in the backward too."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS
from tests.kernels.targets import Target
from tilewise import masks
from tilewise.reference.philox import keep_mask

SEEDS = (0, 1, 2**32, 2**63 - 1, 0x1234_5678_9ABC_DEF0)


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


@pytest.mark.parametrize("seed", SEEDS)
def test_mask_is_philox(target: Target, seed: int) -> None:
    """Bit for bit, with the kept ones scaled by 1 / (1 - p)."""
    out = kept(37, 203, target.backend, dropout_p=0.3, seed=seed)
    mask = expected(seed, 0.3, 37, 203)
    assert bool(((out > 0) == mask).all())
    torch.testing.assert_close(out[mask], torch.full_like(out[mask], 1 / 203 / 0.7))


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


@pytest.mark.parametrize("p", [0.0001, 0.1, 0.5, 0.999])
def test_rate_is_binomial(target: Target, p: float) -> None:
    """Dropped about as often as asked: within five standard deviations."""
    out = kept(400, 500, target.backend, dropout_p=p, seed=123)
    dropped, count = int((out == 0).sum()), out.numel()
    assert abs(dropped - p * count) < 5 * math.sqrt(p * (1 - p) * count)


def test_backward_uses_the_same_mask(target: Target) -> None:
    """The gradient of v is the transposed dropped weights."""
    queries, keys = 70, 133
    q, k = torch.zeros(2, 3, queries, 8), torch.zeros(2, 3, keys, 8)
    v = torch.zeros(2, 3, keys, queries, requires_grad=True)
    out = tilewise.attention(q, k, v, dropout_p=0.3, seed=9, backend=target.backend)
    (grad,) = torch.autograd.grad(out, v, torch.eye(queries).expand_as(out))
    mask = expected(9, 0.3, queries, keys).mT
    assert bool(((grad > 0) == mask).all())
    torch.testing.assert_close(grad[mask], torch.full_like(grad[mask], 1 / keys / 0.7))


def test_lse_sees_the_undropped(target: Target) -> None:
    """Dropout comes after the softmax."""
    q, k, v = (torch.randn(1, 2, 33, 16) for _ in range(3))
    dropped = tilewise.attention(
        q, k, v, dropout_p=0.5, seed=1, return_lse=True, backend=target.backend
    )
    whole = tilewise.attention(q, k, v, return_lse=True, backend=target.backend)
    assert torch.equal(dropped.lse, whole.lse)


def test_seed(target: Target) -> None:
    """A seed repeats; another differs; None draws from torch's generator."""
    q, k, v = (torch.randn(1, 2, 65, 16) for _ in range(3))

    def call(seed: int | None) -> Tensor:
        out: Tensor = tilewise.attention(q, k, v, dropout_p=0.5, seed=seed, backend=target.backend)
        return out

    assert torch.equal(call(3), call(3))
    assert not torch.equal(call(3), call(4))
    assert not torch.equal(call(3), call(3 + 2**32))
    torch.manual_seed(0)
    first, second = call(None), call(None)
    torch.manual_seed(0)
    assert torch.equal(first, call(None))
    assert not torch.equal(first, second)


def test_mean_over_seeds_is_the_undropped(target: Target) -> None:
    """Kept weights are scaled so that the expectation stays."""
    q, k, v = (torch.randn(1, 1, 20, 8) for _ in range(3))
    whole = tilewise.attention(q, k, v, backend=target.backend)
    runs = [
        tilewise.attention(q, k, v, dropout_p=0.5, seed=seed, backend=target.backend)
        for seed in range(300)
    ]
    stack = torch.stack(runs)
    spread = stack.std(0) / math.sqrt(len(runs))
    assert bool(((stack.mean(0) - whole).abs() < 5.5 * spread).all())
