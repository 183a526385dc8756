"""``scripts/gpu_check.py``: check the GPU backend on a GPU, in under nine minutes.

Is it exact and repeatable, with O(N) memory, and how fast? The check needs torch, numpy and the
standard library only, and no compiled core.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from tilelab.gpu_check.record import Record, Row, table
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import STEPS, Step, Team, Worker, processes

RESULTS, TABLE = "gpu_check.json", "gpu_check.txt"
_MINUTES, SELF_TEST_MINUTES = 8.7, 60.0
_SELF_TEST_PATIENCE = 100  # the interpreter is slow, and no GPU waits
_LEAST_S = 2.0  # with less than that left, no job begins
_MOST_PROCESSES, _SPARE_CORES = 14, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check.

    Returns:
        0 only where everything was done and nothing is wrong, else 1; 2 without a GPU.
    """
    options = _parser().parse_args(argv)
    if options.stored is None and not options.self_test and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; --self-test needs none", file=sys.stderr)
        return 2
    record = Record.read(options.stored) if options.stored is not None else _run(options)
    sys.stdout.write(table(record))
    sys.stdout.flush()
    return 1 if record.failures or not record.finished else 0


def _run(options: argparse.Namespace) -> Record:
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    record = Record(options.self_test, options.backend)
    begun = time.perf_counter()
    minutes = options.minutes or (SELF_TEST_MINUTES if options.self_test else _MINUTES)
    setting = Setting(options.backend, options.self_test)
    try:
        conduct_into(options.out, setting, steps, record, 60 * minutes)
        record.end("" if len(steps) == len(STEPS) else ", ".join(step.name for step in steps))
    except KeyboardInterrupt:
        record.status = f"interrupted after {time.perf_counter() - begun:.0f} s"
    write(record, options.out)
    return record


def write(record: Record, folder: Path) -> str:
    """Write a record and its table into a folder, and return the table."""
    record.write(folder / RESULTS)
    text = table(record)
    (folder / TABLE).write_text(text)
    return text


def conduct_into(
    folder: Path, setting: Setting, steps: Sequence[Step], record: Record, limit_s: float
) -> None:
    """Do as ``conduct``; after each job the record is in a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    prepared = any(step.name == "prepare" for step in steps)
    with tempfile.TemporaryDirectory() as scratch:
        # Where FlexAttention is compiled beforehand, a case that has not is timed without it.
        setting = replace(setting, scratch=scratch if prepared else "")
        conduct(setting, steps, record, limit_s, changed=lambda: record.write(folder / RESULTS))


def conduct(
    setting: Setting,
    steps: Sequence[Step],
    record: Record,
    limit_s: float,
    *,
    changed: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    start: Callable[[Setting, int], Team] = Team,
) -> None:
    """Do every job of every step, or note why it was not done, whatever becomes of each.

    ``limit_s`` is for all of it; ``changed`` is called after each job. ``start`` makes a team of so
    many worker processes.
    """
    end = clock() + limit_s
    patience = _SELF_TEST_PATIENCE if setting.self_test else 1
    lock, single = threading.Lock(), start(setting, 1)

    def do(step: Step, until: float, child: Worker, job: str) -> None:
        left, most = until - clock(), patience * step.job_s
        if left < _LEAST_S:
            rows = [Row(step.name, job, "skipped", "no time was left")]
        else:
            try:
                rows = child.ask(step.name, job, min(most, left))
            except Exception as error:
                rows = [Row(step.name, job, "error", f"{type(error).__name__}: {error}")]
            if left < most / 2 and clock() >= until and rows[-1].status == "error":
                # It had little of its own time when that of its step was over.
                rows[-1] = replace(rows[-1], status="skipped")
        with lock:
            record.rows.extend(rows)
            changed()

    try:
        for step in steps:
            begun = clock()
            until = min(begun + patience * step.budget_s, end)
            several = step.parallel and not setting.self_test
            team = start(setting, processes(_MOST_PROCESSES, _SPARE_CORES)) if several else single
            try:
                team.each(partial(do, step, until), step.jobs(setting))
            finally:
                if several:
                    team.close()
            record.seconds[step.name] = round(clock() - begun, 1)
    finally:
        single.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description="Check the GPU backend on a GPU: exact, repeatable, O(N) memory, how fast.",
        epilog=f"Writes {RESULTS} and {TABLE}. Ends with 1 where something failed or was left out.",
    )
    add = parser.add_argument
    out = Path(os.environ.get("OUT", "gpu_check"))
    add("--out", type=Path, default=out, metavar="DIR", help="where to write (default $OUT)")
    add("--self-test", action="store_true", help="tiny, in Triton's interpreter, on the processor")
    add("--backend", default="gpu", metavar="NAME", help="which backend (default gpu)")
    add("--minutes", type=float, metavar="N", help=f"the limit of time (default {_MINUTES})")
    names = [step.name for step in STEPS]
    add("--only", nargs="+", choices=names, metavar="STEP", help=f"of {', '.join(names)}")
    add("--from", dest="stored", type=Path, metavar="FILE", help="the table of a stored run")
    return parser
