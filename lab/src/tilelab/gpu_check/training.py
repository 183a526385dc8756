"""A training step of GPT-2 and BERT shapes on random tokens, with three kinds of attention.

Mixed precision with weights in float32 and AdamW; no dropout. One model serves all kinds, in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilelab.common.clock import interleave, seconds_of
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Model, Setting
from tilelab.peers.methods import ours, sdpa, written_out
from tilelab.peers.work import Attend, draw
from tilewise.errors import Unsupported

STEP = "training"
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
    """Tokens to the logits of tokens, [B, S] to [B, S, vocabulary].

    Args:
        shape: its numbers.
    """

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


def run(setting: Setting, job: str) -> Iterator[Row]:
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
    able = [kind for kind in KINDS if kind in losses]
    peaks = {kind: _peak_bytes(setting, partial(step, kind)) for kind in able}
    calls = {kind: partial(step, kind) for kind in able}
    once_each = dict.fromkeys(able, 1)
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
        yield Row(STEP, job, "wrong", "a loss is not finite", values)
    else:
        yield Row(STEP, job, "unsupported" if declined else "ok", declined, values)


def _peak_bytes(setting: Setting, call: Callable[[], None]) -> int:
    """Return the most memory that a call holds; 0 in the self-test."""
    if setting.self_test:
        call()
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    call()
    setting.synchronize()
    return torch.cuda.max_memory_allocated()
