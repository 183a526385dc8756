"""Memory beyond inputs and outputs: it must grow with N, and not with N squared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import tilewise
from tilelab.common.memory import highest
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilewise import masks

__all__ = ["jobs", "run"]

STEP = "memory"
_HEADS, _WIDTH = 8, 64
# What may be held beside inputs and outputs, for each row of each head: lse and two statistics,
# the row sums of the backward pass, and gradients of grouped keys in float32.
_ROW_BYTES = 4 * (4 + 2 * _WIDTH)
_PLAIN_LONGEST = 16384


def jobs(setting: Setting) -> list[str]:
    """Both passes; in the self-test the same calls, of which nothing is claimed."""
    return ["forward", "backward"]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Extra bytes at every length, ours and plain attention's."""
    lengths = setting.sizes.memory
    ours = [_extra_bytes(setting, length, job, plain=False) for length in lengths]
    fitting = [length for length in lengths if length <= _PLAIN_LONGEST]
    plain = [_extra_bytes(setting, length, job, plain=True) for length in fitting]
    allowed = [_HEADS * length * _ROW_BYTES for length in lengths]
    values = {
        "lengths": list(lengths),
        "extra_bytes": ours,
        "plain_bytes": plain,
        "allowed_bytes": allowed,
    }
    over = [n for n, extra, most in zip(lengths, ours, allowed, strict=True) if extra > most]
    if over and not setting.self_test:
        note = f"more than a constant for each row at N = {', '.join(map(str, over))}"
        yield Row(STEP, job, "wrong", note, values)
    else:
        yield Row(STEP, job, values=values)


def _extra_bytes(setting: Setting, length: int, direction: str, *, plain: bool) -> int:
    """Return the peak of a pass, less what was held before it and less what it gives."""
    size = (1, _HEADS, length, _WIDTH)
    q, k, v, grad = (torch.randn(size, device=setting.device).to(setting.dtype) for _ in range(4))
    leaves = tuple(x.requires_grad_(direction == "backward") for x in (q, k, v))

    def forward() -> Tensor:
        if plain:
            s = (q @ k.mT) * _WIDTH**-0.5
            hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            return torch.matmul(s.masked_fill(hidden, float("-inf")).softmax(-1), v)
        out: Tensor = tilewise.attention(q, k, v, mask=masks.causal(), backend=setting.backend)
        return out

    def call() -> tuple[Tensor, ...]:
        out = forward()
        if direction == "forward":
            return (out,)
        return (out, *torch.autograd.grad(out, leaves, grad))

    call()  # what is loaded once is no part of it
    extra, _, results = highest(call, "cpu" if setting.self_test else "cuda")
    return max(0, extra - sum(x.numel() * x.element_size() for x in results))
