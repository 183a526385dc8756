"""The points of a suite as tables: methods down, lengths across."""

from __future__ import annotations

from collections.abc import Sequence

from tilelab.bench.suites.points import COMPLETE, Point, Quantity, Record, amount_of, groups
from tilelab.bench.suites.sentences import crossings, where
from tilelab.common.clock import Spread
from tilelab.common.tables import Table
from tilelab.peers.methods import OURS

BY_CASE = ("models", "variants")  # suites of many cases, at one length or two
TITLES: dict[Quantity, str] = {
    "seconds": "time of one call",
    "bytes": "memory at the highest, beyond the operands (predicted)",
    "error": "largest error against float64 (allowed)",
}
_MARKS = {"wrong": "WRONG", "skipped": "-", "failed": "FAILED"}
_MOST_NOTES = 12
_RUN_BY = ("torch", "triton", "cuda", "numpy")  # of the versions in the record


def heading(record: Record) -> list[str]:
    """Return a few lines that say where the record was measured and whether it is complete."""
    machine = record.machine
    named = {name: machine["versions"].get(name) for name in _RUN_BY}
    versions = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    load = " to ".join(str(each) for each in machine["load_average"])
    cores = "1 core" if machine["cores"] == 1 else f"{machine['cores']} cores"
    clock = "CUDA events" if record.device == "cuda" else "processor time of one thread"
    lines = [
        f"{machine['chip']}, {cores}, {machine['instruction_set']}; {versions}, "
        f"Python {machine['python']}, {machine['system']}; load {load}",
        f"Times: {clock}, medians of rounds in which all methods take turns, with half the "
        "distance between the quartiles.",
    ]
    if record.status != COMPLETE:
        lines.append(f"Not everything is here: {record.status}.")
    return lines


def tables(record: Record, suite: str) -> list[Table]:
    """Return a table for each case and dtype; of many cases a table for each dtype, cases down."""
    points = record.of(suite)
    crossed = _crossed(points) if suite == "paper" else []
    if suite in BY_CASE:
        dtypes = dict.fromkeys(point.dtype for point in points)
        return [
            _cases(
                f"{suite}, {dtype}: {TITLES['seconds']}",
                [point for point in points if point.dtype == dtype],
            )
            for dtype in dtypes
        ]
    found = [
        _table(f"{case}, {dtype}: {TITLES[quantity]}", own)
        for (case, dtype, quantity), own in groups(points).items()
    ]
    return [*crossed, *found]


def _crossed(points: Sequence[Point]) -> list[Table]:
    """Tabulate the length from which each approximate method is faster than ours, by case."""
    found = crossings(points)
    methods = list(dict.fromkeys(name for each in found.values() for name in each))
    rows = [
        (case, *(where(each[name]) if name in each else "" for name in methods))
        for case, each in found.items()
    ]
    title = f"From which length on each is faster than {OURS}, and stays so"
    return [Table(title, ("case", *methods), rows)] if rows else []


def _table(title: str, points: Sequence[Point]) -> Table:
    lengths = sorted({point.length for point in points})
    cells = {(point.method, point.length): _cell(point) for point in points}
    rows = [
        (method, *(cells.get((method, length), "") for length in lengths))
        for method in _methods(points)
    ]
    return Table(title, ("method", *map(str, lengths)), rows, _notes(points))


def _methods(points: Sequence[Point]) -> list[str]:
    """Return the methods that were measured, then those that were not."""
    measured = [point.method for point in points if point.samples]
    return list(dict.fromkeys([*measured, *(point.method for point in points)]))


def _cases(title: str, points: Sequence[Point]) -> Table:
    methods = _methods(points)
    cells = {(point.case, point.length, point.method): _cell(point) for point in points}
    rows = [
        (case, str(length), *(cells.get((case, length, method), "") for method in methods))
        for case, length in dict.fromkeys((point.case, point.length) for point in points)
    ]
    return Table(title, ("case", "N", *methods), rows, _notes(points))


def _cell(point: Point) -> str:
    if point.status in _MARKS and not (point.quantity == "error" and point.samples):
        return _MARKS[point.status]
    spread = Spread.of(point.samples)
    text = amount_of(spread.median, point.quantity)
    if point.quantity == "seconds" and len(point.samples) > 1 and spread.median:
        text += f" ±{spread.noise:.0%}"
    if point.predicted is not None:
        text += f" ({amount_of(point.predicted, point.quantity)})"
    if point.allowed is not None:
        text += f" ({point.allowed:.2g})"
    if point.error is not None:
        text += f", error {point.error:.2g}"
    return f"WRONG {text}" if point.status == "wrong" else text


def _notes(points: Sequence[Point]) -> tuple[str, ...]:
    """Why there are no numbers, each reason once; what is wrong comes first."""
    order = {"wrong": 0, "failed": 1, "skipped": 2, "ok": 3}
    said: dict[tuple[int, str, str], list[str]] = {}  # lengths by rank, method and note
    for point in points:
        if point.note:
            key = order[point.status], point.method, point.note
            said.setdefault(key, []).append(str(point.length))
    merged: dict[tuple[int, str, str], list[str]] = {}  # methods by rank, note and lengths
    for (rank, method, note), lengths in said.items():
        where = ", ".join(dict.fromkeys(lengths))
        merged.setdefault((rank, note, where), []).append(method)
    notes = [
        f"{_WORDS[rank]}{'; '.join(methods)} at {where}: {note}"
        for (rank, note, where), methods in sorted(merged.items(), key=lambda each: each[0][0])
    ]
    rest = len(notes) - _MOST_NOTES
    more = [f"and {rest} more reasons, in the JSON"] if rest > 0 else []
    return (*notes[:_MOST_NOTES], *more)


_WORDS = ("WRONG ", "FAILED ", "not measured: ", "")
