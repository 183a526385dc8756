"""Child processes that do jobs: one protocol for all that measure in a process of their own.

The parent writes a job as a line of JSON. The child writes ``{"answer": ..}`` for each thing that
it finds, then ``{"done": true}``. What libraries print goes to the standard error, whose last lines
say why a child ended. This module needs the standard library alone.
"""

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import tilelab
import tilewise
from tilewise.errors import TilewiseError

_LAST_S = 60.0  # for a process that has closed its end to be gone, on a busy machine too
_NONSENSE_S = 3.0  # for one that may have ended within a line
_LAST_LINES, _LAST_LETTERS = 3, 300  # of its standard error


class ChildError(TilewiseError):
    """A child process failed, or took too long.

    Attributes:
        answers: what it found before.
        status: its exit status; None where it had to be ended.
    """

    def __init__(self, message: str, answers: list[Any], status: int | None) -> None:
        super().__init__(message)
        self.answers, self.status = answers, status


class Child:
    """A child process, started when it is first asked and again after it has ended.

    A command that is a name is that of a module for Python. Without ``variables`` its environment
    is ``environment()``.
    """

    def __init__(
        self, command: str | Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        module = [sys.executable, "-m", command] if isinstance(command, str) else command
        self._command = list(module)
        self._variables = environment() if variables is None else dict(variables)
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, job: Any, limit_s: float | None = None) -> list[Any]:
        """Return the answers to a job.

        ``limit_s`` includes the start of the process; None for any time.

        Raises:
            ChildError: the process failed or took too long.
        """
        begun = time.perf_counter()
        process = self._running()
        late = threading.Event()

        def end() -> None:
            late.set()
            _kill(process)

        timer = threading.Timer(limit_s or 0.0, end)
        if limit_s is not None:
            timer.start()
        try:
            answers, done, closed = _talk(process, job)
        finally:
            timer.cancel()
        if not done:
            rest_s = _LAST_S if closed else _NONSENSE_S
            words, status = self._last_words(late.is_set(), time.perf_counter() - begun, rest_s)
            self.close()
            raise ChildError(words, answers, status)
        if process.poll() is not None:  # it ended itself after the job
            self.close()
        return answers

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
            self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            # A group of its own: ending it ends the compilers that it has started, and Ctrl-C is
            # the parent's to deal with.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=self._variables,
                start_new_session=True,
            )
        return self._process

    def _last_words(self, late: bool, seconds: float, rest_s: float) -> tuple[str, int | None]:
        """Return why a process ended, and its exit status; wait so long for its end."""
        if late:
            return f"ended after {seconds:.0f} s: it had no more time", None
        assert self._process is not None
        assert self._errors is not None
        try:
            status = self._process.wait(rest_s)
        except subprocess.TimeoutExpired:
            return f"after {seconds:.0f} s the process wrote what is no answer", None
        self._errors.seek(0)
        lines = (line.strip() for line in self._errors)
        words = " ".join(deque(filter(None, lines), maxlen=_LAST_LINES))[-_LAST_LETTERS:]
        return f"the process ended with {status} after {seconds:.0f} s: {words}", status


def _talk(process: subprocess.Popen[str], job: Any) -> tuple[list[Any], bool, bool]:
    """Return the answers to a job, whether it came to its end, and whether the process hung up."""
    assert process.stdin is not None
    assert process.stdout is not None
    answers: list[Any] = []
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        for line in process.stdout:
            found = json.loads(line)
            if "done" in found:
                return answers, True, False
            answers.append(found["answer"])
    except ValueError:  # no answer, or one that it could not finish
        return answers, False, False
    except OSError:
        pass
    return answers, False, True


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def environment() -> dict[str, str]:
    """Return this process's environment, with our packages first and threads that wait quietly.

    An OpenMP thread that spins while it waits takes the core that the next measurement needs; the
    setting is read when torch is loaded.
    """
    found = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}
    sources = [str(Path(each.__path__[0]).resolve().parent) for each in (tilewise, tilelab)]
    found["PYTHONPATH"] = os.pathsep.join(filter(None, (*sources, found.get("PYTHONPATH"))))
    return found


def serve(
    perform: Callable[[Any], Iterable[Any]], after: Callable[[], None] = lambda: None
) -> None:
    """Do jobs until there are no more, and call ``after`` after each.

    ``perform`` gives the answers to a job, for JSON; what it raises ends the process.
    """
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nobody else writes between our lines
    for line in sys.stdin:
        for answer in perform(json.loads(line)):
            print(json.dumps({"answer": answer}), file=channel, flush=True)
        print(json.dumps({"done": True}), file=channel, flush=True)
        after()
