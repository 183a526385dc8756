"""``tilewise tune``: blocks measured on the GPU that is there, for its file of measured blocks.

The candidates of a job that are exact are timed in turn with the table's blocks; one may be kept.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import groupby, product
from pathlib import Path
from typing import NamedTuple

import torch

from tilelab.common.clock import Spread
from tilelab.gpu_check import worker
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.tune.worker import Job, candidates, is_known, table_blocks
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.folders import cache_folder
from tilewise.inspect.gpu import KINDS, MEASURED, PASSES, WIDTHS, chip_of, family_of, why_unfit
from tilewise.plan.tuned import (
    Blocks,
    Entry,
    Malformed,
    Tuned,
    file_name,
    installed_triton,
    path_for,
    read,
    refusal,
    shown,
    write,
)

_CHECK_S, _MEASURE_S = 180.0, 120.0
_SELF_TEST_PATIENCE = 10
_MOST_PROCESSES, _SPARE_CORES = 8, 2  # each holds a context on the GPU
MOST, _MOST_IN_SELF_TEST = 7, 2  # candidates of a job
_LEAST_GAIN = 0.01  # a smaller one is not worth other bits


def beats(new: Spread, table: Spread) -> bool:
    """Return whether the gain is more than the noise of both, and at least _LEAST_GAIN."""
    gain = table.median / new.median - 1
    return gain > max(_LEAST_GAIN, new.noise + table.noise)


class Finding(NamedTuple):
    """The result of a job."""

    job: Job
    table: Blocks  # the table's
    timing: Spread | None = None  # seconds of these; None where nothing was timed
    # The fastest others that are exact, and how fast; None where there are none.
    best: tuple[Blocks, Spread] | None = None
    kept: bool = False  # whether they are faster by more than the noise
    dropped: tuple[tuple[Blocks, str], ...] = ()  # candidates that were not timed, and why
    failure: str = ""  # why nothing was timed; "" if it was

    @property
    def entry(self) -> Entry | None:
        """The entry for the file; None where the table's blocks stay."""
        table, old = self.table, self.timing
        if not self.kept or self.best is None or old is None:
            return None
        blocks, new = self.best
        return Entry(self.job.place, blocks, new.median, new.noise, table, old.median, old.noise)


class Team(worker.Team):
    """Worker processes: one times, all of them check.

    ``command`` is the worker of this package, but for tests.

    Attributes:
        until: when whatever is asked ends, of the monotonic clock.
    """

    def __init__(self, setting: Setting, command: Sequence[str] = ()) -> None:
        self._patience = _SELF_TEST_PATIENCE if setting.self_test else 1
        count = 1 if setting.self_test else worker.processes(_MOST_PROCESSES, _SPARE_CORES)
        super().__init__(setting, count, command or [sys.executable, "-m", "tilelab.tune.worker"])
        self.until = math.inf

    def check(self, job: Job, blocks: Sequence[Blocks]) -> list[Row]:
        """Check each of these blocks on the small problems."""
        return self.each(
            lambda free, each: self._ask(free, "check", f"{job} {each}", _CHECK_S), blocks
        )

    def measure(self, job: Job, blocks: Sequence[Blocks]) -> Row:
        """Return seconds of each of these blocks on the large problems, while nobody else works."""
        words = " ".join(str(each) for each in (job, *blocks))
        return self._ask(self.workers[0], "measure", words, _MEASURE_S)

    def _ask(self, free: worker.Worker, step: str, words: str, limit_s: float) -> Row:
        """Return the last row of a job: where its process ended after it, that row says so."""
        left = self.until - time.monotonic()
        if left <= 0:
            return Row(step, words, "skipped", "no time was left")
        return free.ask(step, words, min(self._patience * limit_s, left))[-1]


def tune(setting: Setting, team: Team, family: str, job: Job) -> Finding:
    """Do a job; in the self-test the best is kept whatever the time says.

    The winner is timed again with the table's alone: the least of many is too good to be believed.
    """
    table = table_blocks(family, job)
    most = _MOST_IN_SELF_TEST if setting.self_test else MOST
    tried = candidates(family, job, most)
    rows = team.check(job, [table, *tried])
    if rows[0].status != "ok":
        return Finding(job, table, failure=f"the table's own {table}: {rows[0].note}")
    why = {blocks: _why_dropped(job, row) for blocks, row in zip(tried, rows[1:], strict=True)}
    others = [blocks for blocks in tried if not why[blocks]]
    best = None
    for _ in range(2):
        row = team.measure(job, [table, *others])
        if row.status != "ok":
            return Finding(job, table, failure=f"timing: {row.note}")
        why |= {each: failed for each in others if (failed := row.values["failed"].get(str(each)))}
        samples = row.values["samples_s"]
        timing = Spread.of(samples[str(table)])
        found = {each: Spread.of(samples[str(each)]) for each in others if not why[each]}
        if not found:
            best = None
            break
        best = min(found.items(), key=lambda each: each[1].median)
        others = [best[0]]
    kept = best is not None and (setting.self_test or beats(best[1], timing))
    dropped = tuple((blocks, text) for blocks, text in why.items() if text)
    return Finding(job, table, timing, best, kept, dropped)


def _why_dropped(job: Job, row: Row) -> str:
    if row.status != "ok":
        return row.note or row.status
    # These spill outside of their loops alone, as the gate sees and a GPU cannot say.
    spills = row.values["spills"] if job.pass_name in PASSES else 0
    return f"{spills} registers spilled" if spills else ""


_FORM = "{:<8} {:<9} {:>5} {:<5}  {:<12} {:>9}  {:<12} {:>9}  {:>6}  {:>6}  {}"
HEADER = _FORM.format(
    *("pass", "dtype", "width", "kind", "table", "ms", "best other", "ms", "ratio", "noise", ""),
).rstrip()


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield the line of a job, and one for each candidate that was not timed."""
    job, timing = [*(str(each) for each in finding.job), str(finding.table)], finding.timing
    if timing is None:
        yield _FORM.format(*job, "", "", "", "", "", f"FAILED {finding.failure}")
    elif finding.best is None:
        said = "no other is exact and fits"
        yield _FORM.format(*job, _milliseconds(timing), "", "", "", "", said)
    else:
        blocks, best = finding.best
        yield _FORM.format(
            *job,
            _milliseconds(timing),
            str(blocks),
            _milliseconds(best),
            f"{timing.median / best.median:.3f}",
            f"{100 * (timing.noise + best.noise):.1f} %",
            "kept" if finding.kept else "the table's stay",
        )
    for blocks, why in finding.dropped:
        yield f"    dropped {blocks}: {why}"


def plan_of(family: str, jobs: Sequence[Job], most: int) -> Iterator[str]:
    """Yield a line per job with the blocks that would be tried."""
    for job in jobs:
        others = " ".join(str(blocks) for blocks in candidates(family, job, most))
        yield f"{job!s:<27} table {table_blocks(family, job)!s:<12} tries {others}"


def summary(findings: Sequence[Finding], left: Sequence[Job]) -> Iterator[str]:
    """Yield the summary lines of the findings."""
    kept = sum(finding.kept for finding in findings)
    yield f"{kept} of {len(findings)} have faster blocks than the table's"
    if failed := sum(bool(finding.failure) for finding in findings):
        yield f"{failed} failed"
    if left:
        yield f"{len(left)} not done for want of time: {'; '.join(str(job) for job in left)}"


def _milliseconds(timing: Spread) -> str:
    return f"{1e3 * timing.median:.4g}"


_DTYPES = ("bfloat16", "float16", "float32")
_EIGHT = "float8_e4m3fn"  # only where it is asked for: most calls have none
_WIDTHS = WIDTHS[:3]  # the widest is rare, and has the smallest blocks whatever is measured
_MINUTES = 60.0


class _Chip(NamedTuple):
    name: str
    family: str


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write.

    Returns:
        0 if nothing failed, else 1. What was not done for want of time did not fail.

    Raises:
        Unsupported: there is nothing to measure on.
        InvalidArgument: the file cannot be written there.
    """
    options = _parser().parse_args(argv)
    setting = Setting(self_test=options.self_test)
    chip = _chip(setting)
    jobs = _jobs(options, chip.family)
    if options.dry_run:
        _say(_title(chip), *plan_of(chip.family, jobs, MOST))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        path = _path(options.out, chip, Path(scratch) if options.self_test else None)
        _say(_title(chip), f"into {shown(path)}", HEADER)
        findings: list[Finding] = []
        until = time.monotonic() + 60 * options.minutes
        try:
            for found in _run(setting, chip, path, jobs, until):
                findings.append(found)
                _say(*lines_of(found))
        except KeyboardInterrupt:
            _say("interrupted", *summary(findings, ()))
            raise
        done = {found.job for found in findings}
        _say(*summary(findings, [job for job in jobs if job not in done]))
        if options.self_test:
            _say("self-test: nothing here is a measurement")
    return 1 if any(finding.failure for finding in findings) else 0


def _run(
    setting: Setting, chip: _Chip, path: Path, jobs: Sequence[Job], until: float
) -> Iterator[Finding]:
    """Do the jobs that there is time for, and write after every width of a pass."""
    before, findings = _before(path, chip), []
    team = Team(setting)
    team.until = until
    try:
        for _, group in groupby(jobs, key=lambda job: job[:3]):
            for job in group:
                if time.monotonic() >= until:
                    break
                found = tune(setting, team, chip.family, job)
                if not (found.failure and time.monotonic() >= until):
                    findings.append(found)
                    yield found
            _write(path, chip, before, findings)
    finally:
        team.close()
        _write(path, chip, before, findings)


def _write(path: Path, chip: _Chip, before: Sequence[Entry], findings: Sequence[Finding]) -> None:
    """The entries of before and the new ones; a job that was done replaces its place's."""
    done = {finding.job.place: finding.entry for finding in findings if not finding.failure}
    if not done:
        return
    entries = {entry.place: entry for entry in before} | done
    kept = tuple(entry for entry in entries.values() if entry is not None)
    today = datetime.now(UTC).date().isoformat()
    write(path, Tuned(*chip, torch.__version__, installed_triton(), today, kept))
    if why := refusal(read(path), *chip, why_unfit):
        raise AssertionError(f"what was written would be refused: {why}")


def _before(path: Path, chip: _Chip) -> tuple[Entry, ...]:
    """Return the entries that a file has already, where they are of this chip and this Triton."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
        tuned = read(path)
        why = refusal(tuned, *chip, why_unfit)
    except FileNotFoundError:
        return ()
    except Malformed as error:
        why = str(error)
    except OSError as error:
        required = "a file that can be read and written, in a folder that can be made"
        raise InvalidArgument("--out", f"{path} ({error})", required) from None
    if why:
        _say(f"what was in it is not kept: {why}")
        return ()
    return tuned.entries


def _chip(setting: Setting) -> _Chip:
    """Return the chip to tune for, or raise why there is none."""
    reason, name = "", ""
    family = family_of(setting.device) if setting.self_test else None
    if find_spec("triton") is None:
        reason = "Triton is not installed (pip install triton)"
    elif setting.self_test:
        name = chip_of(setting.device)
    elif os.environ.get("TRITON_INTERPRET"):
        reason = "TRITON_INTERPRET is set: kernels would be interpreted, not measured"
    elif not torch.cuda.is_available():
        reason = "torch sees no GPU here"
    else:
        name, family = chip_of(setting.device), family_of(setting.device)
        reason = "" if family else f"no family of chips is known that {name} is of"
    if reason or family is None:
        fix = "--self-test needs Triton and no GPU; it measures nothing."
        raise Unsupported(f"there is nothing to tune for: {reason}", fix=fix)
    return _Chip(name, family)


def _jobs(options: argparse.Namespace, family: str) -> list[Job]:
    """Return the requested jobs: by dtype, the most common first, and then by pass and width.

    Kernels that no GPU has run are measured where they are asked for by name, before all else.
    """
    tiny = options.self_test
    dtypes = options.dtypes or (("float16",) if tiny else _DTYPES)
    if tiny and {"bfloat16", _EIGHT} & set(dtypes):
        raise InvalidArgument(
            "--dtypes", ", ".join(dtypes), "float16 or float32 with --self-test",
            "Triton's interpreter gets products of other types wrong.",
        )  # fmt: skip
    widths = options.widths or (_WIDTHS[:1] if tiny else _WIDTHS)
    every = product(dtypes, options.passes or PASSES, widths, options.kinds or KINDS)
    jobs = [Job(name, dtype, width, kind) for dtype, name, width, kind in every]
    jobs.sort(key=lambda job: job.pass_name in PASSES)
    return [job for job in jobs if is_known(family, job)]


def _path(out: Path | None, chip: _Chip, scratch: Path | None) -> Path:
    """Return the file to write: the requested one, else the one that calls look for."""
    if out is not None:
        return out / file_name(chip.name) if out.is_dir() else out
    if scratch is not None:  # nothing of the self-test is left behind
        return scratch / file_name(chip.name)
    return path_for(chip.name) or cache_folder() / "tuned" / file_name(chip.name)


def _title(chip: _Chip) -> str:
    versions = f"torch {torch.__version__}, Triton {installed_triton()}"
    return f"tilewise tune: {chip.name} ({chip.family}), {versions}"


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise tune",
        description="Measure blocks for the GPU that is there; keep those that are faster than "
        "the table's by more than the noise. Calls of later processes run in them.",
        epilog="The file is written after every width of a pass: Ctrl-C keeps what is done. "
        "docs/gpu.md says more.",
    )
    add = parser.add_argument
    add("--out", type=Path, metavar="FILE", help="or a folder; else where calls look for it")
    add("--passes", nargs="+", choices=MEASURED, metavar="PASS", help=f"of {', '.join(MEASURED)}")
    dtypes = (*_DTYPES, _EIGHT)
    add("--dtypes", nargs="+", choices=dtypes, metavar="DTYPE", help=f"of {', '.join(dtypes)}")
    add("--widths", nargs="+", type=int, choices=_WIDTHS, metavar="D", help="of 64, 128, 256")
    kinds = "plain, + (more for a pair than a comparison or two), * (a mask of no known shape)"
    add("--kinds", nargs="+", choices=KINDS, metavar="KIND", help=f"of {kinds}")
    add("--minutes", type=float, default=_MINUTES, metavar="N", help="end after these")
    add("--dry-run", action="store_true", help="list what would be tried, and do nothing")
    add("--self-test", action="store_true", help="tiny, in Triton's interpreter, on the processor")
    return parser
