"""What is measured in processes of their own: two threads against one, and peaks of memory.

A child for memory loads everything once, then gives each job a fork of its own. A fork has run
nothing yet, so what it frees cannot hide in what an earlier job left. Where the system cannot
fork, each job has a new process. On a GPU the allocator knows, and no process is needed.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.bench.goals import Memory, Scaling, cases, key_of
from tilelab.cases.case import Pass
from tilelab.common.clock import once, plan
from tilelab.common.memory import held_bytes, highest
from tilelab.common.torch_private import softmax_backward_data
from tilelab.common.worker import Child, environment, serve
from tilelab.peers.methods import OURS, ROWS, method_named, ours
from tilelab.peers.work import Work, call_of, draw, work_of
from tilewise.errors import TilewiseError
from tilewise.inspect import peaks as processor

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
MODULE = "tilelab.bench.children"
# glibc raises this bound with use, and then keeps what is freed: a pass would seem to hold more.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_WARM = 64  # rows of a small call that loads code and workspaces


Job = dict[str, Any]  # of a process, for JSON
_SENT = ("name", "batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim", "listed")


def job_of(work: Work, method: str, rows: int = ROWS) -> Job:
    """Return the job that measures the peak of a method on a work without score and functions.

    ``method`` may be "step by step", for the operations of plain attention. ``rows`` are those of a
    chunk, for a cure.
    """
    fields = {name: getattr(work, name) for name in (*_SENT, "mask", "passes", "device")}
    return {"method": method, "rows": rows, "dtype": work.type_name, "work": fields}


class Peak(NamedTuple):
    """A measured peak."""

    step: str  # of plain attention; empty for a whole pass
    extra_bytes: int  # at the highest, beyond what was held with the operands there
    seconds: float  # of the call


def scaling(child: Child, key: str, budget_s: float) -> Scaling:
    """Return the two-thread scaling of a case, measured in a process of ``MODULE``."""
    (found,) = child.ask({"scaling": key, "budget_s": budget_s})
    return Scaling(**found)


def memory(length: int, dtype: str, direction: Pass) -> Generator[Memory]:
    """Yield the peak memory of a pass, ours and torch's: two heads of width 64."""
    name = f"{direction} {length // 1024}k D64"
    sizes = (1, 2, 2, length, length, 64, 64)
    work = Work(name, *sizes, getattr(torch, dtype), passes=direction)
    outputs = 1 if direction == "forward" else 3
    size = outputs * work.heads * length * work.head_dim * work.dtype.itemsize
    jobs = [job_of(work, method) for method in (OURS, "sdpa")]
    for side, found in zip(("ours", "torch"), peaks(jobs, "cpu"), strict=True):
        if isinstance(found, str):
            raise TilewiseError(found)
        yield Memory(name, dtype, side, found[0].extra_bytes, size)


def peaks(jobs: Sequence[Job], device: str) -> Generator[list[Peak] | str]:
    """Yield what each job measured, in order, or the reason why it measured nothing.

    On a GPU they are done here, by the allocator's statistics.
    """
    if device == "cuda":
        for job in jobs:
            yield _attempt(job)
        return
    with Child(MODULE, {**environment(), **_VARIABLES}) as child:
        for job in jobs:
            (found,) = child.ask(job)
            yield found if isinstance(found, str) else [Peak(*each) for each in found]
            if not _can_fork():
                child.close()


def _can_fork() -> bool:
    # Elsewhere the system's own libraries do not survive a fork.
    return sys.platform == "linux"


def _perform(job: Job) -> Iterator[Any]:
    if "scaling" in job:
        yield asdict(_scaling(job["scaling"], job["budget_s"]))
        return
    torch.set_num_threads(1)
    yield (_in_a_fork if _can_fork() else _attempt)(job)


def _scaling(key: str, budget_s: float) -> Scaling:
    """Time one and two threads in turn on one case, with the bare loop beside them."""
    case = next(case for case in cases() if key_of(case) == key)
    work = work_of(case, "speed")
    given = draw(work)
    call = call_of(work, given, ours().make(work, given))
    kind = processor.loop(case.type_name, processor.isa())
    found = Scaling(case.name, case.type_name, [], [], [], [], [], [], case.goal is not None)
    torch.set_num_threads(2)
    once(call)  # starts the team, and gives it its memory
    torch.set_num_threads(1)
    one_s = once(call).wall_s
    operations = one_s * processor.measure(kind, 1, "wall")
    counts, rounds = plan({"call": one_s}, budget_s / 3.2, (3, 9))
    repeats = counts["call"]
    for _ in range(rounds):
        for threads, times, rates, teams in (
            (1, found.one_s, found.peak_one, found.team_one_s),
            (2, found.two_s, found.peak_two, found.team_two_s),
        ):
            torch.set_num_threads(threads)
            times.append(once(call, repeats).wall_s)
            rates.append(processor.measure(kind, threads, "wall"))
            teams.append(processor.team_s(kind, threads, operations, repeats))
    return found


def _in_a_fork(job: Job) -> Any:
    """Return the result of a job that a fork of this process did."""
    context = multiprocessing.get_context("fork")
    read, write = context.Pipe(duplex=False)
    process = context.Process(target=lambda: write.send(_attempt(job)))
    process.start()
    write.close()
    try:
        found = read.recv()
    except EOFError:
        found = None
    process.join()
    return found or f"its process was killed (signal {max(0, -(process.exitcode or 0))})"


def _attempt(job: Job) -> list[Peak] | str:
    """Return the peaks of a job, or the reason why there are none."""
    try:
        return list(_measured(job))
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _measured(job: Job) -> Iterator[Peak]:
    fields = {**job["work"], "mask": tuple(job["work"]["mask"])}
    work = Work(**fields, dtype=getattr(torch, job["dtype"]))
    length = min(_WARM, work.keys)
    small = replace(work, queries=length, keys=length)
    if job["method"] == STEP_BY_STEP:
        list(_step_by_step(small))
        yield from _step_by_step(work)
        return
    method = method_named(job["method"], work.device, job["rows"])

    def prepared(work: Work) -> Callable[[], Any]:
        given = draw(work)
        if work.passes == "backward":  # the forward is no part of it
            return call_of(work, given, method.make(work, given))
        return lambda: call_of(work, given, method.make(work, given))()

    prepared(small)()
    extra, seconds, _ = highest(prepared(work), work.device)
    yield Peak("", extra, seconds)


def _step_by_step(work: Work) -> Iterator[Peak]:
    """Plain attention and its gradients, an operation at a time, freeing what is not needed."""
    given = draw(work)
    q, k, v, grad = (x.detach() for x in given)
    q = q * work.head_dim**-0.5
    begin = held_bytes(work.device)
    held: dict[str, Tensor] = {}

    def softmax_backward() -> dict[str, Tensor]:
        return {"ds": softmax_backward_data(held["dp"], held["p"], -1, held["p"].dtype)}

    # What each step gives, and what is not needed after it.
    calls: tuple[tuple[Callable[[], dict[str, Tensor]], str], ...] = (
        (lambda: {"s": q @ k.mT}, ""),
        (lambda: {"p": held["s"].softmax(-1)}, "s"),
        (lambda: {"out": held["p"] @ v}, ""),
        (lambda: {"dv": held["p"].mT @ grad}, ""),
        (lambda: {"dp": grad @ v.mT}, ""),
        (softmax_backward, "dp p"),
        (lambda: {"dq": held["ds"] @ k, "dk": held["ds"].mT @ q}, "ds"),
    )
    for (name, _), (call, free) in zip(STEPS, calls, strict=True):
        before = held_bytes(work.device)
        extra, seconds, kept = highest(call, work.device)
        held.update(kept)
        for each in free.split():
            del held[each]
        yield Peak(name, max(0, before - begin) + extra, seconds)


if __name__ == "__main__":
    serve(_perform)
