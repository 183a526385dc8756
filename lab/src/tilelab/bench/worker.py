"""The child process: threads that wait without spinning, or memory of its own to measure.

It reads one job as JSON from standard input and writes one result per line. ``scaling`` times every
case on one and on two threads by the wall clock; ``memory`` reports how much one pass holds.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tilelab.bench.build import build, operands
from tilelab.bench.cases import Case, Shape, find
from tilelab.bench.clock import once, repeats_for, rounds_for
from tilelab.bench.result import Memory, Scaling
from tilelab.common.memory import peak_bytes, reset_peak, resident_bytes
from tilewise.inspect import peaks

__all__ = ["memory", "scaling"]


def scaling(key: str, budget_s: float) -> Scaling:
    """Time one and two threads in turn on one case, with the bare loop beside them.

    Args:
        key: of the case.
        budget_s: for its rounds.
    """
    case = find(key)
    call = build(case, operands(case)).ours
    kind = peaks.loop(case.dtype, peaks.isa())
    found = Scaling(case.name, case.dtype, [], [], [], [], [], [], case.goal is not None)
    torch.set_num_threads(2)
    once(call)  # starts the team, and gives it its memory
    torch.set_num_threads(1)
    one_s = once(call)[1]
    repeats = repeats_for(one_s)
    operations = one_s * peaks.measure(kind, 1, "wall")
    for _ in range(rounds_for(3.2 * one_s * repeats, budget_s, 3, 9)):
        for threads, times, rates, teams in (
            (1, found.one_s, found.peak_one, found.team_one_s),
            (2, found.two_s, found.peak_two, found.team_two_s),
        ):
            torch.set_num_threads(threads)
            times.append(once(call, repeats)[1])
            rates.append(peaks.measure(kind, threads, "wall"))
            teams.append(peaks.team_s(kind, threads, operations, repeats))
    return found


def memory(length: int, dtype: str, side: str, backward: bool) -> Memory:
    """Measure the peak memory of one pass beyond its operands: two heads of width 64.

    Args:
        length: queries and keys.
        dtype: of the operands.
        side: ``"ours"`` or ``"torch"``.
        backward: the gradients (the forward pass is done before), and not the forward pass.
    """
    torch.set_num_threads(1)
    name = f"{'backward' if backward else 'forward'} {length // 1024}k D64"
    case = Case(name, dtype, Shape(1, 2, 2, length, length, 64), backward=backward)
    small = replace(case, shape=Shape(1, 2, 2, 256, 256, 64))
    getattr(build(small, operands(small)), side)()  # code and workspaces that any call loads
    call = getattr(build(case, operands(case)), side)
    _give_back()
    reset_peak()
    before = resident_bytes()
    result = call()
    extra = max(0, peak_bytes() - before)
    tensors = result if backward else (result,)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return Memory(name, dtype, side, extra, size)


def _give_back() -> None:
    """Return freed memory to the system, so that the pass cannot hide in it (glibc only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _results(job: dict[str, Any]) -> Iterator[Scaling | Memory]:
    if job["job"] == "scaling":
        for key in job["keys"]:
            yield scaling(key, job["budget_s"])
    else:
        yield memory(job["length"], job["dtype"], job["side"], job["backward"])


def _work() -> None:
    for result in _results(json.load(sys.stdin)):
        print(json.dumps(vars(result)), flush=True)


if __name__ == "__main__":
    _work()
