"""Measure the peak memory of a pass of a method, or of each step of plain attention.

On a CPU it is asked for in a process of its own (``nursery``); on a GPU the allocator knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.bench.suites import timer
from tilelab.bench.suites.methods import Method, cures, exact
from tilelab.bench.suites.rivals import rivals
from tilelab.bench.suites.work import Work, call_of, draw
from tilelab.common.memory import peak_bytes, release, reset_peak, resident_bytes
from tilelab.common.torch_private import softmax_backward_data
from tilewise import masks

__all__ = ["STEPS", "STEP_BY_STEP", "Peak", "Wanted", "measured", "method_named"]

STEP_BY_STEP = "step by step"
# What plain attention does, and how many matrices it holds while it does it.
STEPS = (
    ("scores", 1),
    ("softmax", 2),
    ("product", 1),
    ("dV", 1),
    ("dP", 2),
    ("softmax's backward", 3),
    ("dQ and dK", 1),
)
_WARM = 64  # rows of a small call that loads code and workspaces


class Wanted(NamedTuple):
    """A job for a process: everything in it goes through JSON.

    Args:
        method: its name; "step by step" for the operations of plain attention.
        rows: of a chunk, for a cure; 0 for the usual number.
        causal: whether a row sees no later key.
        work: fields of the Work, without mask and score.
    """

    method: str
    rows: int
    causal: bool
    work: dict[str, Any]

    @classmethod
    def of(cls, work: Work, method: str, rows: int = 0) -> Wanted:
        """Return the job of a work whose mask is the causal one, or none."""
        bare = replace(work, mask=None, score=None, flex_mask=None, flex_score=None)
        return cls(method, rows, work.mask is not None, asdict(bare))


class Peak(NamedTuple):
    """A measured peak.

    Args:
        step: of plain attention; empty for a whole pass.
        extra_bytes: at the highest, beyond what was held with the operands there.
        seconds: of the call.
    """

    step: str
    extra_bytes: int
    seconds: float


def method_named(name: str, device: str, rows: int = 0) -> Method:
    """Return the method of that name.

    Args:
        name: as in the tables.
        device: where.
        rows: of a chunk.
    """
    every = [*exact(device), *rivals()]
    if rows:
        every = [*cures(rows), *every]
    return next(method for method in every if method.name == name)


def measured(wanted: Wanted) -> Iterator[Peak]:
    """Do a job in this process."""
    work = Work(**wanted.work)
    if wanted.causal:
        work = replace(work, mask=masks.causal())
    small = replace(work, length=min(_WARM, work.length), padding=0)
    if wanted.method == STEP_BY_STEP:
        list(_step_by_step(small))
        yield from _step_by_step(work)
        return
    method = method_named(wanted.method, work.device, wanted.rows)
    _call(small, method)()
    given = draw(work)

    def call() -> Any:
        return call_of(work, given, method.make(work, given))()

    extra, seconds = _highest(call, work.device)
    yield Peak("", extra, seconds)


def _call(work: Work, method: Method) -> Callable[[], Any]:
    given = draw(work)
    return call_of(work, given, method.make(work, given))


def _highest(call: Callable[[], Any], device: str) -> tuple[int, float]:
    """Extra bytes during a call, and its seconds; what it returns is still held at the end."""
    kept: list[Any] = []
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seconds = timer.once(lambda: kept.append(call()), device)
        return max(0, torch.cuda.max_memory_allocated() - before), seconds
    release()
    reset_peak()
    before = resident_bytes()
    seconds = timer.once(lambda: kept.append(call()), device)
    return max(0, peak_bytes() - before), seconds


def _step_by_step(work: Work) -> Iterator[Peak]:
    """Plain attention and its gradients, an operation at a time, freeing what is not needed."""
    given = draw(work)
    q, k, v, grad = (x.detach() for x in given)
    q = q * work.head_dim**-0.5
    begin = _held(work.device)
    held: dict[str, Tensor] = {}

    def step(name: str, call: Callable[[], dict[str, Tensor]], *free: str) -> Peak:
        before = _held(work.device)
        kept: list[dict[str, Tensor]] = []
        extra, seconds = _highest(lambda: kept.append(call()), work.device)
        held.update(kept.pop())
        for each in free:
            del held[each]
        return Peak(name, max(0, before - begin) + extra, seconds)

    names = [name for name, _ in STEPS]
    yield step(names[0], lambda: {"s": q @ k.mT})
    yield step(names[1], lambda: {"p": held["s"].softmax(-1)}, "s")
    yield step(names[2], lambda: {"out": held["p"] @ v})
    yield step(names[3], lambda: {"dv": held["p"].mT @ grad})
    yield step(names[4], lambda: {"dp": grad @ v.mT})

    def softmax_backward() -> dict[str, Tensor]:
        return {"ds": softmax_backward_data(held["dp"], held["p"], -1, held["p"].dtype)}

    yield step(names[5], softmax_backward, "dp", "p")
    yield step(names[6], lambda: {"dq": held["ds"] @ k, "dk": held["ds"].mT @ q}, "ds")


def _held(device: str) -> int:
    if device == "cuda":
        return torch.cuda.memory_allocated()
    release()
    return resident_bytes()
