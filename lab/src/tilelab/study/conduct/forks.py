"""Runs that begin with everything imported: their processes are forks of one that waits.

A process of its own takes some four seconds of processor time before its first step: it imports
torch and its compiler, and opens the text. ``python -m tilelab.study.conduct.forks`` does so once.
Then it forks for each run, and a fork begins where it stands. All else is as in a fresh process
(``train/child.py``): a run has its own memory, processor time and session, dies alone, and comes to
the same bits.

A fork copies the thread that calls it and no other, so the process that forks never has a second
one: it computes nothing, and opens nothing but text.

Its standard input is a socket of packets, which ``Forks`` holds the other end of. A packet is JSON:

* ``{"number": N, "job": LINE}``, with the descriptors of a standard input and a standard error, is
  a run to fork for;
* ``{"kill": N}`` ends that run, if it is still there;
* ``[N, null]`` is the answer when a run has its process, and ``[N, STATUS]`` when that has ended,
  with the status as ``subprocess`` has it.

It ends when the socket closes. Its forks end when their own standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

import torch

from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.conduct import script
from tilelab.study.data.tokens import Tokens
from tilelab.study.tasks.task import Prepared
from tilelab.study.train.child import Opened, attempt, end_with_parent, work
from tilewise.errors import TilewiseError

_MODULE = "tilelab.study.conduct.forks"
_MOST_BYTES = 1 << 20  # of a packet
_TASKS = Path("/proc/self/task")  # a folder for each thread


def can_be_forked(run: RunSpec) -> bool:
    """Whether a run's process may be a fork; every other run has a fresh one.

    * Linux alone: elsewhere a system has no fork, or libraries that do not survive it (macOS).
    * On a CPU and one thread: GPU contexts and threads are not copied, and with more threads
      numpy starts its own as it is imported.
    * One process, not compiled: launchers and compilers start processes of their own.
    * Our own training, or a command: what a function imports is not ours to know.
    """
    execution, config = run.execution, run.config
    one = execution.threads == execution.processes == 1 and execution.device == "cpu"
    own = config.learning
    ours = execution.module is None and (not own.external or bool(own.command))
    return sys.platform == "linux" and one and ours and not config.training.compile


class Forks:
    """The processes that fork, one for each environment and working folder, until ``close``."""

    def __init__(self) -> None:
        self._servers: dict[tuple[frozenset[tuple[str, str]], Path | None], _Server] = {}
        self._stack = ExitStack()  # of all that were started: one that died has forks yet

    def start(
        self, run: RunSpec, variables: Mapping[str, str], working: Path | None, errors: IO[str]
    ) -> Forked:
        """Start the process of a run that ``can_be_forked``.

        ``working`` is its working folder; None for ours. ``errors``, its standard error, has a
        descriptor.
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
        self.listen()
        if number in self._codes:
            self.send({"kill": number})
        else:  # it imports, or reads, and hears nothing meanwhile
            self._process.kill()

    def listen(self, timeout: float | None = 0.0) -> bool:
        """Take what was answered so far, waiting for it; return whether anybody is there."""
        while select.select([self._control], [], [], timeout)[0]:
            try:
                packet = self._control.recv(_MOST_BYTES)
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


class Forker:
    """Forks for runs, and tells their ends."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._opened = control, Opened()
        # The read end of a pipe -> the number and the process of the fork that holds the other one:
        # it closes when the fork ends, however it does.
        self._forks: dict[int, tuple[int, int]] = {}

    def serve(self) -> None:
        """Do what the socket says until it closes."""
        while True:
            control = self._control.fileno()
            ready, _, _ = select.select([control, *self._forks], [], [])
            for alive in self._forks.keys() & set(ready):
                self._tell(alive)
            if control in ready:
                packet, descriptors, _, _ = socket.recv_fds(self._control, _MOST_BYTES, 2)
                if not packet:
                    return
                self._obey(json.loads(packet), descriptors)

    def _obey(self, said: dict[str, Any], descriptors: list[int]) -> None:
        if "kill" in said:
            for number, process in self._forks.values():
                if number == said["kill"]:  # nobody has waited for it: the number is its own
                    os.kill(process, signal.SIGKILL)
            return
        self._open(said["job"])
        if (threads := sum(1 for _ in _TASKS.iterdir())) > 1:
            raise RuntimeError(f"{threads} threads in a process that forks: a fork would lose them")
        gc.freeze()  # the collector of a fork would copy every page of what is here
        alive, held = os.pipe()
        process = os.fork()
        if process == 0:
            self._become(said["job"], descriptors, [alive, *self._forks])
        for each in (held, *descriptors):
            os.close(each)
        self._forks[alive] = said["number"], process
        self._answer(said["number"], None)

    def _open(self, job: str) -> None:
        """Open the text of a run; what cannot be opened is the run's to say, and to be ended by."""
        run = RunSpec.from_json(json.loads(job))
        if not run.config.learning.external:
            _warm()
        if run.config.learning.learns_text:  # other data comes through libraries with threads
            with suppress(TilewiseError, OSError):
                self._opened(run.config, run.execution.cache)

    def _touched(self, config: RunConfig, cache: Path) -> Prepared:
        """Return the data of a run with its pages in this process, as reading it leaves them."""
        # A fork that touches them while it trains would count them as memory of training.
        data = self._opened(config, cache)
        if isinstance(data, Tokens):
            for part in (data.train, data.held_out, data.tuning):
                if part is not None and len(part):
                    part.max()
        return data

    def _become(self, job: str, descriptors: list[int], others: Iterable[int]) -> NoReturn:
        """Be the process of a run, in a fork, until its end."""
        status = 1
        try:
            os.setsid()
            self._control.close()
            for each in others:
                os.close(each)
            for place, each in zip((0, 2), descriptors, strict=True):
                os.dup2(each, place)
                os.close(each)
            if RunSpec.from_json(json.loads(job)).config.learning.external:
                threading.Thread(target=script.end_with_parent, daemon=True).start()
                status = script.attempt(job)
            else:
                threading.Thread(target=end_with_parent, daemon=True).start()
                status = attempt(job, lambda run: work(run, self._touched))
        except BaseException:  # of a crash the caller reads the last lines
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)  # what is open here is the server's to close

    def _tell(self, alive: int) -> None:
        number, process = self._forks.pop(alive)
        os.close(alive)
        _, status = os.waitpid(process, 0)
        self._answer(number, os.waitstatus_to_exitcode(status))

    def _answer(self, number: int, status: int | None) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # nobody is there: ``serve`` ends
            self._control.send(json.dumps([number, status]).encode())


def main() -> None:
    """Import what runs need, then fork for them."""
    Forker(socket.socket(fileno=os.dup(0))).serve()


@cache
def _warm() -> None:
    """Import torch's compiler, as the first step of an optimizer does: it takes over a second."""
    torch.optim.AdamW([torch.zeros(1)], fused=True).step()


if __name__ == "__main__":
    main()
