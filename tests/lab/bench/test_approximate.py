"""The approximate methods: shapes, gradients, padding, and a property of each from its paper."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilelab.peers.approximations import (
    Operands,
    bigbird,
    directions,
    features,
    hashes,
    linear,
    linformer,
    local,
    longformer,
    performer,
    projection,
    reformer,
)
from tilewise import masks, patterns

METHODS: dict[str, Callable[[Operands], Tensor]] = {
    "local": lambda x: local(x, window=5),
    "longformer": lambda x: longformer(x, window=4, tokens=3),
    "bigbird": lambda x: bigbird(x, block=4),
    "linear": linear,
    "performer": lambda x: performer(x, rows=directions(17, x.q.shape[-1])),
    "linformer": lambda x: linformer(x, project=projection(x.length, 8)),
    "reformer": lambda x: reformer(x, chunk=8, buckets=4, rounds=3),
}
WITHOUT_DROPOUT = ("linear", "performer")


def operands(length: int, width: int = 8, dtype: torch.dtype = torch.float32) -> Operands:
    generator = torch.Generator().manual_seed(length)
    sizes = (width, width, width + 1)
    q, k, v = (torch.randn(2, 3, length, n, generator=generator).to(dtype) for n in sizes)
    return Operands(q, k, v)


def exact(x: Operands, mask: Any = None) -> Tensor:
    out: Tensor = tilewise.attention(*x[:3], mask=mask)
    return out


@pytest.mark.parametrize("length", [1, 7, 40, 53])
@pytest.mark.parametrize("name", METHODS)
def test_shape_and_gradient(name: str, length: int) -> None:
    x = operands(length)
    leaves = [each.requires_grad_() for each in x[:3]]
    out = METHODS[name](x)
    assert out.shape == (2, 3, length, 9)
    assert out.isfinite().all()
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert all(grad.isfinite().all() for grad in grads)
    assert grads[2].abs().sum() > 0


@pytest.mark.parametrize("name", METHODS)
def test_gradients_are_those_of_the_function(name: str) -> None:
    leaves = [x[:1, :1].clone().requires_grad_() for x in operands(13, 4, torch.float64)[:3]]
    assert torch.autograd.gradcheck(lambda *x: METHODS[name](Operands(*x)), leaves, atol=1e-4)


@pytest.mark.parametrize("name", METHODS)
def test_padding_is_not_seen(name: str) -> None:
    """What hidden keys hold changes nothing, and those that are there do count."""
    x = operands(40)._replace(keys=torch.arange(40) < 29)
    k, v = x.k, x.v
    before = METHODS[name](x)
    k[:, :, 29:], v[:, :, 29:] = 0.5, 100.0
    after = METHODS[name](x)
    # A Performer's constant is the largest of all keys, and cancels but for rounding.
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    v[:, :, 3] += 1.0
    assert not torch.allclose(METHODS[name](x), after)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in WITHOUT_DROPOUT])
def test_dropout_drops_and_keeps_the_mean(name: str) -> None:
    x = operands(24)
    torch.manual_seed(0)
    draws = [METHODS[name](x._replace(dropout_p=0.5)) for _ in range(300)]
    expected = METHODS[name](x)
    assert not torch.equal(draws[0], draws[1])
    assert (torch.stack(draws).mean(0) - expected).abs().mean() < 0.08


@pytest.mark.parametrize("length", [1, 30, 64, 101])
def test_local_is_attention_in_a_window(length: int) -> None:
    x = operands(length)
    for window in (3, 16, 200):
        expected = exact(x, masks.window(window, window))
        torch.testing.assert_close(local(x, window=window), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [2, 30, 101])
def test_longformer_is_attention_under_its_mask(length: int) -> None:
    x = operands(length)
    for window, tokens in ((4, 3), (3, 11), (50, 2), (8, 0)):
        expected = exact(x, patterns.local_global(window, tokens))
        got = longformer(x, window=window, tokens=tokens)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [3, 40, 101])
def test_bigbird_is_attention_under_its_mask(length: int) -> None:
    x = operands(length)
    for block in (4, 8):
        expected = exact(x, patterns.bigbird(length, block=block))
        got = bigbird(x, block=block)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_linear_attention_is_its_own_quadratic_form() -> None:
    x = operands(33)
    q, k, v = x[:3]
    weights = (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1).mT
    expected = weights / weights.sum(-1, keepdim=True) @ v
    torch.testing.assert_close(linear(x), expected)


def test_performer_features_are_unbiased_and_positive() -> None:
    """Lemma 1: the mean of the features' products is exp(x.y)."""
    x, y = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0)) * 0.6
    rows = directions(60_000, 8)

    def whole(z: Tensor) -> Tensor:  # features without the constant that cancels
        s = z @ rows.mT - z.square().sum(-1, keepdim=True) / 2
        return features(z, rows, together=False) * s.amax(-1, keepdim=True).exp()

    assert (whole(x) > 0).all()
    product = (whole(x) @ whole(y).mT).item()
    assert product == pytest.approx((x @ y.mT).exp().item(), rel=0.03)
    block = directions(8, 8)
    angles = block @ block.mT
    assert angles.fill_diagonal_(0).abs().max() < 1e-4


def test_performer_comes_closer_with_more_features() -> None:
    q, k, v = (each * 0.7 for each in operands(48)[:3])
    x = Operands(q, k, v)
    expected = exact(x)
    errors = [
        (performer(x, rows=directions(count, 8)) - expected).square().mean().item()
        for count in (8, 128, 4096)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.002


def test_linformer_without_compression_is_exact() -> None:
    x = operands(37)
    got = linformer(x, project=torch.eye(37))
    torch.testing.assert_close(got, exact(x), rtol=1e-4, atol=1e-5)
    assert projection(1000, 16).shape == (16, 1000)
    # E^T E is the identity on average (the proof of theorem 2).
    wide = projection(20, 50_000)
    torch.testing.assert_close(wide.mT @ wide, torch.eye(20), rtol=0, atol=0.03)


def test_reformer_with_one_bucket_in_reach_is_exact() -> None:
    x = operands(30)
    for chunk in (30, 64):
        got = reformer(x, chunk=chunk, buckets=1, rounds=2)
        torch.testing.assert_close(got, exact(x), rtol=1e-4, atol=1e-5)


def test_reformer_finds_the_keys_that_matter() -> None:
    """Section 2: nearby vectors share a bucket; with sharp scores these are all that count."""
    q = torch.nn.functional.normalize(operands(64, 16)[0], dim=-1) * 12
    v = operands(64, 16)[2]
    close = reformer(Operands(q, q, v), chunk=16, buckets=4, rounds=8)
    assert (close - exact(Operands(q, q, v))).abs().mean() < 0.02
    assert torch.equal(hashes(q, 8, 1), hashes(q * 3, 8, 1))
    assert hashes(q, 8, 1).max() <= 7
    opposite = (hashes(q, 8, 1) + 4) % 8
    assert torch.equal(hashes(-q, 8, 1), opposite)


def test_costs_are_not_square() -> None:
    """None holds anything of N x N: at 4 times the length, about 4 times the largest tensor."""

    def largest(name: str, length: int) -> int:
        sizes: list[int] = []

        class Spy(torch.overrides.TorchFunctionMode):
            def __torch_function__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                found = func(*args, **(kwargs or {}))
                if isinstance(found, Tensor):
                    sizes.append(found.numel())
                return found

        q, k, v = (each[:1, :1] for each in operands(length)[:3])
        with Spy():
            METHODS[name](Operands(q, k, v))
        return max(sizes)

    for name in METHODS:
        assert largest(name, 1024) <= 5 * largest(name, 256), name
