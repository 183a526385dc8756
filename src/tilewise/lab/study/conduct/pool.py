"""Works through an agenda with several processes at once, one a run.

A process holds nothing that its folder does not: it may be killed at any time, and the next process
for the run goes on from the last checkpoint to the same bits. So every way of stopping is the same:
standard input is closed, the process ends, and whoever does not is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tilewise.errors import TilewiseError
from tilewise.lab.bench.child import environment as same_tilewise
from tilewise.lab.study.conduct.follow import Follower
from tilewise.lab.study.conduct.signals import interrupts_ignored
from tilewise.lab.study.files import telling_full_disk
from tilewise.lab.study.plan import Agenda, Task
from tilewise.lab.study.records import RunRecord
from tilewise.lab.study.run import RECORD, Run

__all__ = ["CHILD", "EXPECTED_ERROR", "Pool", "RunError", "Watcher"]

CHILD = "tilewise.lab.study.train.child"
EXPECTED_ERROR = 3  # a child's exit status: the last line of its standard error says what is wrong
_POLL_S = 0.05
_GRACE_S = 5.0  # for children to end by themselves
_LAST_LINES = 12


class RunError(TilewiseError, RuntimeError):
    """The process of a run failed."""


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def started(self, run: Run) -> None:
        """A process took up a run."""

    def event(self, run: Run, values: dict[str, Any]) -> None:
        """A line was added to the run's record. Raising an error ends the study."""

    def ended(self, run: Run, record: RunRecord) -> None:
        """A run is over."""

    def tick(self) -> None:
        """Some time went by."""


@dataclass(frozen=True)
class Pool:
    """How runs are run.

    Args:
        folder: of the study.
        cache: of tokens.
        jobs: runs at once.
        threads: of each run.
        cores: processors to pin runs of one thread to; empty for none.
        device: ``"cpu"`` or ``"cuda"``.
        environment: what the records say of where they ran.
        checkpoint_every_s: seconds between checkpoints.
        module: of the child; tests have others.
    """

    folder: Path
    cache: Path
    jobs: int
    threads: int = 1
    cores: tuple[int, ...] = ()
    device: str = "cpu"
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoint_every_s: float = 10.0
    module: str = CHILD

    def work(self, agenda: Agenda, watcher: Watcher) -> None:
        """Run everything that is not done yet.

        However it ends, no process is left.

        Raises:
            RunError: a run failed; the others were stopped, and all can be taken up again.
            DiskFullError: there is no room for what a run writes.
            KeyboardInterrupt: Ctrl-C.
        """
        with _stopping() as workers:
            while not agenda.finished:
                self._start(agenda, workers, watcher)
                time.sleep(_POLL_S)
                for worker in list(workers):
                    # First whether it is over, then its lines: so that none is missed.
                    over = worker.over
                    for values in worker.new_events():
                        watcher.event(worker.task.run, values)
                    if over:
                        record = worker.result()
                        workers.remove(worker)
                        worker.close()
                        agenda.ended(worker.task.run, record)
                        watcher.ended(worker.task.run, record)
                watcher.tick()

    def _start(self, agenda: Agenda, workers: list[_Worker], watcher: Watcher) -> None:
        """Start what there is room for; a run that must be alone waits and lets none past it."""
        if len(workers) >= self.jobs or any(worker.task.alone for worker in workers):
            return
        running = {worker.task.run.name for worker in workers}
        for task in agenda.ready():
            if task.run.name in running:
                continue
            if len(workers) >= self.jobs or (task.alone and workers):
                return
            workers.append(_Worker(task, self, self._free_core(workers)))
            watcher.started(task.run)
            if task.alone:
                return

    def _free_core(self, workers: Sequence[_Worker]) -> int | None:
        """The core with the fewest runs; None where runs are not pinned."""
        if self.threads > 1 or not self.cores:
            return None
        used = [worker.core for worker in workers]
        return min(self.cores, key=used.count)

    def job(self, run: Run, core: int | None) -> str:
        """The line that tells a child what to do."""
        values = {
            "run": run.as_json(),
            "folder": str(self.folder),
            "cache": str(self.cache),
            "threads": self.threads,
            "core": core,
            "device": self.device,
            "checkpoint_every_s": self.checkpoint_every_s,
            "environment": self.environment,
        }
        return json.dumps(values) + "\n"


class _Worker:
    """One process and the record that it writes."""

    def __init__(self, task: Task, pool: Pool, core: int | None) -> None:
        self.task, self.core = task, core
        self._record = task.run.folder(pool.folder) / RECORD
        threads = str(pool.threads)
        with ExitStack() as stack, telling_full_disk():
            self._record.parent.mkdir(parents=True, exist_ok=True)
            self._follower = Follower(self._record)
            self._errors = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            # A session of its own: Ctrl-C at the terminal is the parent's to deal with.
            self._process = subprocess.Popen(
                [sys.executable, "-m", pool.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env={**same_tilewise(), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
                start_new_session=True,
            )
            self._stack = stack.pop_all()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already: its status tells why
            self._process.stdin.write(pool.job(task.run, core))
            self._process.stdin.flush()

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def new_events(self) -> list[dict[str, Any]]:
        return self._follower.new()

    def result(self) -> RunRecord:
        """The record of a process that is over.

        Raises:
            RunError: it failed.
        """
        code = self._process.wait()
        lines = self._last_lines()
        if code == EXPECTED_ERROR and lines:
            raise RunError(f"{self.task.run.name}: {lines[-1]}")
        if code:
            ended = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
            if code == -9:
                ended += ": out of memory? The same command goes on; fewer --jobs need less"
            words = "\n".join([f"the process of {self.task.run.name} {ended}", *lines])
            raise RunError(words)
        record = RunRecord.read(self._record)
        if not record.done:
            raise RunError(f"the process of {self.task.run.name} ended before its run did")
        return record

    def stop(self) -> None:
        """Ask it to end, which costs at most the steps since the last checkpoint."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def close(self, deadline: float = 0.0) -> None:
        """Wait for its end until a time of the monotonic clock, then kill it."""
        self.stop()
        try:
            self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stack.close()

    def _last_lines(self) -> list[str]:
        self._errors.seek(0)
        return [line.rstrip() for line in self._errors if line.strip()][-_LAST_LINES:]


@contextmanager
def _stopping() -> Iterator[list[_Worker]]:
    """A list of workers that are all stopped at the end."""
    workers: list[_Worker] = []
    try:
        yield workers
    finally:
        with interrupts_ignored():
            for worker in workers:
                worker.stop()
            deadline = time.monotonic() + _GRACE_S
            for worker in workers:
                worker.close(deadline)
