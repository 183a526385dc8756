"""Bitwise repeatability where the GPU is full: the same call again and again, beside other work."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tilelab.gpu_check import timed
from tilelab.gpu_check.clock import synchronize
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting

__all__ = ["jobs", "run"]

STEP = "repeat"
_TIMES = 8


def jobs(setting: Setting) -> list[str]:
    """Return the widest lengths of each kind that has gradients."""
    length = setting.sizes.variant_length
    chosen = [case for case in timed.cases(setting.sizes) if case.has_backward]
    return [case.name for case in chosen if case.length == length]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Output and gradients, every time with the bits of the first."""
    case = timed.find(setting.sizes, job)
    things = timed.given(setting, case)
    attend = timed.ours(setting, case, things)["ours"]
    leaves = tuple(x.requires_grad_() for x in (things.q, things.k, things.v))
    first: tuple[torch.Tensor, ...] = ()
    unequal = 0
    for turn in range(2 if setting.self_test else _TIMES):
        if turn % 2:
            _other_work(setting)
        out = attend(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, things.grad))
        first = first or found
        same = [bool((a == b).all()) for a, b in zip(first, found, strict=True)]
        unequal += not all(same)
    synchronize(setting)
    note = f"{unequal} of {_TIMES} times other bits" if unequal else ""
    yield Row(STEP, case.name, "wrong" if unequal else "ok", note, {"times": _TIMES})


def _other_work(setting: Setting) -> None:
    """A matrix product on another stream, so that blocks are given out in another order."""
    if setting.self_test:
        return
    size = setting.sizes.matrix // 2
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        a = torch.randn(size, size, device=setting.device, dtype=setting.dtype)
        for _ in range(4):
            a = a @ a
    del a
