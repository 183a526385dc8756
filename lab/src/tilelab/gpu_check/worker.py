"""The steps of the check, and the worker processes that do their jobs.

``python -m tilelab.gpu_check.worker SETTING`` does jobs ``{"step": .., "job": ..}`` one after the
other, each with a limit of time, and ends itself where its GPU context is lost.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

import torch

from tilelab.common import worker
from tilelab.gpu_check import accuracy, program, smoke, speed, watched
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Setting
from tilewise.errors import Unsupported

Jobs = Callable[[Setting], Sequence[str]]
# The rows of a job of a step.
Run = Callable[[Setting, str, str], Iterator[Row]]
_MODULE = "tilelab.gpu_check.worker"
_LOST = 3  # the exit status of a process whose GPU context is lost
_Job = TypeVar("_Job")
_Found = TypeVar("_Found")


class Step(NamedTuple):
    """A part of the check."""

    name: str  # of the step
    budget_s: float  # what it may take; what has not begun by then is skipped
    job_s: float  # what one job may take before its process is ended
    jobs: Jobs  # their names, the most important first
    run: Callable[[Setting, str], Iterator[Row]]  # does one job
    parallel: bool = False  # several processes at once: for what compiles much and times nothing


# The most important first. Together they may take more than there is: what one does not use is
# there for the next.
STEPS = (
    Step("smoke", 60, 60, lambda _: ("machine", "first call"), smoke.run),
    Step("ceilings", 25, 20, lambda _: ("matrix", "copy"), smoke.run_ceilings),
    Step("accuracy", 180, 60, accuracy.jobs, accuracy.run, parallel=True),
    Step("prepare", 100, 60, speed.to_prepare, speed.prepare, parallel=True),
    Step("speed", 150, 30, speed.names(speed.with_goals), partial(speed.measure, "speed")),
    Step("training", 60, 40, lambda given: [*dict(given.sizes.models)], program.train),
    Step("host", 60, 40, lambda _: program.JOBS, program.run),
    Step("memory", 30, 20, lambda _: ("forward", "backward"), smoke.run_memory),
    Step("repeat", 30, 15, speed.to_repeat, speed.repeat),
    Step("long", 60, 30, accuracy.long_jobs, accuracy.run_long),
    Step("traffic", 60, 40, lambda _: watched.JOBS, watched.traffic),
    Step("lengths", 200, 30, speed.names(speed.other_lengths), partial(speed.measure, "lengths")),
)

# What the check leaves out, and the first half hour on a GPU does (``tilelab.tune.half_hour``).
MORE_STEPS = (
    Step(accuracy.NARROW, 240, 40, accuracy.every_narrowed, accuracy.narrow),
    Step("sanitize", 200, 75, watched.to_sanitize, watched.sanitize),
    Step(speed.DTYPES, 60, 30, speed.in_other_dtypes, speed.measure_dtype),
)


class Worker:
    """The parent's end of a worker process.

    ``command`` is the worker of this package, but for tests and the tuner.
    """

    def __init__(
        self, setting: Setting, parallel: bool = False, command: Sequence[str] = ()
    ) -> None:
        module = [*(command or (sys.executable, "-m", _MODULE)), json.dumps(asdict(setting))]
        self._child = worker.Child(module, setting.environment(parallel))

    def ask(self, step: str, job: str, limit_s: float) -> list[Row]:
        """Return the rows of a job; one says so where the process failed or took too long."""
        try:
            return [Row(**row) for row in self._child.ask({"step": step, "job": job}, limit_s)]
        except worker.ChildError as error:
            found = [Row(**row) for row in error.answers]
            return [*found, Row(step, job, "error", str(error))]

    def close(self) -> None:
        """End the process, if there is one."""
        self._child.close()


class Team:
    """Worker processes, which take jobs as they are free; ``command`` is that of a ``Worker``."""

    def __init__(self, setting: Setting, count: int = 1, command: Sequence[str] = ()) -> None:
        self.workers = [Worker(setting, count > 1, command) for _ in range(count)]
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._over = False
        for each in self.workers:
            self._free.put(each)

    def each(self, ask: Callable[[Worker, _Job], _Found], jobs: Iterable[_Job]) -> list[_Found]:
        """Return what comes of some jobs, in their order."""

        def one(job: _Job) -> _Found:
            free = self._free.get()
            try:
                if self._over:  # a process that began now would be waited for
                    raise KeyboardInterrupt
                return ask(free, job)
            finally:
                self._free.put(free)

        with ThreadPoolExecutor(len(self.workers)) as pool:
            try:
                return list(pool.map(one, jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()  # the threads wait for these
                raise

    def close(self) -> None:
        """End the processes."""
        self._over = True
        for each in self.workers:
            each.close()


def processes(most: int, spare: int) -> int:
    """Return how many processes may run at once with some cores left over."""
    return max(1, min(most, (os.cpu_count() or 1) - spare))


def _run_step(setting: Setting, step: str, job: str) -> Iterator[Row]:
    return next(each for each in (*STEPS, *MORE_STEPS) if each.name == step).run(setting, job)


def do(setting: Setting, step: str, job: str, run: Run = _run_step) -> list[Row]:
    """Return the rows of a job; what it raised is one of them."""
    rows: list[Row] = []
    try:
        for row in run(setting, step, job):
            rows.append(row)  # noqa: PERF402  those before an error are kept
    except Unsupported as error:
        rows.append(Row(step, job, "unsupported", in_short(error)))
    except Exception as error:
        where = traceback.format_exc(limit=-6)
        rows.append(Row(step, job, "error", in_short(error), {"traceback": where}))
    return rows


def _context_is_lost(setting: Setting) -> bool:
    """After an illegal access, whoever caught it, every later call on the GPU fails as well."""
    if setting.self_test:
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(8, device=setting.device).sum().item()
    except Exception:
        return True
    return False


def main(run: Run = _run_step) -> None:
    """Do jobs until there are no more; the setting is the argument of the command."""
    setting = Setting(**json.loads(sys.argv[1]))

    def perform(job: dict[str, str]) -> Iterator[dict[str, Any]]:
        return (row.as_json() for row in do(setting, job["step"], job["job"], run))

    def after() -> None:
        if _context_is_lost(setting):
            sys.exit(_LOST)
        gc.collect()
        if not setting.self_test:
            torch.cuda.empty_cache()

    worker.serve(perform, after)


if __name__ == "__main__":
    main()
