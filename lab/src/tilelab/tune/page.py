"""Output of the tuning command: a line for each finished job, and what was dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilelab.tune.conduct import Finding
from tilelab.tune.jobs import Job, candidates, table_blocks

__all__ = ["HEADER", "lines_of", "plan_of", "summary"]

_FORM = "{:<8} {:<9} {:>5} {:<5}  {:<12} {:>9}  {:<12} {:>9}  {:>6}  {:>6}  {}"
HEADER = _FORM.format(
    *("pass", "dtype", "width", "kind", "table", "ms", "best other", "ms", "ratio", "noise", ""),
).rstrip()


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield the line of a job, and one for each candidate that was not timed."""
    table, timing = finding.table
    job = [str(each) for each in finding.job]
    if timing is None:
        yield _FORM.format(*job, str(table), "", "", "", "", "", f"FAILED {finding.failure}")
    elif finding.best is None:
        said = _milliseconds(timing.seconds)
        yield _FORM.format(*job, str(table), said, "", "", "", "", "no other is exact and fits")
    else:
        blocks, best = finding.best
        yield _FORM.format(
            *job,
            str(table),
            _milliseconds(timing.seconds),
            str(blocks),
            _milliseconds(best.seconds),
            f"{timing.seconds / best.seconds:.3f}",
            f"{100 * (timing.spread + best.spread):.1f} %",
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
        yield f"{len(left)} not begun for want of time: {'; '.join(str(job) for job in left)}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g}"
