"""``bench compare A.json B.json``: ratios of medians, and which moved by more than the noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tilelab.bench.goals import GoalRecord
from tilelab.bench.steps import Point, SuiteRecord, amount_of
from tilelab.bench.suites import points_of
from tilelab.common.tables import Table
from tilelab.peers.methods import OURS
from tilewise.errors import InvalidArgument

# A median's standard error is 1.25 s / sqrt(n) and the MAD of normal numbers s / 1.48.
_ERROR_OF_MAD = 1.2533 * 1.4826
_SIGMAS = 3.0
_CONTROLS = 5  # fewer tell nothing of how runs differ
_LEAST = 0.03  # runs differ by so much where nothing changed: other addresses, other neighbours

Key = tuple[str, str, int, str, str, str, int]


class Points(NamedTuple):
    """The chip of a file, and its points with samples by their keys."""

    chip: str
    points: dict[Key, Point]


class Moved(NamedTuple):
    """A point that both files have."""

    point: Point  # of the second file
    before: float  # these two: medians
    after: float
    noise: float  # the largest change of the ratio, as a share, that says nothing

    @property
    def ratio(self) -> float:
        """The second median over the first: above 1 is slower, or more."""
        return self.after / self.before

    @property
    def word(self) -> str:
        """Better, worse, or nothing where it did not move by more than the noise."""
        if abs(math.log(self.ratio)) <= math.log1p(self.noise):
            return ""
        if self.point.quantity == "seconds":
            return "slower" if self.ratio > 1 else "faster"
        return "more" if self.ratio > 1 else "less"


def read(path: Path, argument: str = "FILE.json") -> Points:
    """Return the points of a record of a suite, or of ``bench cpu``.

    Raises:
        InvalidArgument: it is neither.
    """
    record: GoalRecord | SuiteRecord
    try:
        record = GoalRecord.read(path)
        points = [point for result in record.cases for point in points_of(result)]
    except InvalidArgument:
        record = SuiteRecord.read(path, argument)
        points = record.points
    return Points(record.machine["chip"], {point.key: point for point in points if point.samples})


def noise(point: Point) -> float:
    """Return the standard error of a median as a share of it; 0 where there are too few samples."""
    middle = statistics.median(point.samples)
    if len(point.samples) < 3 or not middle:
        return 0.0
    spread = statistics.median(abs(each - middle) for each in point.samples)
    return _ERROR_OF_MAD * spread / math.sqrt(len(point.samples)) / middle


def compare(before: Points, after: Points) -> list[Moved]:
    """Return every point that both have."""
    both = [(before.points.get(key), point) for key, point in after.points.items()]
    found = [
        Moved(point, old.median, point.median, math.hypot(noise(old), noise(point)))
        for old, point in both
        if old is not None and old.median and point.median
    ]
    between = scatter([math.log(each.ratio) for each in found if _is_control(each.point)])
    moved = []
    for each in found:
        apart = between if each.point.quantity == "seconds" else 0.0
        moved.append(each._replace(noise=max(_LEAST, _SIGMAS * math.hypot(each.noise, apart))))
    return moved


def _is_control(point: Point) -> bool:
    """Return whether no change of ours moves a time; such times show how much runs differ here."""
    return point.quantity == "seconds" and not point.method.startswith(OURS)


def scatter(ratios: Sequence[float]) -> float:
    """Return the standard deviation of logarithms of ratios around their median; 0 of too few."""
    if len(ratios) < _CONTROLS:
        return 0.0
    middle = statistics.median(ratios)
    return 1.4826 * statistics.median(abs(each - middle) for each in ratios)


def drift(moved: Sequence[Moved]) -> float:
    """Return the drift of the machine: the median ratio of times that are not ours, or 1."""
    others = [each.ratio for each in moved if _is_control(each.point)]
    return statistics.median(others) if others else 1.0


def table(before: Points, after: Points, *, every: bool = False) -> Table:
    """Return a table of what moved, or of every ratio."""
    moved = compare(before, after)
    shown = [each for each in moved if every or each.word]
    rows = [
        (
            f"{each.point.suite}: {each.point.case}",
            each.point.dtype,
            str(each.point.length),
            each.point.method,
            amount_of(each.before, each.point.quantity),
            amount_of(each.after, each.point.quantity),
            f"{each.ratio:.3f}",
            f"±{each.noise:.0%}",
            each.word or "-",
        )
        for each in shown
    ]
    count = sum(bool(each.word) for each in moved)
    notes = [f"{count} of {len(moved)} points moved by more than the noise."]
    if before.chip != after.chip:
        notes.append(f"Different chips: {before.chip} and {after.chip}.")
    notes.append(f"Times that are not of {OURS} moved by a median of {drift(moved):.3f}.")
    first, second = before.points.keys(), after.points.keys()
    if first != second:
        gone, new = len(first - second), len(second - first)
        notes.append(f"In one file only: {gone} of the first, {new} of the second.")
    head = ("case", "dtype", "N", "method", "before", "after", "ratio", "noise", "moved")
    return Table("The second file against the first", head, rows, tuple(notes))
