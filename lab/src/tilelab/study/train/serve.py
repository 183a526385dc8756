"""A process that does several runs, one after the other: ``python -m tilelab.study.train.serve``.

It reads one line of JSON for each run, as ``child.py`` does, and writes a line of JSON to standard
output when that run is over, or time is up. Everything else that is printed goes to standard error.
It ends at once when standard input closes, and with the exit status of ``child.py`` after a run
that failed: what a failed run leaves behind is not to meet the next one.

Runs whose configs differ in optimizer, schedule, length or evaluation alone share what
``torch.compile`` made for the first of them: it compiles once. Before any other run the compiler
forgets everything. So a run computes what it computes in a process of its own, to the bit.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
from functools import partial
from pathlib import Path

import torch

from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RunSpec
from tilelab.study.tasks.task import Prepared, data_key
from tilelab.study.train import child
from tilelab.study.train.child import ORPHANED

_COMPILED = ("model", "attention", "training", "data", "task")  # what graphs and shapes follow from


class Server:
    """Does runs in this process."""

    def __init__(self) -> None:
        self._graphs = ""  # what the compiled code in this process was made for
        self._data: dict[str, Prepared] = {}  # of the last run, by ``data_key``

    def work(self, run: RunSpec) -> None:
        """Do a run; raise what ``child.work`` raises."""
        parts = (getattr(run.config, name).model_dump_json() for name in _COMPILED)
        graphs = " ".join([run.execution.device, *parts])
        if graphs != self._graphs:
            self._graphs = graphs
            if "torch._dynamo" in sys.modules:  # which takes a second to import
                torch.compiler.reset()
        # Memory that the last run left counts as held before this one.
        gc.collect()
        if run.execution.device == "cuda":
            torch.cuda.empty_cache()
        child.work(run, self._prepared)

    def _prepared(self, config: RunConfig, cache: Path) -> Prepared:
        """Return the data of a config; runs in a row that share it read and check it once."""
        key = f"{data_key(config)} {cache}"
        if key not in self._data:
            self._data = {key: config.learning.prepare(config, cache)}
        return self._data[key]


def main() -> int:
    """Do the jobs on standard input until one fails; return the exit status."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=partial(_read, lines), daemon=True).start()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        server = Server()
        while True:
            status = child.attempt(lines.get(), server.work)
            if status:
                return status
            print(json.dumps({"status": status}), file=answers, flush=True)


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Put down the lines of standard input; end the process with it, whatever it is doing."""
    rest = b""
    while data := os.read(sys.stdin.fileno(), 1 << 16):
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            lines.put(line.decode())
    os._exit(ORPHANED)


if __name__ == "__main__":
    sys.exit(main())
