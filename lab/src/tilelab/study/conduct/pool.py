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
from pathlib import Path
from typing import Any, Protocol

from tilelab.common.files import replacing, telling_full_disk
from tilelab.common.terminal import interrupts_ignored
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.plan import Agenda, Watcher
from tilelab.study.records.events import RunRecord, renamed
from tilelab.study.train.state import CHECKPOINT
from tilewise.errors import TilewiseError

_POLL_S = 0.05
_GRACE_S = 5.0  # for workers to end by themselves
_MOST_LOSSES = 3  # of a run in a row, without a checkpoint in between


class RunError(TilewiseError, RuntimeError):
    """The process of a run failed."""


class TimeUp(Exception):  # noqa: N818  reads as what happened; it never leaves the lab
    """A run, or a study, stopped at a checkpoint because its time was over."""


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
        """Return the record of one that is over.

        RunError: it failed, Lost: it went away, TimeUp: it stopped before its end.
        """

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
    folder: Path | None = None  # of the study, where runs take over the records of others
    until: float | None = None  # the time after which no run starts, as ``Execution.until``

    def work(self, agenda: Agenda, watchers: Sequence[Watcher]) -> None:
        """Run everything that is not done yet, and tell each watcher in turn.

        However it ends, no worker is left.

        Raises:
            RunError: a run failed; the others were stopped, and all can be taken up again.
            DiskFullError: there is no room for what a run writes.
            TimeUp: time was over before everything was done; every run is at a checkpoint.
            KeyboardInterrupt: Ctrl-C.
        """
        # How often each run was lost: one that kills its workers does not go on so.
        losses = Counter[str]()
        with _stopping() as workers:
            while not agenda.finished:
                if self.until is None or time.time() < self.until:
                    self._start(agenda, workers, watchers)
                elif not workers:
                    raise TimeUp
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
            if run.name in running or any(run.is_like(each.run) for each in workers):
                continue  # one that is like a running one waits for its record
            if self.folder is not None and (twin := agenda.twin(run)) is not None:
                for watcher in watchers:
                    watcher.started(run)
                record = take_over(run, twin, self.folder)
                agenda.ended(run, record)
                for watcher in watchers:
                    watcher.ended(run, record)
                return  # the agenda may be another one now
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
        except TimeUp:
            for watcher in watchers:
                watcher.paused(run)
        else:
            agenda.ended(run, record)
            for watcher in watchers:
                watcher.ended(run, record)


def take_over(run: RunSpec, twin: RunSpec, study: Path) -> RunRecord:
    """Make the record of a run from that of a finished one that is like it; its weights too.

    The checkpoint is the same file, which is never changed in its place.
    """
    theirs, ours = twin.folder(study), run.folder(study)
    first = RunRecord.read(theirs / RECORD).start.same_as or twin.name
    place = {name: getattr(run, name) for name in ("experiment", "arm", "phase", "candidate")}
    made = renamed(theirs / RECORD, run=run.name, same_as=first, **place)
    with telling_full_disk(ours):
        ours.mkdir(parents=True, exist_ok=True)
        (ours / CHECKPOINT).unlink(missing_ok=True)
        if (theirs / CHECKPOINT).exists():
            (ours / CHECKPOINT).hardlink_to(theirs / CHECKPOINT)
        with replacing(ours / RECORD) as temporary:
            temporary.write_bytes(made)
    return RunRecord.read(ours / RECORD)


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
