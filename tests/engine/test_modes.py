"""Autocast, checkpointing, and the transforms that are refused in what traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import tilewise
from tests.engine.samples import packed, qkv, run, transformer
from tilewise import masks, scores
from tilewise.errors import Unsupported

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_torch_does(dtype: torch.dtype, backend: str) -> None:
    q, k, v = qkv(grad=False)
    with torch.autocast("cpu", dtype):
        out = tilewise.attention(q, k.to(torch.float16), v, backend=backend)
    by_hand = tilewise.attention(
        q.to(dtype), k.to(torch.float16).to(dtype), v.to(dtype), backend=backend
    )
    assert out.dtype == dtype
    assert torch.equal(out, by_hand)


def test_autocast_gradients_come_back_in_the_inputs_dtype(backend: str) -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        tilewise.attention(q, k, v, backend=backend).float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone(backend: str) -> None:
    q, k, v = qkv(dtype=torch.float64)
    plain = run(tilewise.attention, [q, k, v], backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        cast = run(tilewise.attention, [q, k, v], backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(plain, cast, strict=True))


def test_autocast_reaches_varlen_held_plans_and_compiled_calls(backend: str) -> None:
    torch._dynamo.reset()
    arguments = packed(grad=False)
    q, k, v = qkv(grad=False)
    plan = tilewise.plan(q.bfloat16(), k.bfloat16(), v.bfloat16(), backend=backend)
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        assert tilewise.attention_varlen(*arguments, backend=backend).dtype == torch.bfloat16
        held = tilewise.attention(q, k, v, plan=plan)
        traced = compiled(q, k, v, backend=backend)
    assert torch.equal(held, traced)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_dropout(reentrant: bool, backend: str) -> None:
    model = transformer(backend, dropout=0.4)
    x = torch.linspace(-1, 1, 2 * 9 * 16).view(2, 9, 16)

    def again(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    grads = []
    for call in (model, again):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        call(leaf).sin().sum().backward()
        grads.append(leaf.grad)
    assert torch.equal(*grads)  # type: ignore[arg-type]


def test_compiled_checkpointing_replays_dropout(backend: str) -> None:
    torch._dynamo.reset()
    model = transformer(backend, dropout=0.4)
    x = torch.linspace(-1, 1, 2 * 9 * 16).view(2, 9, 16).requires_grad_()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def again(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    torch.testing.assert_close(run(again, [x]), run(model, [x]))


def test_compiled_checkpointing_takes_functions_made_before_it() -> None:
    torch._dynamo.reset()
    q, k, v = qkv()
    table = torch.rand(k.shape[2], requires_grad=True)

    def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = masks.function(lambda b, h, m, n: tilewise.minimum(n, 4) <= m)
        score = scores.function(lambda s, b, h, m, n: s * table[n])

        def inner(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, mask=mask, score=score)

        return checkpoint(inner, q, k, v, use_reentrant=False)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [q, k, v, table]
    torch.testing.assert_close(run(compiled, leaves), run(call, leaves))


Q, K, V = qkv(grad=False)
PACKED = packed(grad=False)


def _attend(q: Tensor) -> Tensor:
    return tilewise.attention(q, K, V, backend="tiled")


def _forward_ad(q: Tensor) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_attend(forward_ad.make_dual(q, torch.ones_like(q))))


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "jvp": lambda q: torch.func.jvp(_attend, (q,), (torch.ones_like(q),)),
    "forward_ad": _forward_ad,
    "grad": torch.func.grad(lambda q: _attend(q).sum()),
    "vmap": lambda q: torch.func.vmap(_attend)(q[None]),
}


def test_compiled_forward_mode_is_right_or_refused() -> None:
    """Up to torch 2.13 a graph does not see tangents; 2.15 leaves tensors with one to eager."""
    attempt = TRANSFORMS["forward_ad"]
    found, refusal = None, ""
    torch._dynamo.reset()
    try:
        found = torch.compile(attempt, backend="aot_eager")(Q)
    except Unsupported as error:
        refusal = str(error)
    if found is None:
        assert "forward-mode" in refusal
    else:
        assert found.tangent is not None
        torch.testing.assert_close(found, attempt(Q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"is_tracked|forward-mode"):
        torch.compile(attempt, backend="aot_eager", fullgraph=True)(Q)


@pytest.mark.parametrize("name", ["jvp", "grad", "vmap"])
def test_compiled_transforms_break_the_graph_or_raise(name: str) -> None:
    """torch.compile leaves to eager what it cannot trace, where the transform is right."""
    torch._dynamo.reset()
    found = torch.compile(TRANSFORMS[name], backend="aot_eager")(Q)
    torch.testing.assert_close(found, TRANSFORMS[name](Q))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"torch\.func|forward-mode"):
        torch.compile(TRANSFORMS[name], backend="aot_eager", fullgraph=True)(Q)


class _Model(nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return _attend(q)


@pytest.mark.parametrize("name", ["jvp", "forward_ad", "grad", "vmap"])
def test_transforms_of_an_exported_graph_are_refused(name: str) -> None:
    graph = torch.export.export(_Model(), (Q,)).module()

    def forward_mode(q: Tensor) -> Any:
        with forward_ad.dual_level():
            return graph(forward_ad.make_dual(q, torch.ones_like(q)))

    calls: dict[str, Callable[[Tensor], Any]] = {
        "jvp": lambda q: torch.func.jvp(graph, (q,), (torch.ones_like(q),)),
        "forward_ad": forward_mode,
        "grad": torch.func.grad(lambda q: graph(q).sum()),
        "vmap": lambda q: torch.func.vmap(graph)(q[None]),
    }
    # torch itself refuses torch.func.grad of an op, in its own words.
    wanted = RuntimeError if name == "grad" else Unsupported
    with pytest.raises(wanted):
        calls[name](Q)


def test_a_forward_mode_level_without_tangents_is_no_transform() -> None:
    with forward_ad.dual_level():
        inside = _attend(Q)
    assert torch.equal(inside, _attend(Q))


def test_inference_mode(backend: str) -> None:
    q, k, v = qkv(grad=False)
    with torch.inference_mode():
        inside = tilewise.attention(q, k, v, mask=masks.causal(), backend=backend)
    assert torch.equal(inside, tilewise.attention(q, k, v, mask=masks.causal(), backend=backend))
