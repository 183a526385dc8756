"""Works through suites: each has its share of the time, and what is done is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from tilelab.bench.suites.points import COMPLETE, INTERRUPTED, Record
from tilelab.bench.suites.steps import Budget, Step
from tilelab.common.terminal import Progress, in_words
from tilewise.errors import TilewiseError

__all__ = ["conduct"]


def conduct(
    record: Record,
    suites: Sequence[tuple[str, Sequence[Step]]],
    budget: Budget,
    path: Path,
    console: Console,
) -> int:
    """Do all steps into the record, which is written after each.

    A suite has an equal share of what is left; what it leaves is the others'.

    Args:
        record: begun.
        suites: names and their steps.
        budget: what may be spent on all of them.
        path: of the JSON.
        console: for the progress.

    Returns:
        0; 1 where a step failed; 130 where Ctrl-C ended it.
    """
    before = torch.get_num_threads()
    if record.device == "cpu":
        torch.set_num_threads(1)
    began = time.monotonic()
    missing: list[str] = []
    failed: list[str] = []

    def saved() -> None:
        record.write(path)

    status, code = COMPLETE, 0
    try:
        with Progress(sum(len(steps) for _, steps in suites), console) as progress:
            for index, (name, steps) in enumerate(suites):
                share = budget.share(len(suites) - index)
                done = _suite(record, steps, share, progress, failed, saved)
                if done < len(steps):
                    missing.append(f"{name}: {done} of {len(steps)} steps fit into the time")
    except KeyboardInterrupt:
        status, code = INTERRUPTED, 130
    finally:
        torch.set_num_threads(before)
    for line in failed:
        console.print(f"tilewise bench: {line}", markup=False)
    if not code and (missing or failed):
        # The words of a failure may name folders, and the record must not.
        status = "; ".join([*missing, *(["a step failed"] if failed else [])])
        code = int(bool(failed))
    record.end(status, time.monotonic() - began)
    return code


def _suite(
    record: Record,
    steps: Sequence[Step],
    budget: Budget,
    progress: Progress,
    failed: list[str],
    saved: Callable[[], None],
) -> int:
    """Do the steps of a suite until its time is over; how many were done."""
    for index, step in enumerate(steps):
        if budget.left_s <= 0:
            progress.skip(len(steps) - index)
            return index
        progress.step(step.name, f"{in_words(budget.left_s)} of the budget left")
        try:
            # One by one: a Ctrl-C keeps those that are there.
            for point in step.run(budget):
                record.points.append(point)
        except TilewiseError as error:
            failed.append(f"{step.name}: {error}")
        saved()
    return len(steps)
