"""Runs that begin with everything imported: their processes are forks of one that waits.

``train/forks.py`` is that one, and says what passes between the two.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

from tilelab.study.ask.run import RunSpec
from tilelab.study.train.forks import MOST_BYTES

_MODULE = "tilelab.study.train.forks"


def can_be_forked(run: RunSpec) -> bool:
    """Whether a run's process may be a fork; every other run has a fresh one.

    * Linux alone: elsewhere a system has no fork, or libraries that do not survive it (macOS).
    * On a CPU and one thread: GPU contexts and threads are not copied, and with more threads
      numpy starts its own as it is imported.
    * One process, not compiled: launchers and compilers start processes of their own.
    * Our own training: what a script imports is not ours to know.
    """
    execution, config = run.execution, run.config
    one = execution.threads == execution.processes == 1 and execution.device == "cpu"
    ours = execution.module is None and not config.learning.external
    return sys.platform == "linux" and one and ours and not config.training.compile


class Forks:
    """The processes that fork, one for each environment and working folder, until ``close``."""

    def __init__(self) -> None:
        self._servers: dict[tuple[frozenset[tuple[str, str]], Path | None], _Server] = {}
        self._stack = ExitStack()  # of all that were started: one that died has forks yet

    def start(
        self, run: RunSpec, variables: Mapping[str, str], working: Path | None, errors: IO[str]
    ) -> Forked:
        """Start the process of a run.

        Args:
            run: one that ``can_be_forked``.
            variables: its environment.
            working: its working folder; None for ours.
            errors: its standard error, which has a descriptor.
        """
        key = frozenset(variables.items()), working
        if key not in self._servers or self._servers[key].over:
            self._servers[key] = _Server(variables, working)
            self._stack.callback(self._servers[key].close)
        return self._servers[key].fork(run, errors)

    def close(self) -> None:
        """End the processes that fork; forks that are left end with their standard input."""
        self._servers.clear()
        self._stack.close()


class Forked:
    """The process of a run; it has of ``subprocess.Popen`` what ``process.Process`` uses."""

    stdout = None

    def __init__(self, server: _Server, number: int, stdin: int, errors: IO[str]) -> None:
        self._server, self._number, self._errors = server, number, errors
        self.stdin = os.fdopen(stdin, "w")
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        if self._code is None:
            self._code = self._server.code_of(self._number, self._errors)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status; TimeoutExpired where it runs for longer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(_MODULE, timeout or 0.0)
            self._server.listen(left)
        return code

    def kill(self) -> None:
        """End it by force; with the process that forks, if that one has not come to it yet."""
        self._server.kill(self._number)


class _Server:
    """One process that forks."""

    def __init__(self, variables: Mapping[str, str], working: Path | None) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._codes: dict[int, int | None] = {}  # of each fork; None while it runs
        self._count = 0
        with theirs:
            # A session of its own: Ctrl-C at the terminal is the parent's to deal with.
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=dict(variables),
                cwd=working,
                start_new_session=True,
            )

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    def fork(self, run: RunSpec, errors: IO[str]) -> Forked:
        self._count += 1
        theirs, ours = os.pipe()
        try:
            self.send(
                {"number": self._count, "job": json.dumps(run.as_json())},
                [theirs, errors.fileno()],
            )
        finally:
            os.close(theirs)
        return Forked(self, self._count, ours, errors)

    def send(self, said: Mapping[str, object], descriptors: list[int] | None = None) -> None:
        """Send a packet; where nobody is there any more, ``code_of`` tells."""
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [json.dumps(said).encode()], descriptors or [])

    def kill(self, number: int) -> None:
        """End a fork by force."""
        self.listen()
        if number in self._codes:
            self.send({"kill": number})
        else:  # it imports, or reads, and hears nothing meanwhile
            self._process.kill()

    def listen(self, timeout: float | None = 0.0) -> bool:
        """Take what was answered so far, waiting for it; return whether anybody is there."""
        while select.select([self._control], [], [], timeout)[0]:
            try:
                packet = self._control.recv(MOST_BYTES)
            except ConnectionResetError:
                packet = b""
            if not packet:
                return False
            number, code = json.loads(packet)
            self._codes[number] = code
            timeout = 0.0
        return True

    def code_of(self, number: int, errors: IO[str]) -> int | None:
        """Return the exit status of a fork; None while it runs.

        The status of a fork whose parent is gone is unknown: it gets that of its parent, and
        ``errors`` the parent's last words.
        """
        there, code = self.listen(), self._codes.get(number)
        if there or code is not None:
            return code
        code = self._process.wait()
        self._errors.seek(0)
        errors.write(self._errors.read())
        return code or 1

    def close(self) -> None:
        self._process.kill()  # it has nothing to put away, and may be importing
        self._process.wait()
        self._control.close()
        self._errors.close()
