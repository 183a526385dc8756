"""The process of a run, on the machine where this is called; and what its end says."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tilelab.bench.child import environment as same_tilewise
from tilelab.common.files import telling_full_disk
from tilelab.study.ask.run import RECORD, Run
from tilelab.study.conduct.pool import Lost, RunError
from tilelab.study.records.events import RunRecord
from tilelab.study.train.team import Strategy

__all__ = ["CHILD", "EXPECTED_ERROR", "Outcome", "Process", "Setting", "record_after"]

CHILD = "tilelab.study.train.child"
LAUNCH = "tilelab.study.train.launch"  # which starts several children
EXPECTED_ERROR = 3  # a child's exit status: the last line of its standard error says what is wrong
_LAST_LINES = 12


@dataclass(frozen=True)
class Setting:
    """The settings of every run of a study, wherever it runs.

    Args:
        folder: of the study.
        cache: of tokens.
        threads: of each run.
        device: ``"cpu"`` or ``"cuda"``.
        processes: of each run, each with a device of its own.
        strategy: how they share the model.
        environment: what the records say of where they ran.
        checkpoint_every_s: seconds between checkpoints.
        module: of the child; tests have others.
        variables: of the environment, whatever the machine of a run has itself.
        working: folder that relative paths of a config start from, where a machine has it; None for
            that of the process that starts a run.
    """

    folder: Path
    cache: Path
    threads: int = 1
    device: str = "cpu"
    processes: int = 1
    strategy: Strategy = "ddp"
    environment: dict[str, Any] = field(default_factory=dict)
    checkpoint_every_s: float = 10.0
    module: str = CHILD
    variables: dict[str, str] = field(default_factory=dict)
    working: Path | None = None

    def job(self, run: Run, core: int | None = None) -> dict[str, Any]:
        """Return the job of a child process, in JSON's types.

        Args:
            run: which.
            core: to be pinned to; None for no pinning.
        """
        return {
            "run": run.as_json(),
            "folder": str(self.folder),
            "cache": str(self.cache),
            "threads": self.threads,
            "core": core,
            "device": self.device,
            "processes": self.processes,
            "strategy": self.strategy,
            "checkpoint_every_s": self.checkpoint_every_s,
            "environment": self.environment,
        }

    def record(self, run: Run) -> Path:
        """Return the record of a run."""
        return run.folder(self.folder) / RECORD


class Outcome(NamedTuple):
    """The end of a process.

    Args:
        code: its exit status; negative for the signal that ended it.
        lines: the last ones of its standard error.
        size: bytes of the record that it left.
    """

    code: int
    lines: list[str]
    size: int


class Process:
    """One process with a run to do.

    It ends when its standard input closes, so that it outlives nobody who started it: every way of
    stopping is the same.

    Args:
        setting: of the study.
        job: what it is told, see ``Setting.job``.

    Raises:
        DiskFullError: there is no room.
    """

    def __init__(self, setting: Setting, job: dict[str, Any]) -> None:
        threads, working = str(setting.threads), setting.working
        several = setting.processes > 1
        modules = [*([LAUNCH] if several else []), setting.module]
        self._record = setting.record(Run.from_json(job["run"]))
        environment = {
            **same_tilewise(),
            **setting.variables,
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
            # A session of its own: Ctrl-C at the terminal is the parent's to deal with.
            self._process = subprocess.Popen(
                [sys.executable, "-m", *modules],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                env=environment,
                cwd=working if working is not None and working.is_dir() else None,
                start_new_session=True,
            )
            self._stack = stack.pop_all()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended already: its status tells why
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()

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
        self._stack.close()


def record_after(setting: Setting, run: Run, outcome: Outcome) -> RunRecord:
    """Return the record of a run whose process is over.

    Raises:
        RunError: it failed.
        Lost: a signal ended it, which may be the machine's doing.
    """
    code, lines = outcome.code, outcome.lines
    if code == EXPECTED_ERROR and lines:
        raise RunError(f"{run.name}: {lines[-1]}")
    if code < 0:
        raise Lost(f"the process of {run.name} was ended by signal {-code}")
    if code:
        words = "\n".join([f"the process of {run.name} ended with status {code}", *lines])
        raise RunError(words)
    record = RunRecord.read(setting.record(run))
    if not record.done:
        raise RunError(f"the process of {run.name} ended before its run did")
    return record
