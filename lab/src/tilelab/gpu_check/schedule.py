"""Runs the steps one after the other within a limit of time, whatever becomes of each."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from tilelab.gpu_check.record import Record, Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.steps import Step
from tilelab.gpu_check.worker import Worker

Clock = Callable[[], float]
_SPARE_CORES = 3
_MOST_PROCESSES = 12
_SELF_TEST_PATIENCE = 100  # the interpreter is slow, and no GPU waits
_LEAST_S = 2.0  # with less than that left, no job begins


def conduct(
    setting: Setting,
    steps: Sequence[Step],
    record: Record,
    limit_s: float,
    *,
    changed: Callable[[], None] = lambda: None,
    clock: Clock = time.perf_counter,
    start: Callable[[Setting, bool], Worker] = Worker,
) -> None:
    """Do every job of every step, or note why it was not done.

    Args:
        setting: of the jobs.
        steps: in order.
        record: where the rows go.
        limit_s: for all of it.
        changed: called after each job.
        clock: seconds.
        start: makes a worker process, given whether there are others beside it.
    """
    end = clock() + limit_s
    patience = _SELF_TEST_PATIENCE if setting.self_test else 1
    single = start(setting, False)
    try:
        for step in steps:
            begun = clock()
            until = min(begun + patience * step.budget_s, end)
            children = [single]
            if step.parallel and not setting.self_test:
                children = [start(setting, True) for _ in range(_processes())]
            try:
                _conduct_step(
                    setting, step, record, children, until, patience * step.job_s, changed, clock
                )
            finally:
                for child in children:
                    if child is not single:
                        child.close()
            record.seconds[step.name] = round(clock() - begun, 1)
    finally:
        single.close()


def _processes() -> int:
    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - _SPARE_CORES))


def _ask(child: Worker, step: str, job: str, limit_s: float) -> list[Row]:
    """Return the rows of a job, whatever happens."""
    try:
        return child.ask(step, job, limit_s)
    except Exception as error:  # a thread that ended would leave its jobs to nobody
        return [Row(step, job, "error", f"{type(error).__name__}: {error}")]


def _conduct_step(
    setting: Setting,
    step: Step,
    record: Record,
    children: Sequence[Worker],
    until: float,
    job_s: float,
    changed: Callable[[], None],
    clock: Clock,
) -> None:
    jobs, lock = deque(step.jobs(setting)), threading.Lock()

    def work(child: Worker) -> None:
        while True:
            with lock:
                if not jobs:
                    return
                job = jobs.popleft()
            left = until - clock()
            if left < _LEAST_S:
                rows = [Row(step.name, job, "skipped", "no time was left")]
            else:
                rows = _ask(child, step.name, job, min(job_s, left))
            with lock:
                record.rows.extend(rows)
                changed()

    if len(children) == 1:
        work(children[0])
        return
    threads = [threading.Thread(target=work, args=(child,)) for child in children]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
