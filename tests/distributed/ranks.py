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
TIMEOUT_S = 60.0
ENDED = object()  # instead of what a rank would have returned


class Ranks:
    """Processes that run functions together, each within ``timeout_s``."""

    def __init__(self, count: int = COUNT, timeout_s: float = TIMEOUT_S) -> None:
        self.count, self._timeout_s = count, timeout_s
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
        for pipe in self._pipes[:count]:
            pipe.send((function, arguments, count))
        found = []
        for rank, pipe in enumerate(self._pipes[:count]):
            assert pipe.poll(self._timeout_s), f"rank {rank} does not answer"
            try:
                found.append(pipe.recv())
            except EOFError:
                found.append((True, ENDED))
        failed = [text for good, text in found if not good]
        assert not failed, "\n".join(map(str, failed))
        return [each for _, each in found]

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
        timeout=timedelta(seconds=timeout_s / 2),
    )
    groups = {count: dist.new_group(list(range(count))) for count in range(1, world + 1)}
    while True:
        try:
            function, arguments, count = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(groups[count], *arguments))
        except BaseException:
            answer = (False, f"rank {rank}: {traceback.format_exc()}")
        pipe.send(answer)
