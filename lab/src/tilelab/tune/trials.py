"""Tries the candidates of a job: exact ones are timed in turn with the table's, one may be kept."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from tilelab.common.clock import Spread
from tilelab.gpu_check import worker
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.tune.jobs import Job, candidates, table_blocks
from tilewise.plan.tuned import Blocks, Entry

_CHECK_S, _MEASURE_S = 180.0, 120.0
_SELF_TEST_PATIENCE = 10
_MOST_PROCESSES, _SPARE_CORES = 8, 2  # each holds a context on the GPU
MOST, _MOST_IN_SELF_TEST = 7, 2  # candidates of a job
_LEAST_GAIN = 0.01  # a smaller one is not worth other bits


def beats(new: Spread, table: Spread) -> bool:
    """Return whether the gain is more than the noise of both, and at least _LEAST_GAIN."""
    gain = table.median / new.median - 1
    return gain > max(_LEAST_GAIN, new.noise + table.noise)


class Finding(NamedTuple):
    """The result of a job.

    Args:
        job: which.
        table: the table's blocks.
        timing: seconds of these; None where nothing was timed.
        best: the fastest others that are exact, and how fast; None where there are none.
        kept: whether they are faster by more than the noise.
        dropped: candidates that were not timed, and why.
        failure: why nothing was timed; "" if it was.
    """

    job: Job
    table: Blocks
    timing: Spread | None = None
    best: tuple[Blocks, Spread] | None = None
    kept: bool = False
    dropped: tuple[tuple[Blocks, str], ...] = ()
    failure: str = ""

    @property
    def entry(self) -> Entry | None:
        """The entry for the file; None where the table's blocks stay."""
        table, old = self.table, self.timing
        if not self.kept or self.best is None or old is None:
            return None
        blocks, new = self.best
        return Entry(self.job.place, blocks, new.median, new.noise, table, old.median, old.noise)


class Team(worker.Team):
    """Worker processes: one times, all of them check.

    Args:
        setting: of their jobs.
        command: what to run; the worker of this package, but for tests.

    Attributes:
        until: when whatever is asked ends, of the monotonic clock.
    """

    def __init__(self, setting: Setting, command: Sequence[str] = ()) -> None:
        self._patience = _SELF_TEST_PATIENCE if setting.self_test else 1
        count = 1 if setting.self_test else worker.processes(_MOST_PROCESSES, _SPARE_CORES)
        super().__init__(setting, count, command or [sys.executable, "-m", "tilelab.tune.worker"])
        self.until = math.inf

    def check(self, job: Job, blocks: Sequence[Blocks]) -> list[Row]:
        """Check each of these blocks on the small problems."""
        return self.each(
            lambda free, each: self._ask(free, "check", f"{job} {each}", _CHECK_S), blocks
        )

    def measure(self, job: Job, blocks: Sequence[Blocks]) -> Row:
        """Return seconds of each of these blocks on the large problems, while nobody else works."""
        words = " ".join(str(each) for each in (job, *blocks))
        return self._ask(self.workers[0], "measure", words, _MEASURE_S)

    def _ask(self, free: worker.Worker, step: str, words: str, limit_s: float) -> Row:
        """Return the last row of a job: where its process ended after it, that row says so."""
        left = self.until - time.monotonic()
        if left <= 0:
            return Row(step, words, "skipped", "no time was left")
        return free.ask(step, words, min(self._patience * limit_s, left))[-1]


def tune(setting: Setting, team: Team, family: str, job: Job) -> Finding:
    """Do a job; in the self-test the best is kept whatever the time says.

    The winner is timed again with the table's alone: the least of many is too good to be believed.
    """
    table = table_blocks(family, job)
    most = _MOST_IN_SELF_TEST if setting.self_test else MOST
    tried = candidates(family, job, most)
    rows = team.check(job, [table, *tried])
    if rows[0].status != "ok":
        return Finding(job, table, failure=f"the table's own {table}: {rows[0].note}")
    why = {blocks: _why_dropped(row) for blocks, row in zip(tried, rows[1:], strict=True)}
    others = [blocks for blocks in tried if not why[blocks]]
    best = None
    for _ in range(2):
        row = team.measure(job, [table, *others])
        if row.status != "ok":
            return Finding(job, table, failure=f"timing: {row.note}")
        why |= {each: failed for each in others if (failed := row.values["failed"].get(str(each)))}
        samples = row.values["samples_s"]
        timing = Spread.of(samples[str(table)])
        found = {each: Spread.of(samples[str(each)]) for each in others if not why[each]}
        if not found:
            best = None
            break
        best = min(found.items(), key=lambda each: each[1].median)
        others = [best[0]]
    kept = best is not None and (setting.self_test or beats(best[1], timing))
    dropped = tuple((blocks, text) for blocks, text in why.items() if text)
    return Finding(job, table, timing, best, kept, dropped)


def _why_dropped(row: Row) -> str:
    if row.status != "ok":
        return row.note or row.status
    spills = row.values["spills"]
    return f"{spills} registers spilled" if spills else ""
