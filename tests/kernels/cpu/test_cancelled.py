"""Gradients that cancel: exactly 0 where one key, or one value, has all of a row; and in tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.plain import attend
from tilewise import masks, scores

pytestmark = pytest.mark.usefixtures("isa")
HALF = torch.float16
# One block of keys, which sums delta itself, and several, which take it from the output.
LENGTHS = (1, 150, 300)


def _operands(dtype: torch.dtype, queries: int, keys: int) -> list[Tensor]:
    """q, k, v with gradients, and the gradient of out; values so wide that their products round."""
    generator = torch.Generator().manual_seed(keys)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)

    q, k = drawn(1, 2, queries, 20), drawn(1, 2, keys, 20)
    v, grad = drawn(1, 2, keys, 200), drawn(1, 2, queries, 200)
    return [q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), grad]


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("dtype", [HALF, torch.float32, torch.float64], ids=str)
def test_one_key_with_dropout_gives_scores_no_gradient(dtype: torch.dtype, keys: int) -> None:
    q, k, v, grad = _operands(dtype, 9, keys)
    mask = masks.function(lambda b, h, m, n: n == m * (keys // 9))
    out = tilewise.attention(q, k, v, mask=mask, dropout_p=0.6, seed=3, backend="cpu")
    of_q, of_k, of_v = torch.autograd.grad(out, [q, k, v], grad)
    assert bool((of_q == 0).all())
    assert bool((of_k == 0).all())
    assert bool((of_v != 0).any()), "something was kept"


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("dtype", [HALF, torch.float32, torch.float64], ids=str)
def test_one_key_leaves_the_gradient_of_lse_whole(dtype: torch.dtype, keys: int) -> None:
    """The score gets the gradient of lse to the bit, however large that of the output is."""
    q, k, v, grad = _operands(dtype, 9, keys)
    q = torch.zeros_like(q).requires_grad_()
    mask = masks.function(lambda b, h, m, n: n == m * (keys // 9))
    result = tilewise.attention(q, k, v, mask=mask, scale=1.0, return_lse=True, backend="cpu")
    third = torch.full_like(result.lse, 1 / 3000)
    (got,) = torch.autograd.grad([result.out, result.lse], [q], [grad, third])
    places = torch.arange(9) * (keys // 9)
    seen = k.detach()[:, :, places.clamp(max=keys - 1)].to(third.dtype) * third[..., None]
    assert torch.equal(got, torch.where((places < keys)[:, None], seen, 0).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_equal_values_give_scores_no_gradient(dtype: torch.dtype) -> None:
    """Sixteen keys with one value: the sum of their dP / 16 is dP, to the bit."""
    q, k, v, grad = _operands(dtype, 40, 16)
    q = torch.zeros_like(q).requires_grad_()  # so each key has 1 / 16 exactly
    v = v.detach()[:, :, :1].expand_as(v).clone().requires_grad_()
    out = tilewise.attention(q, k, v, backend="cpu")
    (of_q,) = torch.autograd.grad(out, [q], grad)
    assert bool((of_q == 0).all())


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("queries", [3, 70])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equal_values_leave_no_rounding(dtype: torch.dtype, queries: int, keys: int) -> None:
    """The gradients of q and k are 0, and dP, some 14 here, leaves no rounding in them."""
    q, k, v, grad = _operands(dtype, queries, keys)
    v = v.detach()[:, :, :1].expand_as(v).requires_grad_()
    out = tilewise.attention(q, k, v, backend="cpu")
    for gradient in torch.autograd.grad(out, [q, k], grad):
        assert gradient.abs().max().item() < 1e-12


def test_few_queries_with_peaked_probabilities() -> None:
    """One query a head and keys of one number: dQ has the error of delta times the top key.

    The errors of 160 rows are taken together, because single rows say little.
    """
    generator = torch.Generator().manual_seed(5)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    # Forty calls.
    q, k = 6 * drawn(40, 1, 4, 1, 1), 6 * drawn(40, 1, 4, 619, 1)
    v, grad = drawn(40, 1, 4, 619, 160), drawn(40, 1, 4, 1, 160)

    def gradient(attend: Any, dtype: torch.dtype) -> Tensor:
        found: list[Tensor] = []
        for call in zip(q, k, v, grad, strict=True):
            one, *others, loss = (x.to(dtype) for x in call)
            one = one.requires_grad_()
            found += torch.autograd.grad(attend(one, *others), [one], loss)
        return torch.stack(found)

    def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, backend="cpu")

    errors = [
        gradient(one, torch.float32) - gradient(plain, torch.float64) for one in (ours, plain)
    ]
    actual, allowed = (error.square().mean().sqrt().item() for error in errors)
    assert actual < 1.5 * allowed


def test_first_rows_of_a_causal_mask() -> None:
    """The error of delta, from an output of 160 numbers, is not in dQ of rows with 2 to 8 keys."""
    generator = torch.Generator().manual_seed(5)
    widths = (16, 16, 160, 160)
    lengths = (20, 300, 300, 20)  # more keys than a block has, and queries than few are
    sizes = zip(lengths, widths, strict=True)
    q, k, v, grad = (torch.randn(1, 200, *size, generator=generator) for size in sizes)

    def gradient(dtype: torch.dtype, plain: bool) -> Tensor:
        leaf, *others, loss = (x.to(dtype) for x in (q, k, v, grad))
        leaf.requires_grad_()
        if plain:
            out = attend(leaf, *others, mask=lambda b, h, m, n: n <= m).out
        else:
            mask = masks.causal("top_left")
            out = tilewise.attention(leaf, *others, mask=mask, backend="cpu")
        return torch.autograd.grad(out, [leaf], loss)[0][:, :, 1:8]

    truth = gradient(torch.float64, True)
    errors = [gradient(torch.float32, plain) - truth for plain in (False, True)]
    actual, allowed = (error.square().mean().sqrt().item() for error in errors)
    assert actual < 0.85 * allowed, actual / allowed


@pytest.mark.parametrize("keys", LENGTHS)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("gain", [1.0, 6.0])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
def test_wide_tables_do_not_see_the_rounded_output(
    dtype: torch.dtype, gain: float, sink: bool, keys: int
) -> None:
    """A float32 table of a 16-bit call: a factor, a summand whose gradient is 0, and a bias.

    delta from the stored output would leave the summand an error of some 2**-8 a row.
    """
    q, k, v, grad = (x.detach() for x in _operands(dtype, 70, keys))
    q = (q * gain).to(dtype)
    factor, summand = torch.ones(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    bias = torch.zeros(1, 2, 1, keys, requires_grad=True)
    tables = (factor, summand, bias)
    sinks = torch.full((2,), 0.5) if sink else None
    chain: Any = [lambda s, b, h, m, n: s * factor[h] + summand[h], scores.bias(bias)]
    out = tilewise.attention(q, k, v, score=chain, sinks=sinks, scale=0.2, backend="cpu")
    got = torch.autograd.grad(out, tables, grad)

    wide = [table.detach().double().requires_grad_() for table in tables]
    plain = attend(
        *(x.double() for x in (q, k, v)),
        scale=0.2,
        score=lambda s, b, h, m, n: s * wide[0][h] + wide[1][h] + wide[2],
        sinks=sinks,
    )
    true = torch.autograd.grad(plain.out, wide, grad.double())
    for one, other, name in zip(got, true, ("factor", "summand", "bias"), strict=True):
        # What adds up: 70 rows of |dP|, which is some 14 here, times the score for the factor.
        size = 70 * 14 * (plain.s.abs().max().item() if name == "factor" else 1.0)
        assert (one - other).abs().max().item() < 2e-5 * size, name
