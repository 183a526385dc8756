"""Gradients that cancel: dP - delta is exactly 0 where one key, or one value, has all of a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise import masks

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
