"""The eager autograd: which gradients there are, in which shapes, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tests.engine.samples import qkv
from tilewise import scores
from tilewise.errors import Unsupported


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (2, 1, 5, 7), (1, 4, 1, 1), ()])
def test_a_bias_gets_its_gradient_in_its_own_shape(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = qkv(dtype=torch.float64)
    bias = torch.linspace(-1, 1, 280, dtype=torch.float64)[: torch.Size(shape).numel()]
    bias = bias.reshape(shape).requires_grad_()

    def call(bias: Tensor) -> Any:
        return tilewise.attention(q, k, v, score=scores.bias(bias), backend=backend).sin()

    assert torch.autograd.gradcheck(call, (bias,), fast_mode=True)


@pytest.mark.parametrize("wanted", range(3))
def test_one_input_may_want_its_gradient_alone(wanted: int, backend: str) -> None:
    everything = qkv()
    expected = torch.autograd.grad(
        tilewise.attention(*everything, backend=backend).sum(), everything
    )[wanted]
    alone = qkv(grad=False)
    alone[wanted].requires_grad_()
    out = tilewise.attention(*alone, backend=backend)
    out.sum().backward()
    assert [tensor.grad is not None for tensor in alone] == [i == wanted for i in range(3)]
    torch.testing.assert_close(alone[wanted].grad, expected)


def test_only_sinks_may_want_a_gradient(backend: str) -> None:
    sinks = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    tilewise.attention(*qkv(False), sinks=sinks, backend=backend).sum().backward()
    assert sinks.grad is not None
    assert (sinks.grad.shape, sinks.grad.dtype) == ((4,), torch.bfloat16)


def test_lse_alone_may_be_used(backend: str) -> None:
    q, k, v = qkv()
    result = tilewise.attention(q, k, v, return_lse=True, backend=backend)
    result.lse.sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert q.grad.abs().sum() > 0
    assert v.grad is None or not v.grad.any()


def test_one_tensor_as_q_k_and_v_collects_all_three(backend: str) -> None:
    x = qkv()[0]
    twins = [x.detach().clone().requires_grad_() for _ in range(3)]
    tilewise.attention(x, x, x, backend=backend).sum().backward()
    tilewise.attention(*twins, backend=backend).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, sum(twin.grad for twin in twins))


def test_which_statistics_have_a_gradient(backend: str) -> None:
    result = tilewise.attention(*qkv(), return_stats="top1", backend=backend)
    assert result.lse is None
    assert [x.requires_grad for x in result.stats] == [False, True, True, False]


def test_the_second_derivative_of_the_entropy_is_refused(backend: str) -> None:
    q, k, v = qkv()
    stats = tilewise.attention(q, k, v, return_stats=True, backend=backend).stats
    with pytest.raises(Unsupported, match="no second derivative and no batched gradient"):
        torch.autograd.grad(stats.entropy.sum(), q, create_graph=True)


def test_changing_an_input_in_place_is_noticed(backend: str) -> None:
    q, k, v = qkv()
    doubled = k * 2
    out = tilewise.attention(q, doubled, v, backend=backend)
    doubled.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_without_gradients_no_graph_is_built(backend: str) -> None:
    with torch.no_grad():
        assert not tilewise.attention(*qkv(), backend=backend).requires_grad
    assert not tilewise.attention(*qkv(False), backend=backend).requires_grad


def test_the_sign_flag_of_a_conjugate_is_seen(backend: str) -> None:
    q, k, v = qkv(False)
    flagged = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert flagged.is_neg()
    out = tilewise.attention(flagged, k, v, backend=backend)
    assert torch.equal(out, tilewise.attention(q, k, v, backend=backend))


def test_gradients_that_are_expanded_or_transposed_are_read_right(backend: str) -> None:
    q, k, v = qkv()
    out = tilewise.attention(q, k, v, backend=backend)
    weights = torch.randn(out.transpose(2, 3).shape).transpose(2, 3)
    for grad in (torch.ones(()).expand(out.shape), weights):
        found = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        wanted = torch.autograd.grad(out, (q, k, v), grad.contiguous(), retain_graph=True)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
