"""``scripts/gpu_half_hour.py A|B|C``: what the first half hour on a GPU is for, in three commands.

All three write one record into one folder, and each reads what is there already. So a machine that
forgets everything between two commands needs that folder and nothing else. After every job the
record is on disk.

* **A** says whether the kernels are right, and how fast they are beside others.
* **B** looks into them: sanitizers, bytes that ncu counts, and blocks measured one after the other.
  If ``accuracy`` of A found a wrong result, or a call that failed or did not end, B looks for what
  makes it so instead.
* **C** is what a user's program meets: training steps, the cost of a call to the host, graphs,
  memory, long problems, other dtypes and lengths.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from tilelab.common.files import NOT_FINISHED
from tilelab.gpu_check import RESULTS, SELF_TEST_MINUTES, conduct_into, write
from tilelab.gpu_check.accuracy import job_of, narrowed
from tilelab.gpu_check.record import Record
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import MORE_STEPS, STEPS, Step
from tilelab.tune.command import main as tune
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.gpu import MEASURED, PASSES

BLOCKS = "measured"  # the folder of measured blocks, beside the record
# What no GPU has run first: it decides most.
_PASSES = ("--passes", *MEASURED[len(PASSES) :], *PASSES)
_DTYPES = ("--dtypes", "bfloat16", "float8_e4m3fn")
_WIDTHS = ("--widths", "64", "128", "256")
_TUNED = (*_PASSES, *_DTYPES, *_WIDTHS, "--kinds", "plain")


class Part(NamedTuple):
    """One command."""

    minutes: float  # it takes at most
    steps: tuple[str, ...]  # of the GPU check, in their order
    tune: float = 0.0  # minutes of these in which blocks are measured, after the steps


PARTS = {
    "A": Part(8.7, ("smoke", "ceilings", "accuracy", "prepare", "speed")),
    "B": Part(8.7, ("sanitize", "traffic"), tune=4.2),
    "C": Part(6.7, ("training", "host", "memory", "repeat", "long", "dtypes", "lengths")),
}
# Of B, after a wrong result: on the jobs that failed.
SEARCH = ("narrow", "sanitize")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part.

    Returns:
        0 if everything of it was done and nothing is wrong, 1 if not, 2 without a GPU.
    """
    options = _parser().parse_args(argv)
    if not options.self_test and not torch.cuda.is_available():
        said = "gpu_half_hour: torch sees no GPU here; --self-test needs none"
        print(said, file=sys.stderr)
        return 2
    folder: Path = options.out
    record = _before(folder, options.self_test)
    part = PARTS[options.part]
    minutes = options.minutes or (SELF_TEST_MINUTES if options.self_test else part.minutes)
    end = time.monotonic() + 60 * minutes
    setting = Setting(self_test=options.self_test)
    steps, measures = chosen(part, record, setting)
    names = {step.name for step in steps}
    # A part that is run again takes the place of what it found.
    record.rows = [row for row in record.rows if row.step not in names]
    record.status = NOT_FINISHED
    kept = 60 * part.tune if measures else 0.0
    conduct_into(folder, setting, steps, record, end - time.monotonic() - kept)
    done = {row.step for row in record.rows}
    parts = [name for name, part in PARTS.items() if done.issuperset(part.steps)]
    record.end("" if len(parts) == len(PARTS) else f"parts {', '.join(parts) or 'begun'}")
    text = write(record, folder)
    failed = measures and not _measured(folder, end, options.self_test)
    sys.stdout.write(text)
    here = [row for row in record.failures if row.step in names]
    return 1 if here or failed else 0


def chosen(part: Part, record: Record, setting: Setting) -> tuple[list[Step], bool]:
    """Return the steps of a part, and whether blocks are measured.

    After a wrong result in ``accuracy`` they are those that look for its cause.
    """
    every = {step.name: step for step in (*STEPS, *MORE_STEPS)}
    jobs = wrong_jobs(record, setting) if part.tune else ()
    if not jobs:
        return [every[name] for name in part.steps], bool(part.tune)
    narrow, sanitize = (every[name] for name in SEARCH)
    memory = tuple(f"memcheck {job}" for job in jobs)
    less = tuple(each for job in jobs for each in narrowed(setting, job))
    return [narrow._replace(jobs=lambda _: less), sanitize._replace(jobs=lambda _: memory)], False


def wrong_jobs(record: Record, setting: Setting) -> tuple[str, ...]:
    """Return the jobs of ``accuracy`` with a result that is wrong or did not come."""
    found = [row for row in record.of("accuracy") if row.status in ("wrong", "error")]
    jobs = dict.fromkeys([job_of(setting, row.name) for row in found])
    return tuple(filter(None, jobs))  # a record of other jobs than these says nothing of them


def _before(folder: Path, self_test: bool) -> Record:
    """Return the record of the parts before: all are self-tests, or none is."""
    path = folder / RESULTS
    if not path.exists():
        return Record(self_test, "gpu")
    record = Record.read(path, "--out")
    if record.self_test != self_test:
        kinds = ("a run on a GPU", "a self-test")
        raise InvalidArgument(
            "--out", f"{folder}, of {kinds[record.self_test]}",
            f"a folder of {kinds[self_test]}, or a new one",
        )  # fmt: skip
    return record


def _measured(folder: Path, end: float, self_test: bool) -> bool:
    """Measure blocks in the time that is left, into a folder beside the record: whether it did."""
    (folder / BLOCKS).mkdir(exist_ok=True)
    minutes = max(0.0, end - time.monotonic()) / 60
    arguments = ["--out", str(folder / BLOCKS), "--minutes", f"{minutes:.2f}"]
    chosen = ("--self-test", "--passes", "forward") if self_test else _TUNED
    try:
        return tune([*arguments, *chosen]) == 0
    except Unsupported as error:
        print(f"gpu_half_hour: {error}", file=sys.stderr)
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_half_hour.py",
        description="The first half hour on a GPU, in three commands that share a folder.",
        epilog="A: right, and how fast. B: sanitizers, bytes, blocks; after a wrong result, its "
        "cause. C: training, host, graphs, memory, long problems, dtypes, lengths. docs/gpu.md",
    )
    add = parser.add_argument
    add("part", choices=tuple(PARTS), help="which of the three commands")
    out = Path(os.environ.get("OUT", "gpu_half_hour"))
    add("--out", type=Path, default=out, metavar="DIR", help="where all write (default $OUT)")
    add("--minutes", type=float, metavar="N", help="the limit of time (8.7, 8.7 and 6.7)")
    add("--self-test", action="store_true", help="tiny, in Triton's interpreter, on the processor")
    return parser
