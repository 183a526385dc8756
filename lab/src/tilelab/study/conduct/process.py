"""Runs as processes on this machine: start them, follow their records, read their end.

Every study would begin with the first core. So a study locks a file for each core that it pins to,
and has the core alone for as long as it lasts. The system gives the lock back with the process,
however that ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilelab.common.files import telling_full_disk
from tilelab.common.worker import environment as same_tilewise
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.conduct.forks import Forked, Forks, can_be_forked
from tilelab.study.conduct.pool import Lost, RunError, TimeUp, Worker
from tilelab.study.records.events import RunRecord
from tilelab.study.train.child import EXPECTED_ERROR
from tilewise.folders import NotPrivate, private_folder, runtime_folder

_CHILD = "tilelab.study.train.child"
_SCRIPT = "tilelab.study.conduct.script"
_LAST_LINES = 12
# glibc gives the memory of a step back to the system, which fills it with zeros for the next step:
# a quarter of the processor time of a small model. With these it keeps blocks of up to 32 MiB (the
# largest that it lets us name). Peak memory is the same (notes/performance-log.md).
_KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(32 << 20),
}
_END_S = 5.0  # for a process that serves to end by itself


class Outcome(NamedTuple):
    """The end of a process."""

    code: int  # its exit status; negative for the signal that ended it
    lines: list[str]  # the last ones of its standard error
    size: int  # bytes of the record that it left


class Process:
    """One process with a run to do; one that ``serves`` answers and can be given further ones.

    It ends when its standard input closes, so that it outlives nobody who started it: every way of
    stopping is the same.
    """

    def __init__(self, run: RunSpec, serves: bool = False, forks: Forks | None = None) -> None:
        execution, self._record = run.execution, run.record
        threads, working = str(execution.threads), execution.working
        working = working if working is not None and working.is_dir() else None
        several = execution.processes > 1
        own = execution.module or (_SCRIPT if run.config.learning.external else _CHILD)
        modules = [*([_CHILD, "launch"] if several else []), own, *(["serve"] if serves else [])]
        # Kernels are compared as users meet them, and a script of somebody's own is theirs.
        kept = {} if run.alone or run.config.learning.external else _KEEP_MEMORY
        environment = {
            **kept,
            **same_tilewise(),
            **execution.variables,
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
        }
        with ExitStack() as stack, telling_full_disk():
            self._record.parent.mkdir(parents=True, exist_ok=True)
            self._errors = stack.enter_context(
                tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
            )
            if several:  # torch's agent leaves folders behind
                folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
                environment["TMPDIR"] = stack.enter_context(folder)
            self._process: subprocess.Popen[str] | Forked
            if forks is not None and can_be_forked(run):
                self._process = forks.start(run, environment, working, self._errors)
                self._stack = stack.pop_all()
                return
            # A session of its own: Ctrl-C at the terminal is the parent's to deal with.
            self._process = subprocess.Popen(
                [sys.executable, "-m", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if serves else subprocess.DEVNULL,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env=environment,
                cwd=working,
                start_new_session=True,
            )
            self._stack = stack.pop_all()
        self.give(run)

    def give(self, run: RunSpec) -> None:
        """Let it do a run."""
        self._record = run.record
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already: its status tells why
            self._process.stdin.write(json.dumps(run.as_json()) + "\n")
            self._process.stdin.flush()

    @property
    def answered(self) -> bool:
        """Whether one that serves has done the run that it was given last."""
        out = self._process.stdout
        assert out is not None
        return bool(select.select([out], [], [], 0)[0] and out.readline())

    @property
    def over(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def outcome(self) -> Outcome:
        """Wait for its end."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line.rstrip() for line in self._errors if line.strip()][-_LAST_LINES:]
        size = self._record.stat().st_size if self._record.exists() else 0
        return Outcome(code, lines, size)

    def stop(self) -> None:
        """Ask it to end."""
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
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stack.close()


def record_after(run: RunSpec, outcome: Outcome) -> RunRecord:
    """Return the record of a run whose process is over: a RunError where it failed.

    A signal that ended it may be the machine's doing: then it is Lost. One whose time is over, and
    that is not done, is TimeUp.
    """
    code, lines = outcome.code, outcome.lines
    if code == EXPECTED_ERROR and lines:
        raise RunError(f"{run.name}: {lines[-1]}")
    if code < 0:
        raise Lost(f"the process of {run.name} was ended by signal {-code}")
    if code:
        words = "\n".join([f"the process of {run.name} ended with status {code}", *lines])
        raise RunError(words)
    record = RunRecord.read(run.record)
    if not record.done:
        if run.time_is_up:
            raise TimeUp
        raise RunError(f"the process of {run.name} ended before its run did")
    return record


def _record_here(run: RunSpec, outcome: Outcome) -> RunRecord:
    """As ``record_after``; a process that was killed is no loss but a failure: the machine is."""
    try:
        return record_after(run, outcome)
    except Lost as lost:
        killed = outcome.code == -signal.SIGKILL
        hint = ": out of memory? The same command goes on; fewer --jobs need less" if killed else ""
        raise RunError("\n".join([f"{lost}{hint}", *outcome.lines])) from None


class Follower:
    """The events appended to a record since the last look; for showing, not for deciding."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # A torn last line is cut off before the next one is written.
        self._offset = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0

    def new(self) -> list[dict[str, Any]]:
        """Return the new whole lines, parsed; what is no event is left to the record's reader."""
        try:
            size = self._path.stat().st_size
            if size <= self._offset:
                self._offset = size  # less, where the file was cut off meanwhile
                return []
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [found for line in whole.splitlines() if (found := _parsed(line))]


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    return values if isinstance(values, dict) and "event" in values else None


@dataclass(frozen=True)
class Local:
    """This machine."""

    execution: Execution
    cores: Cores | None = None  # to pin runs of one thread to; None for no pinning
    forks: Forks | None = None  # where runs begin with everything imported; None for fresh ones

    def start(self, run: RunSpec, running: Sequence[Worker]) -> Worker:
        """Start the process of a run; see ``pool.Place``."""
        return _LocalWorker(self.placed(run, running), self.forks)

    def placed(self, run: RunSpec, running: Sequence[Worker]) -> RunSpec:
        """Return the run as it is executed here, on a core if it is pinned to one."""
        core = None
        if self.cores is not None and self.execution.threads == self.execution.processes == 1:
            core = self.cores.choose([worker.run.execution.core for worker in running])
        return run.executed(self.execution, core=core)


class _LocalWorker(Process):
    """One process and the record that it writes; see ``pool.Worker``."""

    def __init__(self, run: RunSpec, forks: Forks | None) -> None:
        self.run = run
        self.new_events = Follower(run.record).new
        super().__init__(run, forks=forks)

    def result(self) -> RunRecord:
        return _record_here(self.run, self.outcome())


class OneProcess:
    """This machine, with one process for all runs, which compiles once: ``train/child.py``.

    The pool gives it one run at a time, and ``close`` ends it. A run that fails ends it too.
    """

    def __init__(self, local: Local) -> None:
        self._local = local
        self._process: Process | None = None

    def start(self, run: RunSpec, running: Sequence[Worker]) -> Worker:
        """Give the process a run; start one where there is none."""
        assert not running, "one run at a time"
        placed, process = self._local.placed(run, running), self._process
        if process is None or process.over:
            self.close()
            process = self._process = Process(placed, serves=True)
        else:
            process.give(placed)
        return _Turn(placed, process)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.close(time.monotonic() + _END_S)


class _Turn:
    """A run in a process that serves; see ``pool.Worker``."""

    def __init__(self, run: RunSpec, process: Process) -> None:
        self.run, self._process, self._answered = run, process, False
        self.new_events = Follower(run.record).new

    @property
    def over(self) -> bool:
        self._answered = self._answered or self._process.answered
        return self._answered or self._process.over

    def result(self) -> RunRecord:
        outcome = Outcome(0, [], 0) if self._answered else self._process.outcome()
        return _record_here(self.run, outcome)

    def stop(self) -> None:
        """End the process: nothing else of the study is in it."""
        if not self._answered:
            self._process.stop()

    def close(self, deadline: float = 0.0) -> None:
        """Wait for the end of a process that is to stop; one that answered goes on to serve."""
        if not self._answered:
            self._process.close(deadline)


def lock_folder() -> Path:
    """Return the folder in which the studies of this user on this machine find their locks."""
    return runtime_folder() / "cores"


class Cores:
    """The cores of this machine that a study pins its runs to, until ``close``.

    ``processors`` has the number of one of each core, in order of choice; empty for no pinning. The
    folder of the locks is made if need be. Where it is not this user's alone, or cannot be written,
    ``trouble`` says so and other studies are not seen.
    """

    def __init__(self, processors: Sequence[int], folder: Path) -> None:
        self._processors = tuple(processors)
        self._folder: Path | None = None
        self.trouble = ""
        if self._processors:
            try:
                self._folder = private_folder(folder)
            except OSError as error:
                self._give_up(folder, error)
        self._own: set[int] = set()
        self._files = ExitStack()
        self.close = self._files.close

    def choose(self, used: Sequence[int | None]) -> int | None:
        """Choose the core of the next run: one without a run, else the one with the fewest.

        None where cores are left that are other studies': the system finds a place for the run.
        """
        for each in sorted(self._processors, key=lambda core: core not in self._own):
            if each not in used and self._take(each):
                return each
        if not self._own or len(self._own) < len(self._processors):
            return None
        return min(self._processors, key=used.count)

    def _take(self, core: int) -> bool:
        """Claim a core for this study if it is free; return whether the study has it."""
        if core not in self._own:
            file = self._open(core)
            if file is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(file)
                    return False
                self._files.callback(os.close, file)
            self._own.add(core)
        return True

    def _open(self, core: int) -> int | None:
        """Open the lock of a core; None where there are no locks."""
        if self._folder is None:
            return None
        path = self._folder / str(core)
        # Not through a link, and without waiting for whoever reads from a FIFO.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(path, flags, 0o600)
            if not stat.S_ISREG(os.fstat(file).st_mode):
                os.close(file)
                raise NotPrivate(f"{path} is no regular file")
        except OSError as error:
            self._give_up(path, error)
            return None
        return file

    def _give_up(self, path: Path, error: OSError) -> None:
        self._folder = None
        why = str(error) if isinstance(error, NotPrivate) else f"{path}: {error.strerror}"
        self.trouble = (
            f"Other studies on this machine are not seen, so two runs may share a core: {why}. "
            "Remove what is there, or set XDG_RUNTIME_DIR to a folder of mode 700 that you own."
        )
