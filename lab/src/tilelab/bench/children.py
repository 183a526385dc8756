"""What is measured in processes of their own: two threads against one, and peaks of memory.

A child for memory loads everything once, then gives each job a fork of its own. A fork has run
nothing yet, so what it frees cannot hide in what an earlier job left. Where the system cannot
fork, each job has a new process. On a GPU the allocator knows, and no process is needed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.bench.cases import find
from tilelab.bench.results import Memory, Scaling
from tilelab.common.clock import once, plan
from tilelab.common.memory import held_bytes, highest
from tilelab.common.torch_private import softmax_backward_data
from tilelab.common.worker import Child, environment, serve
from tilelab.peers.methods import OURS, method_named, ours
from tilelab.peers.work import Pass, Work, call_of, draw
from tilewise import masks
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
_MODULE = "tilelab.bench.children"
# glibc raises this bound with use, and then keeps what is freed: a pass would seem to hold more.
_VARIABLES = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_WARM = 64  # rows of a small call that loads code and workspaces
_DTYPES = ("float32", "bfloat16")  # of the memory beside the cases with goals


class PeakJob(NamedTuple):
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
    def of(cls, work: Work, method: str, rows: int = 0) -> PeakJob:
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


def scaling(keys: Sequence[str], budget_s: float) -> Generator[Scaling]:
    """Yield the two-thread scaling of the cases of these keys, each as soon as it is known.

    Args:
        keys: of the cases.
        budget_s: for the rounds of one case.
    """
    with Child(_MODULE) as child:
        for key in keys:
            (found,) = child.ask({"scaling": key, "budget_s": budget_s})
            yield Scaling(**found)


def memory(length: int) -> Generator[Memory]:
    """Yield the peak memory of both passes, ours and torch's: two heads of width 64.

    Args:
        length: queries and keys.
    """
    passes: tuple[Pass, ...] = ("forward", "backward")
    for dtype in _DTYPES:
        for direction in passes:
            name = f"{direction} {length // 1024}k D64"
            work = Work("memory", name, length, dtype, passes=direction)
            outputs = 1 if direction == "forward" else 3
            size = outputs * work.heads * length * work.head_dim * getattr(torch, dtype).itemsize
            jobs = [PeakJob.of(work, method) for method in (OURS, "sdpa")]
            for side, found in zip(("ours", "torch"), peaks(jobs, "cpu"), strict=True):
                if isinstance(found, str):
                    raise TilewiseError(found)
                yield Memory(name, dtype, side, found[0].extra_bytes, size)


def peaks(jobs: Sequence[PeakJob], device: str) -> Generator[list[Peak] | str]:
    """Yield what each job measured, in order, or the reason why it measured nothing.

    Args:
        jobs: to do.
        device: on a GPU they are done here, by the allocator's statistics.
    """
    if device == "cuda":
        for job in jobs:
            yield _attempt(job)
        return
    with Child(_MODULE, {**environment(), **_VARIABLES}) as child:
        for job in jobs:
            (found,) = child.ask({"peak": job})
            yield found["why"] or [Peak(*each) for each in found["peaks"]]
            if not _can_fork():
                child.close()


def _can_fork() -> bool:
    # Elsewhere the system's own libraries do not survive a fork.
    return sys.platform == "linux"


def _perform(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Do a job in the child."""
    if "scaling" in job:
        yield asdict(_scaling(job["scaling"], job["budget_s"]))
        return
    torch.set_num_threads(1)
    yield (_in_a_fork if _can_fork() else _result)(PeakJob(*job["peak"]))


def _scaling(key: str, budget_s: float) -> Scaling:
    """Time one and two threads in turn on one case, with the bare loop beside them."""
    case = find(key)
    work = case.work()
    given = draw(work)
    call = call_of(work, given, ours().make(work, given))
    kind = processor.loop(case.dtype, processor.isa())
    found = Scaling(case.name, case.dtype, [], [], [], [], [], [], case.goal is not None)
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


def _in_a_fork(job: PeakJob) -> dict[str, Any]:
    """Return the result of a job that a fork of this process did."""
    read, write = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(read)
        try:
            with os.fdopen(write, "w") as out:
                json.dump(_result(job), out)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        text = source.read()
    _, status = os.waitpid(number, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"why": f"its process was killed (signal {signal})", "peaks": []}


def _result(job: PeakJob) -> dict[str, Any]:
    found = _attempt(job)
    if isinstance(found, str):
        return {"why": found or "it failed without a word", "peaks": []}
    return {"why": "", "peaks": found}


def _attempt(job: PeakJob) -> list[Peak] | str:
    try:
        return list(_measured(job))
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def _measured(job: PeakJob) -> Iterator[Peak]:
    """Do a job in this process."""
    work = Work(**job.work)
    if job.causal:
        work = replace(work, mask=masks.causal())
    small = replace(work, length=min(_WARM, work.length), padding=0)
    if job.method == STEP_BY_STEP:
        list(_step_by_step(small))
        yield from _step_by_step(work)
        return
    method = method_named(job.method, work.device, job.rows)

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

    def step(name: str, call: Callable[[], dict[str, Tensor]], *free: str) -> Peak:
        before = held_bytes(work.device)
        extra, seconds, kept = highest(call, work.device)
        held.update(kept)
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


if __name__ == "__main__":
    serve(_perform)
