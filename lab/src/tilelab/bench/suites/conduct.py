"""Works through suites: each has its share of the time, and what is done is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from tilelab.bench.suites.budget import Budget
from tilelab.bench.suites.point import COMPLETE, INTERRUPTED, Record
from tilelab.bench.suites.progress import Steps, showing
from tilelab.bench.suites.steps import Step
from tilewise.errors import TilewiseError

__all__ = ["Effort", "conduct"]


class Effort(NamedTuple):
    """The limits of a run.

    Args:
        minutes: for all suites.
        rounds: the fewest and the most of a step.
        round_budget_s: about how long the rounds of one step may take.
    """

    minutes: float
    rounds: tuple[int, int] = (3, 15)
    round_budget_s: float = 2.0


def conduct(
    record: Record,
    suites: Sequence[tuple[str, Sequence[Step]]],
    effort: Effort,
    path: Path,
    console: Console,
) -> int:
    """Do all steps into the record, which is written after each.

    A suite has an equal share of what is left; what it leaves is the others'.

    Args:
        record: begun.
        suites: names and their steps.
        effort: what may be spent.
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
        with showing(sum(len(steps) for _, steps in suites), console) as progress:
            for index, (name, steps) in enumerate(suites):
                left = effort.minutes - (time.monotonic() - began) / 60
                budget = Budget(left / (len(suites) - index), *effort[1:])
                done = _suite(record, steps, budget, progress, failed, saved)
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
    progress: Steps,
    failed: list[str],
    saved: Callable[[], None],
) -> int:
    """Do the steps of a suite until its time is over; how many were done."""
    for index, step in enumerate(steps):
        if budget.left_s <= 0:
            progress.skip(len(steps) - index)
            return index
        progress.begin(step.name, budget.left_s)
        try:
            # One by one: a Ctrl-C keeps those that are there.
            for point in step.run(budget):
                record.points.append(point)
        except TilewiseError as error:
            failed.append(f"{step.name}: {error}")
        saved()
        progress.end()
    return len(steps)
