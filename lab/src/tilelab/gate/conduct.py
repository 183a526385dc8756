"""Children that compile, one per chip and at most so many at once.

Triton keeps what it compiled by the kernel and not by the chip: a process that switched chips
would be handed stale code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from tilelab.gate.record import Record
from tilelab.gate.targets import Target
from tilewise.errors import TilewiseError

__all__ = ["Compiled", "compile_all"]

PROBE = "tilelab.gate.probe"
_CHILD = "tilelab.gate.child"


class Compiled(NamedTuple):
    """The results of one chip's child process.

    Args:
        target: the chip.
        triton: the version of Triton.
        records: one per kernel, in the order of the cases.
    """

    target: Target
    triton: str
    records: list[Record]


def compile_all(
    targets: Sequence[Target],
    names: dict[str, list[str]],
    module: str,
    jobs: int,
    limit_s: int = 300,
) -> Iterator[Compiled]:
    """Compile cases for chips; each chip's result as soon as it and those before it are there.

    Args:
        targets: the chips; one with a reason ``why_not`` compiles the probe only.
        names: the cases' names by the chip's name.
        module: where the cases are listed.
        jobs: processes at once.
        limit_s: after which one kernel's compilation is given up.

    Raises:
        TilewiseError: a child could not even start on its cases.
    """

    def one(target: Target) -> Compiled:
        if target.why_not:
            return _compile_on(target, ["probe"], PROBE, limit_s)
        return _compile_on(target, names[target.name], module, limit_s)

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, targets)


def environment(cache: str) -> dict[str, str]:
    """Return a child's environment: our modules, and no Triton settings but its own cache."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    found["TRITON_CACHE_DIR"] = cache
    return found


def _compile_on(target: Target, names: list[str], module: str, limit_s: int) -> Compiled:
    """Compile all cases on one chip; after a child dies, another one does the cases left."""
    records: list[Record] = []
    version = ""
    left = list(names)
    while left:
        story, status, last_words = _listen([target.name, module, str(limit_s), *left])
        version = next((line["triton"] for line in story if "triton" in line), version)
        records += [Record(**line["record"]) for line in story if "record" in line]
        if status == 0:
            break
        begun = [line for line in story if "case" in line]
        if not begun:
            raise TilewiseError(
                f"the process that compiles for {target.name} failed: {last_words or status}"
            )
        records.append(_died(target, begun[-1], status, last_words, limit_s))
        left = left[left.index(begun[-1]["case"]) + 1 :]
    return Compiled(target, version, records)


def _listen(arguments: Sequence[str]) -> tuple[list[dict[str, Any]], int, str]:
    """Return a child's lines, its exit status, and the last line of its standard error."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", _CHILD, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            env=environment(cache),
        )
    story = [json.loads(line) for line in done.stdout.splitlines()]
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return story, done.returncode, said[-1][:300] if said else ""


def _died(
    target: Target, begun: dict[str, str], status: int, last_words: str, limit_s: int
) -> Record:
    """Return a record of the launch on which a child ended; the rest of its case goes with it."""
    if status == -signal.SIGALRM:
        error = f"not compiled in {limit_s} s"
    elif status < 0:
        error = f"the compiler died of {signal.Signals(-status).name}: {last_words}"
    else:
        error = last_words
    kernel = begun.get("kernel", "-")
    return Record(target.name, begun["case"], kernel, {}, 0, 0, error=error)
