"""A suite as a list of steps: their settings, what they may spend, and how they are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from tilelab.bench.suites.points import COMPLETE, INTERRUPTED, Point, Record
from tilelab.common.terminal import Progress, in_words
from tilelab.peers.work import Work
from tilewise.errors import TilewiseError

LENGTHS = tuple(2**power for power in range(7, 17))  # 128 to 64k
QUICK_LENGTHS = (128, 512)


@dataclass
class Budget:
    """A time budget that starts when it is made, and how long calls took so far.

    Args:
        minutes: for everything.
        rounds: the fewest and the most rounds of a step.
        round_budget_s: about how long the rounds of one step may take.
    """

    minutes: float
    rounds: tuple[int, int] = (3, 15)
    round_budget_s: float = 2.0
    _began: float = field(default_factory=time.monotonic)
    _took: dict[tuple[str, ...], tuple[int, float, float]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative when it is over."""
        return self.minutes * 60 - (time.monotonic() - self._began)

    def share(self, count: int) -> Budget:
        """Return a new budget with an equal share of what is left for so many suites."""
        return Budget(self.left_s / 60 / count, self.rounds, self.round_budget_s)

    def took(self, key: tuple[str, ...], length: int, seconds: float, once_s: float = 0.0) -> None:
        """A call of a method on a case took so long, and so long what is done once before."""
        self._took[key] = length, seconds, once_s

    def too_long(self, key: tuple[str, ...], length: int) -> str:
        """Why a method should not be tried at a greater length; empty if it may.

        A call is taken to grow with the square of the length; it is made to warm up, to compare
        and then in the fewest rounds.
        """
        if key not in self._took:
            return ""
        known, seconds, once_s = self._took[key]
        expected = once_s + seconds * max(1.0, length / known) ** 2 * (2 + self.rounds[0])
        if expected <= self.left_s:
            return ""
        return f"it would take about {expected:.0f} s, and {max(self.left_s, 0):.0f} s are left"


class Step(NamedTuple):
    """A part of a suite.

    Args:
        name: for the progress.
        run: does it, and gives what was found.
    """

    name: str
    run: Callable[[Budget], Iterable[Point]]


@dataclass(frozen=True)
class Settings:
    """The settings that the user asked for.

    Args:
        device: "cpu" or "cuda".
        lengths: of the sweep, ascending.
        quick: few cases.
        dtypes: names of torch's.
        flex: whether FlexAttention, which compiles, takes part.
        models: names of well-known models.
    """

    device: str = "cpu"
    lengths: tuple[int, ...] = LENGTHS
    quick: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    flex: bool = True
    models: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Heads of a sweep: few on a single CPU thread."""
        return 8 if self.device == "cuda" else 2

    @property
    def batch(self) -> int:
        """The same at every length, so that times can be compared along it."""
        return 2 if self.device == "cuda" else 1

    def work(self, suite: str, case: str, length: int, dtype: str, **more: Any) -> Work:
        """Return a work of a sweep.

        Args:
            suite: whose it is.
            case: names it among the suite's.
            length: queries and keys.
            dtype: of the operands.
            more: fields of the Work.
        """
        heads, batch = self.heads, self.batch
        sizes = {"heads": heads, "kv_heads": heads, "batch": batch, "device": self.device}
        return Work(suite, case, length, dtype, **{**sizes, **more})


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
