"""Forward mode, torch.func and the second derivative through the public calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import tilewise
from tests.engine.samples import packed, qkv
from tests.plain import attend
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, Unsupported

# torch's own, when forward mode first runs.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")

Function = Callable[..., Any]
DOUBLE = torch.float64


def _leaf(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=DOUBLE).requires_grad_()


def _everything(backend: str) -> tuple[Function, tuple[Tensor, ...]]:
    """out and lse of q, k, v, a bias and sinks, with grouped heads, dead rows and dropout."""
    slopes = torch.tensor([0.1, 0.4, 0.2, 0.3])

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor) -> Any:
        found = tilewise.attention(
            q,
            k,
            v,
            mask=masks.window(3, 1) & masks.lengths(torch.tensor([5, 7])),
            score=[
                scores.softcap(1.3),
                scores.bias(bias),
                scores.alibi(slopes),
                scores.softcap(2.0),
            ],
            sinks=sinks,
            dropout_p=0.3,
            seed=5,
            return_lse=True,
            backend=backend,
        )
        return found.out, found.lse

    return call, (*qkv(dtype=DOUBLE), _leaf(4, 1, 7), _leaf(4))


@pytest.mark.parametrize("of", ["cpu", pytest.param("tiled", marks=pytest.mark.slow)])
def test_gradgradcheck_of_everything_at_once(of: str, backend: str) -> None:
    """By q, k, v, a bias, sinks and the cotangents; through out and lse; with dropout."""
    call, arguments = _everything(backend if of == "cpu" else of)
    assert torch.autograd.gradcheck(call, arguments, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, arguments, check_fwd_over_rev=True, fast_mode=True)


def test_gradgradcheck_of_varlen(backend: str) -> None:
    q, k, v, cu_q, cu_k = packed()
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in (q, k, v))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        found = tilewise.attention_varlen(
            q, k, v, cu_q, cu_k, mask=masks.causal(), return_lse=True, backend=backend
        )
        return found.out, found.lse

    assert torch.autograd.gradcheck(call, wide, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, wide, check_fwd_over_rev=True, fast_mode=True)


def test_the_gradient_of_a_tangent(backend: str) -> None:
    """Reverse mode over forward mode, by the operands and by their tangents."""
    call, arguments = _everything(backend)
    toward = tuple(_leaf(*tensor.shape) for tensor in arguments)

    def tangent(*both: Tensor) -> Any:
        half = len(arguments)
        return torch.func.jvp(call, both[:half], both[half:])[1]

    assert torch.autograd.gradcheck(tangent, (*arguments, *toward), fast_mode=True)


Q, K, V = qkv(grad=False, dtype=DOUBLE)
U = torch.linspace(-1, 1, Q.numel(), dtype=DOUBLE).view_as(Q)


def _plain(q: Tensor) -> Tensor:
    """Causal attention of grouped heads in plain torch."""
    return attend(q, K, V, mask=lambda b, h, m, n: n <= m + 2).out


def _scalar(f: Function) -> Function:
    return lambda q: f(q).sin().sum()


def _forward_ad(f: Function) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(Q, U)
        return tuple(forward_ad.unpack_dual(f(dual)))


func, functional = torch.func, torch.autograd.functional
TRANSFORMS: dict[str, Callable[[Function], Any]] = {
    "jvp": lambda f: func.jvp(f, (Q,), (U,)),
    "forward_ad": _forward_ad,
    "grad": lambda f: func.grad(_scalar(f))(Q),
    "grad_and_value": lambda f: func.grad_and_value(_scalar(f))(Q),
    "vjp": lambda f: func.vjp(f, Q)[1](torch.ones(2, 4, 5, 6, dtype=DOUBLE)),
    "jacrev by rows": lambda f: func.jacrev(f, chunk_size=1)(Q),
    "forward over reverse": lambda f: func.jvp(func.grad(_scalar(f)), (Q,), (U,)),
    "reverse over forward": lambda f: func.grad(lambda q: func.jvp(_scalar(f), (q,), (U,))[1])(Q),
    "reverse over reverse": lambda f: func.vjp(func.grad(_scalar(f)), Q)[1](U),
    "functional.jvp": lambda f: functional.jvp(f, Q, U),
    "functional.hvp": lambda f: functional.hvp(_scalar(f), Q, U),
    "functional.vhp": lambda f: functional.vhp(_scalar(f), Q, U),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_give_what_plain_torch_gives(name: str, backend: str) -> None:
    def ours(q: Tensor) -> Any:
        return tilewise.attention(q, K, V, mask=masks.causal(), backend=backend)

    found = torch.utils._pytree.tree_leaves(TRANSFORMS[name](ours))
    wanted = torch.utils._pytree.tree_leaves(TRANSFORMS[name](_plain))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_a_held_plan_and_a_bias_inside_of_transforms(backend: str) -> None:
    bias = torch.linspace(-1, 1, 35, dtype=DOUBLE).view(5, 7)
    plan = tilewise.plan(Q, K, V, score=scores.bias(bias), backend=backend)

    def held(bias: Tensor) -> Any:
        return tilewise.attention(Q, K, V, score=scores.bias(bias), plan=plan).sin().sum()

    leaf = bias.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(held(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(held)(bias), wanted)
    _, slope, *_ = torch.func.jvp(held, (bias,), (torch.ones_like(bias),))
    torch.testing.assert_close(slope, wanted.sum())


def test_a_gradient_with_create_graph_is_the_same_gradient(backend: str) -> None:
    q, k, v = qkv()
    out = tilewise.attention(q, k, v, backend=backend).sum()
    with_graph = torch.autograd.grad(out, (q, k, v), create_graph=True)
    for mine, theirs in zip(with_graph, torch.autograd.grad(out, (q, k, v)), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_touch_the_arithmetic(dtype: torch.dtype, backend: str) -> None:
    q, k, v = qkv(dtype=dtype)

    def penalty() -> tuple[Tensor, ...]:
        out = tilewise.attention(q, k, v, backend=backend)
        grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), create_graph=True)
        return torch.autograd.grad(grads, (q, k, v), [torch.ones_like(x) for x in (q, k, v)])

    plain = penalty()
    with torch.autocast("cpu", dtype):
        assert all(torch.equal(a, b) for a, b in zip(plain, penalty(), strict=True))


def test_what_is_hidden_does_not_leak(backend: str) -> None:
    """NaN in keys and values beyond the lengths, and in their tangents."""
    mask = masks.lengths(torch.tensor([4])) & masks.causal(align="top_left")

    def derivatives(holes: bool) -> list[Tensor]:
        generator = torch.Generator().manual_seed(3)
        q, k, v, *u = (
            torch.randn(1, 2, n, 3, generator=generator, dtype=DOUBLE) for n in (7, 5, 5) * 2
        )
        if holes:
            for x in (k, v, u[1], u[2]):
                x[:, :, 4:] = math.nan

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, mask=mask, backend=backend)

        _, tangent, *_ = torch.func.jvp(call, (q, k, v), tuple(u))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        grads = torch.autograd.grad(call(*leaves).sin().sum(), leaves, create_graph=True)
        return [tangent, *torch.autograd.grad(grads, leaves, u)]

    for clean, holed in zip(derivatives(False), derivatives(True), strict=True):
        assert torch.equal(clean, holed)


@pytest.mark.parametrize("shape", [(2, 1, 7), (2, 0, 7), (2, 5, 0), (0, 5, 7)])
def test_empty_and_single(shape: tuple[int, int, int], backend: str) -> None:
    """One row, no rows, no keys, no batch; memory of another order."""
    batch, queries, keys = shape
    x = [
        torch.randn(batch, length, 2, 3, dtype=DOUBLE).transpose(1, 2).requires_grad_()
        for length in (queries, keys, keys)
    ]
    toward = tuple(torch.ones_like(tensor) for tensor in x)

    def call(*qkv: Tensor) -> Any:
        return tilewise.attention(*qkv, mask=masks.causal(), backend=backend)

    out, tangent, *_ = torch.func.jvp(call, tuple(x), toward)
    assert tangent.shape == out.shape == (batch, 2, queries, 3)
    grads = torch.autograd.grad(call(*x).square().sum(), x, create_graph=True)
    seconds = torch.autograd.grad(grads, x, toward)
    assert [grad.shape for grad in seconds] == [tensor.shape for tensor in x]
    assert not any(bool(grad.isnan().any()) for grad in (tangent, *seconds))


def _attend(q: Tensor) -> Any:
    return tilewise.attention(q, K, V, backend="tiled")


def _cubed() -> Any:
    q = Q.clone().requires_grad_()
    found = _attend(q).sin().sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(found, q, create_graph=True)
        found = grad.sin().sum()
    return found


REFUSED: dict[str, tuple[str, Callable[[], Any]]] = {
    "third derivative": ("third derivative", _cubed),
    "third by torch.func": (
        "third derivative",
        lambda: func.jvp(func.grad(_scalar(func.grad(_scalar(_attend)))), (Q,), (U,)),
    ),
    "jvp of jvp": (
        "tangent of a tangent",
        lambda: func.jvp(lambda q: func.jvp(_attend, (q,), (U,))[1], (Q,), (U,)),
    ),
    "linearize": ("forward-mode", lambda: func.linearize(_attend, Q)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_there_is_refused(name: str) -> None:
    words, call = REFUSED[name]
    with pytest.raises(Unsupported, match=words):
        call()


@pytest.mark.parametrize("transform", ["grad", "jvp"])
def test_slopes_have_no_derivative(transform: str) -> None:
    def call(slopes: Tensor) -> Any:
        return tilewise.attention(Q, K, V, score=scores.alibi(slopes), backend="tiled").sum()

    slopes = torch.ones(4)
    with pytest.raises(InvalidArgument, match="slopes"):
        func.grad(call)(slopes) if transform == "grad" else func.jvp(call, (slopes,), (slopes,))


class _Exported(nn.Module):
    def forward(self, q: Tensor) -> Any:
        return _attend(q)


def test_slopes_of_a_function_of_ones_own_have_a_tangent(backend: str) -> None:
    def call(slopes: Tensor) -> Tensor:
        def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s - slopes[h] * abs(m + n.length - m.length - n)

        return tilewise.attention(Q, K, V, score=score, backend=backend)

    slopes = torch.rand(Q.shape[1], dtype=DOUBLE)
    forward, backward = torch.func.jacfwd(call)(slopes), torch.func.jacrev(call)(slopes)
    assert backward.abs().max() > 0
    torch.testing.assert_close(forward, backward)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(
            call(forward_ad.make_dual(slopes, torch.ones_like(slopes)))
        ).tangent
    torch.testing.assert_close(tangent, backward.sum(-1))


def test_an_exported_graph_has_one_derivative() -> None:
    graph = torch.export.export(_Exported(), (Q,)).module()
    q = Q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(graph(q).sin().sum(), q, create_graph=True)
    with pytest.raises(Unsupported, match="second derivative"):
        torch.autograd.grad(grad.sum(), q)


def test_a_plain_call_leaves_no_second_node(backend: str) -> None:
    """Outside of transforms the output comes from the quick Function."""
    node = tilewise.attention(*qkv(), backend=backend).grad_fn
    assert node is not None
    assert type(node).__name__ == "AttentionBackward"  # torch 2.11's has no name()
