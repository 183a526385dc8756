"""The process that forks the runs of a study: ``python -m tilelab.study.train.forks``.

A process of its own takes some four seconds of processor time before its first step: it imports
torch and its compiler, and opens the text. This one does so once. Then it forks for each run, and
a fork begins where it stands. All else is as in a fresh process (``train/child.py``): a run has its
own memory, processor time and session, dies alone, and comes to the same bits.

A fork copies the thread that calls it and no other, so this process never has a second one: it
computes nothing, and opens nothing but text.

Standard input is a socket of packets, which ``conduct/forks.py`` holds the other end of. A packet
is JSON:

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
import sys
import threading
import traceback
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.data.tokens import Tokens
from tilelab.study.tasks.task import Prepared
from tilelab.study.train.child import Opened, attempt, end_with_parent, work
from tilewise.errors import TilewiseError

MOST_BYTES = 1 << 20  # of a packet
_TASKS = Path("/proc/self/task")  # a folder for each thread


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
                packet, descriptors, _, _ = socket.recv_fds(self._control, MOST_BYTES, 2)
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
        if run.config.learning.learns_text:  # other data comes through libraries with threads
            with suppress(TilewiseError, OSError):
                self._opened(run.config, run.execution.cache)

    def _touched(self, config: RunConfig, cache: Path) -> Prepared:
        """Return the data of a run with its pages in this process, as reading it leaves them.

        A fork has them only once it touches them, and then they would count as training's memory.
        """
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
    """Import what runs import late, then fork for them."""
    control = socket.socket(fileno=os.dup(0))
    # The first step of an optimizer imports torch's compiler, which takes over a second.
    torch.optim.AdamW([torch.zeros(1)], fused=True).step()
    Forker(control).serve()


if __name__ == "__main__":
    main()
