"""Work through an agenda with several runs at once, wherever they run.

A ``Place`` starts a run and gives a ``Worker`` to watch it by: ``process.Local`` starts processes
on this machine, ``cluster.Cluster`` tasks of Ray. No place holds anything that the folder of a run
does not. A run may be killed at any time, and whoever takes it up goes on from its last checkpoint
to the same bits. So a worker that is lost with its machine costs the steps since then, and no more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tilelab.common.terminal import interrupts_ignored
from tilelab.study.ask.run import RunSpec
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records.events import RunRecord
from tilewise.errors import TilewiseError

_POLL_S = 0.05
_GRACE_S = 5.0  # for workers to end by themselves
_MOST_LOSSES = 3  # of a run in a row, without a checkpoint in between


class RunError(TilewiseError, RuntimeError):
    """The process of a run failed."""


class Lost(Exception):  # noqa: N818  reads as what happened; it never leaves the lab
    """A worker went away with its machine; its run did nothing wrong and can be taken up again."""


class Worker(Protocol):
    """A run that was started somewhere."""

    @property
    def run(self) -> RunSpec:
        """The run, with the way that it is executed."""

    @property
    def over(self) -> bool:
        """Whether the run has ended, well or not."""

    def new_events(self) -> list[dict[str, Any]]:
        """Return the lines of its record since the last look."""

    def result(self) -> RunRecord:
        """Return the record of one that is over; RunError: it failed, Lost: it went away."""

    def stop(self) -> None:
        """Ask it to end, which costs at most the steps since the last checkpoint."""

    def close(self, deadline: float = 0.0) -> None:
        """Wait for its end until a time of the monotonic clock, then end it by force."""


class Place(Protocol):
    """A place where runs run."""

    def start(self, run: RunSpec, running: Sequence[Worker]) -> Worker:
        """Start a run beside those that are running here."""


@dataclass(frozen=True)
class Pool:
    """Runs runs."""

    place: Place
    jobs: int  # runs at once

    def work(self, agenda: Agenda, watchers: Sequence[Watcher]) -> None:
        """Run everything that is not done yet, and tell each watcher in turn.

        However it ends, no worker is left.

        Raises:
            RunError: a run failed; the others were stopped, and all can be taken up again.
            DiskFullError: there is no room for what a run writes.
            KeyboardInterrupt: Ctrl-C.
        """
        # How often each run was lost: one that kills its workers does not go on so.
        losses = Counter[str]()
        with _stopping() as workers:
            while not agenda.finished:
                self._start(agenda, workers, watchers)
                time.sleep(_POLL_S)
                for worker in list(workers):
                    # First whether it is over, then its lines: so that none is missed.
                    over = worker.over
                    for values in worker.new_events():
                        if values["event"] == "checkpoint":  # what comes after it counts anew
                            del losses[worker.run.name]
                        for watcher in watchers:
                            watcher.event(worker.run, values)
                    if over:
                        self._end(worker, agenda, watchers, losses)
                        workers.remove(worker)
                        worker.close()
                for watcher in watchers:
                    watcher.tick()

    def _start(self, agenda: Agenda, workers: list[Worker], watchers: Sequence[Watcher]) -> None:
        """Start what there is room for; a run that must be alone waits and lets none past it."""
        if len(workers) >= self.jobs or any(worker.run.alone for worker in workers):
            return
        running = {worker.run.name for worker in workers}
        for run in agenda.ready():
            if run.name in running:
                continue
            if len(workers) >= self.jobs or (run.alone and workers):
                return
            workers.append(self.place.start(run, workers))
            for watcher in watchers:
                watcher.started(run)
            if run.alone:
                return

    def _end(
        self,
        worker: Worker,
        agenda: Agenda,
        watchers: Sequence[Watcher],
        losses: Counter[str],
    ) -> None:
        run = worker.run
        try:
            record = worker.result()
        except Lost as lost:
            losses[run.name] += 1
            if losses[run.name] >= _MOST_LOSSES:
                raise RunError(
                    f"{run.name}: its worker was lost {losses[run.name]} times in a row before it "
                    f"came to a checkpoint ({lost}); the same command goes on"
                ) from None
            for watcher in watchers:
                watcher.lost(run, str(lost))
        else:
            agenda.ended(run, record)
            for watcher in watchers:
                watcher.ended(run, record)


@contextmanager
def _stopping() -> Iterator[list[Worker]]:
    """A list of workers that are all stopped at the end."""
    workers: list[Worker] = []
    try:
        yield workers
    finally:
        with interrupts_ignored():
            for worker in workers:
                worker.stop()
            deadline = time.monotonic() + _GRACE_S
            for worker in workers:
                worker.close(deadline)
