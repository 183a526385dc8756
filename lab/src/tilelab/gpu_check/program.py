"""What a user's program meets: the cost of a call to the host, graphs, and training steps.

A training step is of GPT-2 and BERT shapes on random tokens, with three kinds of attention. It has
mixed precision, with weights in float32 and AdamW, and no dropout. One model serves all kinds, in
turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.common.clock import Call, interleave, once, seconds_of
from tilelab.common.memory import held_bytes, highest
from tilelab.gpu_check.accuracy import differing
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Model, Outcome, Setting
from tilelab.peers.methods import ours, sdpa, written_out
from tilelab.peers.work import Attend, Given, draw
from tilewise import masks, scores
from tilewise.errors import Unsupported

STEP = "host"
_ROUNDS, _CALLS = 9, 40
_GRAPHS = ("graph of the forward pass", "graph of both passes", "graph of dropout")
_COMPILED = "torch.compile"
JOBS = ("microseconds", "launches", *_GRAPHS, _COMPILED)


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Yield one row."""
    # So small that the host is what takes time.
    small = draw(setting.square("small", 128 // setting.sizes.shrink, 8, 64, passes="both"))
    if job == "microseconds":
        yield Row(STEP, job, values={"samples_s": _host_seconds(setting, small)})
    elif job == "launches":
        calls = _calls(setting, small)
        for call in calls.values():
            call()
        found = {name: _launches(setting, call) for name, call in calls.items()}
        yield Row(STEP, job, values={"kernels": found})
    elif job == _COMPILED:
        yield _compiled(setting, job, small)
    elif job == "graph of dropout":
        yield _dropout_graph(setting, job, small)
    else:
        yield _graph(setting, job, small, backward="both" in job)


def _calls(setting: Setting, small: Given) -> dict[str, Call]:
    q, k, v, grad = small
    backend, mask = setting.backend, masks.causal()
    plan = tilewise.plan(q, k, v, mask=mask, backend=backend)
    alibi = scores.alibi(torch.rand(8, device=setting.device))
    call = partial(tilewise.attention, q, k, v, mask=mask)
    ours = partial(call, backend=backend)
    theirs = partial(scaled_dot_product_attention, q, k, v, is_causal=True)

    def no_grad(call: Call) -> Call:
        def calling() -> None:
            with torch.no_grad():
                call()

        return calling

    def both(call: Call) -> Call:
        return lambda: torch.autograd.grad(call(), (q, k, v), grad)

    return {
        "forward": no_grad(ours),
        "forward, held plan": no_grad(partial(call, plan=plan)),
        "forward, alibi": no_grad(partial(ours, score=alibi)),
        "forward, torch": no_grad(theirs),
        "both passes": both(ours),
        "both passes, torch": both(theirs),
    }


def _host_seconds(setting: Setting, small: Given) -> dict[str, list[float]]:
    """Return seconds of the host for one call, while the device works behind it."""
    calls = _calls(setting, small)
    for call in calls.values():
        call()
    rounds, times = (1, 1) if setting.self_test else (_ROUNDS, _CALLS)

    def sample(call: Call, repeats: int) -> float:
        setting.synchronize()
        return once(call, repeats).wall_s

    samples = interleave(calls, dict.fromkeys(calls, times), rounds, sample)
    setting.synchronize()
    return samples


def _launches(setting: Setting, call: Call) -> list[str]:
    """Return the names of the kernels of one call; in the self-test there are none."""
    if setting.self_test:
        call()
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return [event.name[:80] for event in seen.events() if event.device_type == device]


def _both(out: Tensor, small: Given) -> Outcome:
    grads = torch.autograd.grad(out, small.leaves, small.grad)
    names = ("out", "grad of q", "grad of k", "grad of v")
    return dict(zip(names, (out.detach(), *grads), strict=True))


def _graph(setting: Setting, job: str, small: Given, *, backward: bool) -> Row:
    """Capture a call, replay it on other numbers, and compare with a plain call."""

    def call() -> Outcome:
        mask = masks.causal()
        out = tilewise.attention(*small.leaves, mask=mask, backend=setting.backend)
        return _both(out, small) if backward else {"out": out.detach()}

    if setting.self_test:
        return _called_twice(job, call(), call())
    graph, captured = _captured(call)
    with torch.no_grad():
        for x in small:
            x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    unequal = differing(captured, call())
    samples = setting.race({"replay": graph.replay, "call": call}, 0.3)
    note = f"{unequal} of the graph differs" if unequal else ""
    return Row(STEP, job, "wrong" if unequal else "ok", note, {"samples_s": samples})


def _compiled(setting: Setting, job: str, small: Given) -> Row:
    """Compile a function that calls, and compare both passes with a plain call."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = tilewise.attention(q, k, v, mask=masks.causal(), backend=setting.backend)
        return out * 2.0

    compiler = "aot_eager" if setting.self_test else "inductor"
    compiled = torch.compile(call, fullgraph=True, backend=compiler)
    leaves = small.leaves
    unequal = differing(_both(compiled(*leaves), small), _both(call(*leaves), small))
    calls: dict[str, Call] = {"compiled": lambda: compiled(*leaves), "call": lambda: call(*leaves)}
    values = {"samples_s": setting.race(calls, 0.3)}
    note = f"{unequal} differs when it is compiled" if unequal else ""
    return Row(STEP, job, "wrong" if unequal else "ok", note, values)


def _called_twice(job: str, first: Outcome, second: Outcome) -> Row:
    unequal = differing(first, second)
    return Row(STEP, job, "wrong" if unequal else "ok", "no GPU: called twice instead")


def _captured(call: Callable[[], Outcome]) -> tuple[torch.cuda.CUDAGraph, Outcome]:
    """Return a graph of a call, after three calls beside it, and where it puts its results."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    return graph, captured


def _dropout_graph(setting: Setting, job: str, small: Given) -> Row:
    """Replay dropout: each replay drops by the seed that stands in memory, or by a new one."""
    place = torch.zeros((), dtype=torch.int64, device=setting.device)

    def call(seed: int | Tensor | None) -> Outcome:
        more: dict[str, Any] = {"dropout_p": 0.3, "seed": seed, "backend": setting.backend}
        return _both(tilewise.attention(*small.leaves, **more), small)

    if setting.self_test:
        return _called_twice(job, call(place), call(0))
    graph, captured = _captured(partial(call, place))
    unequal = ""
    for seed in (5, 2**63 - 9):
        place.fill_(seed)
        graph.replay()
        torch.cuda.synchronize()
        unequal = unequal or differing(captured, call(seed))
    notes = [f"{unequal} of a replay with another seed differs"] if unequal else []
    graph, captured = _captured(partial(call, None))
    outs = []
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        outs.append(captured["out"].clone())
    if torch.equal(*outs):
        notes.append("every replay drops the same pairs")
    return Row(STEP, job, "wrong" if notes else "ok", "; ".join(notes))


_TRAINING = "training"
KINDS = ("plain", "sdpa", "tilewise")


class _Layer(nn.Module):
    """x + attention(norm(x)), then x + perceptron(norm(x)); [B, S, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        out = attend(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(out)
        hidden = functional.gelu(self.expand(self.mlp_norm(x)), approximate="tanh")
        result: Tensor = x + self.contract(hidden)
        return result


class Transformer(nn.Module):
    """Tokens to the logits of tokens, [B, S] to [B, S, vocabulary]."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.layers = nn.ModuleList(_Layer(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Return the logits; the head is the token embedding."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x, attend)
        return functional.linear(self.norm(x), self.tokens.weight)


def attention_kinds(setting: Setting, shape: Model) -> dict[str, Attend]:
    """Return the three kinds of attention, by the names of ``KINDS``."""
    width, mask = shape.width // shape.heads, ("causal",) if shape.causal else ()
    work = setting.square(
        "attention", shape.context, shape.heads, width, batch=shape.batch, mask=mask
    )
    given = draw(work)
    return {
        kind: method.make(work, given)
        for kind, method in zip(KINDS, (written_out(), sdpa(), ours()), strict=True)
    }


def train(setting: Setting, job: str) -> Iterator[Row]:
    """Yield tokens per second and peak memory of a model with each attention."""
    shape = dict(setting.sizes.models)[job]
    torch.manual_seed(0)
    with setting.device:
        model = Transformer(shape)
        tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.context))
        targets = torch.randint(0, shape.vocabulary, (shape.batch * shape.context,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=not setting.self_test)
    kinds = attention_kinds(setting, shape)
    losses: dict[str, float] = {}

    def loss_of(kind: str) -> Tensor:
        with torch.autocast(setting.device.type, setting.dtype):
            logits = model(tokens, kinds[kind])
            return functional.cross_entropy(logits.flatten(0, 1), targets)

    def step(kind: str) -> None:
        loss = loss_of(kind)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    declined = ""
    for kind in KINDS:
        try:
            losses[kind] = float(loss_of(kind).detach())
            step(kind)  # compiles, and makes the optimizer's state
        except Unsupported as error:
            declined = in_short(error)
    calls = {kind: partial(step, kind) for kind in losses}
    peaks = {kind: _peak_bytes(setting, call) for kind, call in calls.items()}
    once_each = dict.fromkeys(calls, 1)
    samples = interleave(
        calls, once_each, setting.sizes.steps, lambda call, _: seconds_of(call, setting.timer)
    )
    values = {
        "tokens": shape.batch * shape.context,
        "context": shape.context,
        "batch": shape.batch,
        "first_loss": losses,
        "peak_bytes": peaks,
        "samples_s": samples,
    }
    if not all(math.isfinite(loss) for loss in losses.values()):
        yield Row(_TRAINING, job, "wrong", "a loss is not finite", values)
    else:
        yield Row(_TRAINING, job, "unsupported" if declined else "ok", declined, values)


def _peak_bytes(setting: Setting, call: Callable[[], None]) -> int:
    device = "cpu" if setting.self_test else "cuda"
    return held_bytes(device) + highest(call, device)[0]
