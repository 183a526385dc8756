"""The torch ops: opcheck, torch.compile, torch.export, and everything else that traces."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tests.engine.samples import packed, qkv, run, samples, transformer
from tilewise import masks
from tilewise.errors import InvalidArgument

ours = "ignore:`torch.jit"  # torch's own, inside torch.compile
pytestmark = pytest.mark.filterwarnings(ours)
# Samples that are compiled quickly, with static and dynamic shapes; the others only as slow tests.
QUICK = ("everything", "varlen", "statistics")


def _op_arguments(name: str, grad: bool, backend: str, statistics: str = "") -> tuple[Any, ...]:
    swapped = name == "swapped"
    q, k, v = qkv(grad, swapped=swapped)
    bias = torch.zeros(1, 4, 1, 7, requires_grad=grad)
    sinks = torch.zeros(4, requires_grad=grad)
    lengths, seed = torch.tensor([3, 7]), torch.tensor(5)
    mask, score = "band(-1,0,1) below()[0] and", "softcap(9.0) bias()[0]"
    if name == "everything":
        captured = ([lengths], [bias], sinks, seed, None, None, mask, score, 0.3, 0.2)
        return (q, k, v, *captured, backend, statistics)
    if name == "varlen":
        q, k, v, cu_q, cu_k = packed(grad)
        text = ("band(-1,0,1)", "", None, 0.0, backend, statistics)
        return (q, k, v, [], [], None, None, cu_q, cu_k, *text)
    return (q, k, v, [], [], None, None, None, None, "", "", None, 0.0, backend, statistics)


# torch 2.15's own: its check copies tensors together with their gradients.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("name", "statistics"),
    [
        *((name, "") for name in ("plain", "swapped", "everything", "varlen")),
        *((name, "top1") for name in ("plain", "everything", "varlen")),
        ("swapped", "rows"),
    ],
)
def test_opcheck(name: str, statistics: str, grad: bool, backend: str) -> None:
    arguments = _op_arguments(name, grad, backend, statistics)
    torch.library.opcheck(torch.ops.tilewise.attention.default, arguments)


@pytest.mark.parametrize("statistics", ["", "rows"])
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_opcheck_of_the_backward(name: str, statistics: str, backend: str) -> None:
    arguments = _op_arguments(name, False, backend, statistics)
    out, lse, stats, _, entropy, _ = torch.ops.tilewise.attention(*arguments)
    grad_entropy = torch.ones_like(entropy) if statistics else None
    needs = [True, False, True, name == "everything", *[True] * len(arguments[4])]
    torch.library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (torch.ones_like(out), None, grad_entropy, out, lse, stats, needs, *arguments[:-1]),
    )


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(
            pytest.param(name, False, marks=() if name in QUICK else pytest.mark.slow)
            for name in samples()
        ),
        *((name, True) for name in QUICK),
    ],
)
def test_compiled_equals_eager(name: str, dynamic: bool, backend: str) -> None:
    torch._dynamo.reset()
    call, arguments = samples()[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    eager = run(call, arguments, backend=backend)
    torch.testing.assert_close(run(compiled, arguments, backend=backend), eager)


def test_compiled_with_a_held_plan(backend: str) -> None:
    torch._dynamo.reset()
    plan = tilewise.plan(*qkv(), mask=masks.causal(), backend=backend)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, plan=plan)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(compiled, qkv()), run(call, qkv()))


def test_one_graph_serves_every_length(backend: str) -> None:
    torch._dynamo.reset()
    model = transformer(backend)
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for rows in (5, 9, 17):
        x = torch.randn(2, rows, 16)
        torch.testing.assert_close(compiled(x), model(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_compiled_transformer_trains_as_the_eager_one(dropout: float, backend: str) -> None:
    torch._dynamo.reset()
    model = transformer(backend, dropout)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    grads = []
    for net in (model, compiled):
        model.zero_grad()
        torch.manual_seed(5)
        net(torch.linspace(-1, 1, 2 * 9 * 16).view(2, 9, 16)).square().mean().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.slow  # a cold C++ compilation by inductor
def test_inductor_draws_new_dropout_each_call_and_replays_a_seed(backend: str) -> None:
    torch._dynamo.reset()
    q, k, v = qkv()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q * 2, k, v, dropout_p=0.5, backend=backend) + 1

    compiled = torch.compile(call, fullgraph=True)
    torch.manual_seed(0)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(0)
    again = compiled(q, k, v)
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    # The backward pass must drop what the forward pass dropped: v's gradient says which.
    ones = torch.ones_like(v, requires_grad=True)
    torch.manual_seed(0)
    out = compiled(q, k, ones) - 1
    (grad,) = torch.autograd.grad(out.sum(), ones)
    torch.testing.assert_close((grad * ones).sum(), out.sum())


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by torch 2.11
@pytest.mark.parametrize("strict", [False, True])
def test_export_serves_every_length_and_survives_a_file(strict: bool, backend: str) -> None:
    model = transformer(backend)
    batch, rows = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(
        model, (torch.randn(2, 9, 16),), dynamic_shapes=({0: batch, 1: rows},), strict=strict
    )
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tilewise.attention.default") == 2
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    x = torch.randn(3, 17, 16)
    torch.testing.assert_close(torch.export.load(file).module()(x), model(x))


def _few_queries(grad: bool) -> list[Tensor]:
    torch.manual_seed(7)
    q, k, v = torch.randn(2, 4, 1, 64), torch.randn(2, 2, 900, 64), torch.randn(2, 2, 900, 64)
    return [x.requires_grad_(grad) for x in (q, k, v)]


@pytest.mark.parametrize("grad", [False, True])
def test_few_queries_have_the_bits_of_an_eager_call(grad: bool, backend: str) -> None:
    # Without gradients they have a kernel of their own, which the graph asks for too.
    torch._dynamo.reset()
    compiled = torch.compile(tilewise.attention, fullgraph=True, backend="aot_eager")
    eager = run(tilewise.attention, _few_queries(grad), backend=backend)
    for mine, theirs in zip(eager, run(compiled, _few_queries(grad), backend=backend), strict=True):
        assert torch.equal(theirs, mine)


def test_a_graph_made_without_gradients_has_those_of_an_eager_call(backend: str) -> None:
    class Attend(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return tilewise.attention(q, k, v, backend=backend)

    with torch.no_grad():
        program = torch.export.export(Attend(), tuple(_few_queries(False)))
    found, wanted = (
        torch.autograd.grad(call(*tensors).sum(), tensors)
        for call, tensors in (
            (program.module(), _few_queries(True)),
            (Attend(), _few_queries(True)),
        )
    )
    for mine, theirs in zip(wanted, found, strict=True):
        assert torch.equal(theirs, mine)


def test_fake_and_meta_tensors_give_shapes() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 4, 5, 8, requires_grad=True)
        k = torch.empty(2, 2, 7, 8)
        out = tilewise.attention(q, k, k)
        out.sum().backward()
        assert q.grad is not None
        assert (out.shape, q.grad.shape) == (q.shape, q.shape)
    meta = torch.empty(2, 4, 5, 8, device="meta")
    result = tilewise.attention(meta, meta, meta, return_lse=True, return_stats="top1")
    assert (result.out.shape, result.lse.shape) == ((2, 4, 5, 8), (2, 4, 5))
    assert all(rows.shape == (2, 4, 5) for rows in result.stats)


def test_dispatch_modes_see_the_op(backend: str) -> None:
    graph = make_fx(lambda q, k, v: tilewise.attention(q, k, v, backend=backend))(*qkv(False))
    assert "tilewise.attention.default" in [str(node.target) for node in graph.graph.nodes]
    with FlopCounterMode(display=False):
        tilewise.attention(*qkv(), backend=backend)


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
def test_a_jit_trace_is_not_a_constant(backend: str) -> None:
    def call(q: Tensor) -> Tensor:
        return tilewise.attention(q, q, q, backend=backend)

    traced = torch.jit.trace(call, torch.randn(1, 2, 3, 4))
    other = torch.randn(1, 2, 3, 4)
    torch.testing.assert_close(traced(other), call(other))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("traced_with", [True, False], ids=["gradients", "no gradients"])
def test_a_jit_trace_has_gradients(traced_with: bool, backend: str) -> None:
    """torch's own check of the trace runs without gradients, and must find the same graph."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=masks.causal(), backend=backend)

    leaves = qkv()
    traced = torch.jit.trace(call, qkv() if traced_with else qkv(grad=False))
    torch.testing.assert_close(run(traced, leaves), run(call, leaves))


def test_the_op_checks_values_again_when_it_runs(backend: str) -> None:
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def call(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, mask=masks.lengths(lengths), backend=backend)

    q, k, v = qkv(grad=False)
    call(q, k, v, torch.tensor([7, 0]))
    with pytest.raises(InvalidArgument, match="the length 8"):
        call(q, k, v, torch.tensor([8, 0]))


def test_a_graph_break_lets_the_error_through(backend: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(tilewise.attention, backend="aot_eager")
    q, k, v = qkv(grad=False)
    with pytest.raises(InvalidArgument, match=r"^v: got 1 heads"):
        call(q, k, v[:, :1], backend=backend)


@pytest.mark.parametrize("text", ["below()[0]", "dense()[3]"])
def test_the_op_wants_a_tensor_for_each_slot(text: str) -> None:
    q = torch.zeros(1, 1, 2, 4)
    rest = (None, None, None, None, text, "", None, 0.0, None, "")
    with pytest.raises(InvalidArgument, match=r"^captured: got 0 tensors"):
        torch.ops.tilewise.attention(q, q, q, [], [], *rest)
