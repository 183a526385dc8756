"""Processes that stay for many tests, each a rank of torch.distributed with gloo."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

COUNT = 4
# How long torch.distributed waits for a peer, and we for an answer. Long, for a busy machine is no
# fault; what hangs ends then.
TIMEOUT_S, ANSWER_S = 300.0, 600.0
ENDED = object()  # instead of what a rank would have returned


class Ranks:
    """Processes that run functions together.

    Args:
        count: how many.
        timeout_s: how long torch.distributed waits for a peer that says nothing.
    """

    def __init__(self, count: int = COUNT, timeout_s: float = TIMEOUT_S) -> None:
        self.count, self._calls = count, 0
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, count, store, timeout_s, there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *arguments: Any, count: int = 0) -> list[Any]:
        """Return what a function of a module returns on the first ``count`` ranks, 0 for all.

        It is called with the ranks' process group and the arguments. What one of them raises is
        raised here, with its traceback.
        """
        found = self.try_run(function, *arguments, count=count)
        assert not any(each is ENDED for each in found), "a rank ended"
        return found

    def try_run(self, function: Callable[..., Any], *arguments: Any, count: int = 0) -> list[Any]:
        """As ``run``; ENDED for a rank whose process ended meanwhile."""
        count = count or self.count
        self._calls += 1
        for pipe in self._pipes[:count]:
            pipe.send((self._calls, function, arguments, count))
        found = [self._answer(rank) for rank in range(count)]
        failed = [text for good, text in found if not good]
        assert not failed, "\n".join(map(str, failed))
        return [each for _, each in found]

    def _answer(self, rank: int) -> tuple[bool, Any]:
        """Return whether a rank's last call went well, and what it returned."""
        pipe = self._pipes[rank]
        while True:
            assert pipe.poll(ANSWER_S), f"rank {rank} does not answer"
            try:
                call, *answer = pipe.recv()
            except EOFError:
                return True, ENDED
            if call == self._calls:  # and not the late answer to a call before
                good, value = answer
                return good, value

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            process.kill()
        self._folder.cleanup()


def _serve(rank: int, world: int, store: str, timeout_s: float, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=ANSWER_S),  # to import torch may take one of them long
    )
    timeout = timedelta(seconds=timeout_s)
    groups = {
        count: dist.new_group(list(range(count)), timeout=timeout) for count in range(1, world + 1)
    }
    while True:
        try:
            call, function, arguments, count = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (call, True, function(groups[count], *arguments))
        except BaseException:
            answer = (call, False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
