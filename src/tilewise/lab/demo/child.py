"""The parent's end of a worker: starts the child process, asks it things, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import tilewise
from tilewise.errors import TilewiseError
from tilewise.lab.demo.worker import Job


class ChildError(TilewiseError, RuntimeError):
    """A child process of the demo ended before its work was done."""


class Child:
    """A worker process; a context manager that ends it.

    Args:
        job: what it is for.
        title: its name in messages.
    """

    def __init__(self, job: Job, title: str) -> None:
        self.title = title
        with ExitStack() as stack:
            self._errors = stack.enter_context(
                tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")
            )
            self._stack = stack.pop_all()
        # A session of its own: Ctrl-C at the terminal is the parent's to deal with, and the child
        # ends when its standard input closes, even if the parent is killed.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewise.lab.demo.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env=_environment(),
            start_new_session=True,
        )
        self._send(job._asdict())

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for the reply.

        Raises:
            ChildError: the child ended instead of replying; the message holds its last words.
        """
        self._send(request)
        return self.hear()

    def hear(self) -> dict[str, Any]:
        """The next reply (the first is that the child is ready).

        Raises:
            ChildError: as ``ask``.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ChildError(self._last_words())
        reply: dict[str, Any] = json.loads(line)
        return reply

    def warnings(self) -> str:
        """What the child has written on standard error so far."""
        self._errors.seek(0)
        return self._errors.read().strip()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ChildError(self._last_words()) from None

    def _last_words(self) -> str:
        code = self._process.wait()
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        if code == -9:
            ended += " (out of memory?)"
        tail = "\n".join(self.warnings().splitlines()[-12:])
        return f"the process of {self.title} {ended}\n{tail}".rstrip()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()  # it holds nothing that needs an orderly end
        self._process.wait()
        self._stack.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # a request that the child never read
                    stream.close()


def _environment() -> dict[str, str]:
    """The parent's environment, with the same tilewise first on the path."""
    environment = dict(os.environ)
    source = str(Path(tilewise.__file__).resolve().parent.parent)
    others = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = source + os.pathsep + others if others else source
    return environment
