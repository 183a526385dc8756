"""Accuracy of long problems, whole: one head of 16k by 16k; and operands past 2^31 elements."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import tilewise
from tilelab.common.exactness import judge
from tilelab.gpu_check.accuracy import check, judged
from tilelab.gpu_check.outcomes import sized
from tilelab.gpu_check.problems import LONG
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilelab.oracles.dense import dense
from tilewise import masks
from tilewise.inspect.calls import lowered

__all__ = ["jobs", "run"]

STEP = "long"
_HUGE = "past 2^31 elements"
_HEADS, _LENGTH, _WIDTH = 16, 128, 128


def jobs(setting: Setting) -> list[str]:
    """The long problems, and the huge one after the first of them."""
    names = [case.name for case in LONG]
    return [*names[:2], _HUGE, *names[2:]]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """One row."""
    if job == _HUGE:
        yield _huge(setting)
        return
    case = sized(setting, next(case for case in LONG if case.name == job))
    yield from check(setting, STEP, job, case, setting.dtype)


def _huge(setting: Setting) -> Row:
    """Causal attention over so many batch items that offsets need 64 bits: the first and last."""
    shrink = setting.sizes.shrink
    size = (setting.sizes.huge, _HEADS, _LENGTH // shrink, _WIDTH // shrink)
    generator = torch.Generator(setting.device).manual_seed(3)
    q, k, v, grad = (
        torch.empty(size, dtype=setting.dtype, device=setting.device).normal_(generator=generator)
        for _ in range(4)
    )
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out = tilewise.attention(q, k, v, mask=masks.causal(), backend=setting.backend)
    grads = torch.autograd.grad(out, leaves, grad)
    verdicts = {}
    for place in (0, size[0] - 1):
        part = slice(place, place + 1)
        actual = [x[part].detach() for x in (out, *grads)]
        found = []
        for dtype in (setting.dtype, torch.float64):
            a, b, c = (x[part].detach().to(dtype).requires_grad_() for x in (q, k, v))
            result = dense(*lowered(a, b, c, mask=masks.causal()), dtype=dtype).out
            back = torch.autograd.grad(result, (a, b, c), grad[part].to(dtype))
            found.append([result.detach(), *back])
        names = ("out", "grad of q", "grad of k", "grad of v")
        for name, *three in zip(names, actual, *found, strict=True):
            verdicts[f"{name}, item {place}"] = judge(*three)
    return judged(STEP, _HUGE, verdicts)
