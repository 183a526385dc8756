"""Tries the candidates of a job: exact ones are timed in turn with the table's, one may be kept."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import NamedTuple

from tilelab.common.clock import Spread
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import Worker
from tilelab.tune.jobs import Job, candidates, table_blocks
from tilewise.inspect.gpu import Blocks
from tilewise.plan.tuned import Entry

_CHECK_S, _MEASURE_S = 180.0, 120.0
_SELF_TEST_PATIENCE = 10
_MOST_PROCESSES, _SPARE_CORES = 8, 2  # each holds a context on the GPU
MOST, _MOST_IN_SELF_TEST = 7, 2  # candidates of a job
_LEAST_GAIN = 0.01  # a smaller one is not worth other bits


class Timing(NamedTuple):
    """Some runs.

    Args:
        seconds: of one, the median.
        spread: half the range of the middle half of them, as a share of the median.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the timing of one or more runs."""
        found = Spread.of(samples)
        return cls(found.median, found.noise)


def beats(new: Timing, table: Timing) -> bool:
    """Return whether the gain is more than both spreads together, and at least _LEAST_GAIN."""
    gain = table.seconds / new.seconds - 1
    return gain > max(_LEAST_GAIN, new.spread + table.spread)


class Finding(NamedTuple):
    """The result of a job.

    Args:
        job: which.
        table: the table's blocks, and how fast they are.
        best: the fastest others that are exact, and how fast; None where there are none.
        kept: whether they are faster by more than the noise.
        dropped: candidates that were not timed, and why.
        failure: why nothing was timed; "" if it was.
    """

    job: Job
    table: tuple[Blocks, Timing | None]
    best: tuple[Blocks, Timing] | None = None
    kept: bool = False
    dropped: tuple[tuple[Blocks, str], ...] = ()
    failure: str = ""

    @property
    def entry(self) -> Entry | None:
        """The entry for the file; None where the table's blocks stay."""
        table, timing = self.table
        if not self.kept or self.best is None or timing is None:
            return None
        blocks, best = self.best
        return Entry(self.job.place, blocks, *best, table, *timing)


class Team:
    """Worker processes: one times, all of them check.

    Args:
        setting: of their jobs.
        command: what to run; the worker of this package, but for tests.
    """

    def __init__(self, setting: Setting, command: Sequence[str] = ()) -> None:
        self._patience = _SELF_TEST_PATIENCE if setting.self_test else 1
        count = 1 if setting.self_test else _processes()
        module = [sys.executable, "-m", "tilelab.tune.worker"]
        made = [Worker(setting, count > 1, list(command) or module) for _ in range(count)]
        self._children = made
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._over = False
        for child in made:
            self._free.put(child)

    def check(self, job: Job, blocks: Sequence[Blocks]) -> list[Row]:
        """Check each of these blocks on the small problems."""

        def one(each: Blocks) -> Row:
            child = self._free.get()
            try:
                if self._over:  # a process that began now would be waited for
                    raise KeyboardInterrupt
                return _only(child.ask("check", f"{job} {each}", self._patience * _CHECK_S))
            finally:
                self._free.put(child)

        with ThreadPoolExecutor(len(self._children)) as pool:
            try:
                return list(pool.map(one, blocks))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()  # the threads wait for these
                raise

    def measure(self, job: Job, blocks: Sequence[Blocks]) -> Row:
        """Return seconds of each of these blocks on the large problems, while nobody else works."""
        words = " ".join(str(each) for each in (job, *blocks))
        return _only(self._children[0].ask("measure", words, self._patience * _MEASURE_S))

    def close(self) -> None:
        """End the processes."""
        self._over = True
        for child in self._children:
            child.close()


def tune(setting: Setting, team: Team, family: str, job: Job) -> Finding:
    """Do a job.

    Args:
        setting: where; in the self-test the best is kept whatever the time says.
        team: who does it.
        family: the chip's.
        job: what.
    """
    table = table_blocks(family, job)
    most = _MOST_IN_SELF_TEST if setting.self_test else MOST
    tried = candidates(family, job, most)
    rows = team.check(job, [table, *tried])
    if rows[0].status != "ok":
        return Finding(job, (table, None), failure=f"the table's own {table}: {rows[0].note}")
    why = {blocks: _why_dropped(row) for blocks, row in zip(tried, rows[1:], strict=True)}
    good = [blocks for blocks in tried if not why[blocks]]
    timing, best, failed = _fastest(team, job, table, good)
    dropped = tuple((blocks, text) for blocks, text in (why | failed).items() if text)
    if timing is None:
        return Finding(job, (table, None), failure=failed[table])
    kept = best is not None and (setting.self_test or beats(best[1], timing))
    return Finding(job, (table, timing), best, kept, dropped)


class _Raced(NamedTuple):
    """The timing of the table's blocks (None: it failed), of the best others, and who failed."""

    table: Timing | None
    best: tuple[Blocks, Timing] | None
    failed: dict[Blocks, str]


def _fastest(team: Team, job: Job, table: Blocks, others: Sequence[Blocks]) -> _Raced:
    """Time blocks in turn.

    The winner is timed again with the table's alone: the least of many is too good to be believed.
    """
    failed: dict[Blocks, str] = {}
    for _ in range(2):
        row = team.measure(job, [table, *others])
        if row.status != "ok":
            return _Raced(None, None, {table: f"timing: {row.note}"})
        failed |= {each: why for each in others if (why := row.values["failed"].get(str(each)))}
        samples = row.values["samples_s"]
        found = {b: Timing.of(samples[str(b)]) for b in (table, *others) if b not in failed}
        rivals = sorted(found.keys() - {table}, key=lambda blocks: found[blocks].seconds)
        if not rivals:
            return _Raced(found[table], None, failed)
        others = rivals[:1]
    return _Raced(found[table], (rivals[0], found[rivals[0]]), failed)


def _why_dropped(row: Row) -> str:
    if row.status != "ok":
        return row.note or row.status
    spills = row.values["spills"]
    return f"{spills} registers spilled" if spills else ""


def _only(rows: list[Row]) -> Row:
    """Return the row of a job; where its process ended after it, what it last said."""
    return rows[-1]


def _processes() -> int:
    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) - _SPARE_CORES))
