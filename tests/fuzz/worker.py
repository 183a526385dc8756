"""Child processes that check cases, so that a crash kills a child and its seed is known.

The parent never computes (a process forked after threads have run can hang): it imports, forks,
and reads one line of JSON per event from each child.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from tests.fuzz.case import Case
from tests.fuzz.check import FaultError, check
from tilewise.engine import dispatch

PATIENCE_S = 300.0  # of one case; a sanitizer makes it slow


class Verdict(NamedTuple):
    """What came of a case: ``kind`` "" where it holds."""

    seed: int
    kind: str
    words: str
    seconds: float


def judge(case: Case, guard: str = "") -> tuple[str, str]:
    """The kind and words of a case's fault; two empty texts where it holds."""
    try:
        check(case, guard)
    except FaultError as fault:
        return fault.kind, str(fault)
    except Exception as error:
        return f"fuzzer:{type(error).__name__}", traceback.format_exc()
    return "", ""


def strict() -> None:
    """Memory that nobody wrote is NaN, so that reading it shows."""
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


class Child:
    """A forked process that checks cases one by one and says so."""

    def __init__(self, cases: Iterable[tuple[int, Case, str]]) -> None:
        reading, writing = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            _serve(writing, cases)
        os.close(writing)
        self.pipe = os.fdopen(reading, "rb", buffering=0)
        self.rest = b""
        self.seed: int | None = None
        self.since = time.monotonic()

    def events(self) -> list[dict[str, Any]] | None:
        """What it said since; None when it is gone."""
        block = os.read(self.pipe.fileno(), 1 << 16)
        if not block:
            return None
        *lines, self.rest = (self.rest + block).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> str:
        """Wait for it, and say how it ended: "" or the name of a signal or status."""
        self.pipe.close()
        _, status = os.waitpid(self.pid, 0)
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return "" if os.WEXITSTATUS(status) == 0 else f"exit{os.WEXITSTATUS(status)}"

    def kill(self) -> None:
        """End it."""
        os.kill(self.pid, signal.SIGKILL)


def _serve(writing: int, cases: Iterable[tuple[int, Case, str]]) -> None:
    status = 1
    try:
        for seed, case, guard in cases:
            os.write(writing, json.dumps({"begin": seed}).encode() + b"\n")
            started = time.monotonic()
            kind, words = judge(case, guard)
            seconds = time.monotonic() - started
            event = {"seed": seed, "kind": kind, "words": words, "seconds": seconds}
            os.write(writing, json.dumps(event).encode() + b"\n")
        status = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def one(case: Case, guard: str = "") -> tuple[str, str]:
    """``judge`` in a child of its own, which may crash or hang."""
    for verdict in pool(lambda _, after: iter([(0, case, guard)] if after is None else []), 1):
        return verdict.kind, verdict.words
    return "lost", "the child ended without a word"


def pool(
    cases: Callable[[int, int | None], Iterator[tuple[int, Case, str]]],
    children: int,
    until: float = float("inf"),
) -> Iterator[Verdict]:
    """Verdicts of several children; one that dies or hangs is a verdict too, and replaced.

    Args:
        cases: those of the child with this number, behind this seed where it replaces another that
            died of it.
        children: how many at once.
        until: the monotonic time when no child is begun again and those that run are ended.
    """
    # Here and not in each child, because both import for a while.
    strict()
    dispatch.load("cpu")
    running = {i: Child(cases(i, None)) for i in range(children)}
    try:
        yield from _verdicts(running, cases, until)
    finally:
        for child in running.values():
            child.kill()
            child.end()


def _verdicts(
    running: dict[int, Child],
    cases: Callable[[int, int | None], Iterator[tuple[int, Case, str]]],
    until: float,
) -> Iterator[Verdict]:
    """Listen to children until all have ended or the time is up."""
    while running and time.monotonic() < until:
        by_pipe = {child.pipe.fileno(): (i, child) for i, child in running.items()}
        ready, _, _ = select.select(list(by_pipe), [], [], 1.0)
        for i, child in list(running.items()):
            if child.pipe.fileno() in ready:
                events = child.events()
                if events is None:
                    del running[i]
                    ended = child.end()
                    if ended and child.seed is not None:
                        yield Verdict(child.seed, ended, f"the process ended by {ended}", 0.0)
                        if time.monotonic() < until:
                            running[i] = Child(cases(i, child.seed))
                    continue
                for event in events:
                    child.since = time.monotonic()
                    if "begin" in event:
                        child.seed = event["begin"]
                    else:
                        child.seed = None
                        yield Verdict(**event)
            elif time.monotonic() - child.since > PATIENCE_S and child.seed is not None:
                seed = child.seed
                child.kill()
                child.end()
                del running[i]
                yield Verdict(seed, "hang", f"no answer within {PATIENCE_S:.0f} s", PATIENCE_S)
                if time.monotonic() < until:
                    running[i] = Child(cases(i, seed))
