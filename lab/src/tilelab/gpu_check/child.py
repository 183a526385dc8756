"""The parent's end of a worker process: asks for jobs, and ends it when one takes too long."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO

import tilelab
import tilewise
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting

__all__ = ["Child", "environment"]


_LAST_S = 3.0  # for a process that has closed its end to be gone


class Child:
    """A worker process, started when it is first asked and again after it has ended.

    Args:
        setting: of its jobs.
        parallel: whether there are others beside it.
        command: what to run; the worker of this package, but for tests.
    """

    def __init__(
        self, setting: Setting, parallel: bool = False, command: list[str] | None = None
    ) -> None:
        module = [sys.executable, "-m", "tilelab.gpu_check.worker"]
        self._command = [*(command or module), json.dumps(asdict(setting))]
        self._environment = environment(setting, parallel)
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def ask(self, step: str, job: str, limit_s: float) -> list[Row]:
        """Return the rows of a job; one says so where the process failed or took too long.

        Args:
            step: of the job.
            job: its name.
            limit_s: how long it may take, the start of the process included.
        """
        begun = time.perf_counter()
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            rows, done = _talk(process, step, job)
        finally:
            timer.cancel()
        if done and process.poll() is None:
            return rows
        if not done:
            rows.append(Row(step, job, "error", self._last_words(late.is_set(), begun)))
        self.close()
        return rows

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _kill(process)
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                with suppress(OSError):  # what was not written has no reader any more
                    stream.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None

    def _running(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._process is None:
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
            # A group of its own: ending it ends the compilers that it has started.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        return self._process

    def _last_words(self, late: bool, begun: float) -> str:
        seconds = time.perf_counter() - begun
        if late:
            return f"ended after {seconds:.0f} s: it had no more time"
        assert self._process is not None
        assert self._errors is not None
        try:
            status = self._process.wait(_LAST_S)
        except subprocess.TimeoutExpired:
            return f"after {seconds:.0f} s the process said what nobody understands"
        self._errors.seek(0)
        words = " ".join(deque((line.strip() for line in self._errors), maxlen=3))
        return f"the process ended with {status} after {seconds:.0f} s: {words[-300:]}"


def _talk(process: subprocess.Popen[str], step: str, job: str) -> tuple[list[Row], bool]:
    """Return the rows of a job, and whether it came to its end."""
    assert process.stdin is not None
    assert process.stdout is not None
    rows: list[Row] = []
    with suppress(OSError, ValueError):  # the process is gone, or ended within a line
        process.stdin.write(json.dumps({"step": step, "job": job}) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            said = json.loads(line)
            if "done" in said:
                return rows, True
            rows.append(Row(**said["row"]))
    return rows, False


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment(setting: Setting, parallel: bool) -> dict[str, str]:
    """Return a worker's environment: our packages first, and in self-tests Triton's interpreter."""
    found = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    sources = [str(Path(each.__path__[0]).resolve().parent) for each in (tilewise, tilelab)]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (*sources, found.get("PYTHONPATH"))))
    if setting.self_test:
        found["TRITON_INTERPRET"] = "1"
    elif parallel:
        # One compiler each: the processes are as many as the cores already.
        found |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return found
