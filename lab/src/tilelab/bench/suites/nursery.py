"""A process that measures memory: it loads everything once, then gives each job a fork of its own.

It reads a list of jobs as JSON from standard input and writes a line for each result. A fork has
run nothing yet, so what it frees cannot hide in what an earlier job left. Where the system cannot
fork, the parent starts one such process for each job.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator
from typing import Any

import torch

from tilelab.bench import child
from tilelab.bench.suites.peak import Peak, Wanted, measured

__all__ = ["peaks"]

_MODULE = "tilelab.bench.suites.nursery"
# glibc raises this bound with use, and then keeps what is freed: a pass would seem to hold more.
_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536"}


def peaks(wanted: list[Wanted], device: str) -> Generator[list[Peak] | str]:
    """Yield what each job measured, in order, or the reason why it measured nothing.

    Args:
        wanted: the jobs.
        device: on a GPU they are done here, by the allocator's statistics.
    """
    if device == "cuda":
        for each in wanted:
            yield _attempt(each)
        return
    batches = [wanted] if _can_fork() else [[each] for each in wanted]
    for batch in batches:
        job = {"job": "memory", "wanted": [list(each) for each in batch]}
        for values in child.ask(job, _MODULE, _SETTINGS):
            yield values["why"] or [Peak(*each) for each in values["peaks"]]


def _can_fork() -> bool:
    # Elsewhere the system's own libraries do not survive a fork.
    return sys.platform == "linux"


def _attempt(wanted: Wanted) -> list[Peak] | str:
    try:
        return list(measured(wanted))
    except (RuntimeError, NotImplementedError, MemoryError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0]


def _result(wanted: Wanted) -> dict[str, Any]:
    found = _attempt(wanted)
    if isinstance(found, str):
        return {"why": found or "it failed without a word", "peaks": []}
    return {"why": "", "peaks": found}


def _in_a_fork(wanted: Wanted) -> dict[str, Any]:
    """Return the result of a job that a fork of this process did."""
    read, write = os.pipe()
    number = os.fork()
    if number == 0:
        os.close(read)
        try:
            with os.fdopen(write, "w") as out:
                json.dump(_result(wanted), out)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as source:
        text = source.read()
    _, status = os.waitpid(number, 0)
    if text:
        found: dict[str, Any] = json.loads(text)
        return found
    signal = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return {"why": f"its process was killed (signal {signal})", "peaks": []}


def _work() -> None:
    torch.set_num_threads(1)
    do = _in_a_fork if _can_fork() else _result
    for fields in json.load(sys.stdin)["wanted"]:
        print(json.dumps(do(Wanted(*fields))), flush=True)


if __name__ == "__main__":
    _work()
