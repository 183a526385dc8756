"""The tables of a run: of cases that have goals; of suites, methods down and lengths across."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tilelab.bench.goals import SCALING_GOAL, CaseResult, GoalRecord, PeerResult
from tilelab.bench.sentences import crossings, where
from tilelab.bench.steps import BenchRecord, Point, Quantity, SuiteRecord, amount_of, groups
from tilelab.common.clock import Spread
from tilelab.common.files import COMPLETE
from tilelab.common.tables import Table
from tilelab.peers.methods import OURS

BY_CASE = ("models", "variants", "widths")  # suites of many cases, at one length or two
TITLES: dict[Quantity, str] = {
    "seconds": "time of one call",
    "bytes": "memory at the highest, beyond the operands (predicted)",
    "error": "largest error against float64 (allowed)",
}
_WORDS = ("WRONG ", "FAILED ", "not measured: ", "")
_MARKS = {"wrong": "WRONG", "skipped": "-", "failed": "FAILED"}
_MOST_NOTES = 12
_MOST_CASES = 3  # named beside why a package was not measured
_RUN_BY = ("torch", "triton", "cuda", "numpy")  # of the versions in the record


def tables(record: GoalRecord, *, brief: bool = False) -> list[Table]:
    """Return every table that a record has something for.

    ``brief``: dtypes side by side, and two threads as one line.
    """
    whole = (_cases, _peers, _overhead, _scaling, _memory)
    makers = (_brief, _peers, _overhead, _memory) if brief else whole
    return [table for table in (make(record) for make in makers) if table.rows]


def heading(record: GoalRecord) -> list[str]:
    """Return a few lines that say where the record was measured."""
    machine, versions = record.machine, record.machine["versions"]
    numbers = "/".join(filter(None, (machine["family"], machine["model"])))
    chip = f"{machine['chip']} (family/model {numbers})" if numbers else machine["chip"]
    run_by = f"torch {versions['torch']}, Python {versions['python']}"
    return [_where(machine, chip, machine["isa"], run_by), *_missing(record)]


def _where(machine: Mapping[str, Any], chip: str, isa: str, run_by: str) -> str:
    loads = " to ".join(str(load) for load in machine["load_average"] if load is not None)
    cores = f"{machine['cores']} core{'s' * (machine['cores'] != 1)}"
    return f"{chip}, {cores}, {isa}; {run_by}, {machine['system']}; load {loads or 'unknown'}"


def _missing(record: BenchRecord) -> list[str]:
    complete = record.status == COMPLETE
    return [] if complete else [f"Not everything is here: {record.status}."]


def _title(record: GoalRecord) -> str:
    clock = "processor time" if record.threads == 1 else "wall time"
    threads = f"{record.threads} thread{'s' if record.threads != 1 else ''}"
    return f"Attention against torch's scaled_dot_product_attention: {threads}, {clock}, medians"


def _brief(record: GoalRecord) -> Table:
    dtypes = tuple(dict.fromkeys(result.dtype for result in record.cases))
    names = tuple(dict.fromkeys(result.name for result in record.cases))
    found = {(result.name, result.dtype): result for result in record.cases}
    rows = [(name, *(_brief_cell(found.get((name, dtype))) for dtype in dtypes)) for name in names]
    notes = ["Times faster than torch, and the share of the machine's measured peak."]
    missed = [each for each in record.cases if each.met.startswith("no") and not each.wrong]
    missed.sort(key=lambda result: names.index(result.name))
    if missed:
        notes.append("* below its goal:")
        notes += [f"- {result.name} {result.dtype}: {_goal(result)}" for result in missed]
    return Table(
        _title(record),
        ("case", *dtypes),
        rows,
        (*notes, *_wrong(record.cases), *_tally(record.cases), *_scaling_notes(record)),
    )


def _brief_cell(result: CaseResult | None) -> str:
    if result is None:
        return ""
    if result.wrong:
        return "WRONG"
    star = "*" if result.met.startswith("no") else ""
    return f"{result.ratio:.2f}x, {result.peak_fraction:.0%}{star}"


def _cases(record: GoalRecord) -> Table:
    times = ("ours ms", "torch ms", "ratio [min, max]")
    head = ("case", "dtype", *times, "% of peak", "goal", "met")
    names = list(dict.fromkeys(result.name for result in record.cases))
    results = sorted(record.cases, key=lambda result: names.index(result.name))
    return Table(
        _title(record),
        head,
        [_case_cells(result) for result in results],
        (*_wrong(results), *_peak_notes(results), *_tally(results)),
    )


def _case_cells(result: CaseResult) -> tuple[str, ...]:
    if result.wrong:
        return result.name, result.dtype, "-", "-", "WRONG", "-", _goal(result), result.met
    low, high = result.ratio_range
    return (
        result.name,
        result.dtype,
        _ms(result.seconds(result.ours)),
        _ms(result.seconds(result.torch)),
        f"{result.ratio:.2f}x [{low:.2f}, {high:.2f}]",
        f"{result.peak_fraction:.0%}",
        _goal(result),
        result.met or "-",
    )


def _goal(result: CaseResult) -> str:
    if result.goal is None:
        return "-"
    share = "" if result.goal.peak is None else f", {result.goal.peak:.0%}"
    return f"{result.goal.ratio:g}x{share}"


def _peers(record: GoalRecord) -> Table:
    """Tabulate the packages beside ours and torch's, with a line for each that was not measured."""
    asked = record.machine.get("peers", {})
    here = [name for name, each in asked.items() if not each["why_not"]]
    results = record.cases if asked else []
    found = [(f"{case.name} {case.dtype}", peer) for case in results for peer in case.peers]
    versions = [f"{name} {asked[name]['version']}" for name in here]
    return Table(
        "Other packages: milliseconds of one call with its packing, and times ours",
        ("case", "dtype", "ours", "torch", *versions),
        [(case.name, case.dtype, *_peer_cells(case, here)) for case in results],
        tuple(peer_lines(asked, found)),
    )


def _peer_cells(result: CaseResult, names: Sequence[str]) -> Iterator[str]:
    if result.wrong:
        yield from ("WRONG", *["-"] * (len(names) + 1))
        return
    ours_s = statistics.median(result.seconds(result.ours))
    found = {peer.name: peer for peer in result.peers}
    yield _ms(result.seconds(result.ours))
    yield f"{_ms(result.seconds(result.torch))}, {result.ratio:.2f}x"
    for name in names:
        yield found[name].cell(result.clock, ours_s)


def peer_lines(
    record: Mapping[str, Mapping[str, str]], found: Sequence[tuple[str, PeerResult]]
) -> list[str]:
    """Return why packages were not measured, each reason once; ``record`` is of ``standing``."""
    said = [
        f"peer {name}: not measured: {of['why_not']}"
        for name, of in record.items()
        if of["why_not"]
    ]
    cases: dict[tuple[str, str], list[str]] = {}
    for case, peer in found:
        if peer.wrong or peer.why_not:
            line = f"WRONG: {peer.wrong}" if peer.wrong else f"not measured: {peer.why_not}"
            cases.setdefault((line, peer.name), []).append(case)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (line, name), of in cases.items():
        merged.setdefault((line, tuple(of)), []).append(name)
    for (line, on), names in merged.items():
        more = f" and {len(on) - _MOST_CASES} more" if len(on) > _MOST_CASES else ""
        said.append(f"peer {', '.join(names)}: {line} ({'; '.join(on[:_MOST_CASES])}{more})")
    return said


def _ms(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.4g}"


def _wrong(results: Sequence[CaseResult]) -> Iterator[str]:
    for result in results:
        if result.wrong:
            yield f"WRONG {result.name} {result.dtype}: {result.wrong}"


def _peak_notes(results: Sequence[CaseResult]) -> Iterator[str]:
    """Yield a note per dtype on the peak rate, which is the 100 % of the table."""
    for dtype in dict.fromkeys(result.dtype for result in results):
        found = [
            rate for result in results if result.dtype == dtype for rate in result.peak_flops_s
        ]
        if found:
            yield (
                f"Peak for {dtype}: {statistics.median(found) / 1e9:.0f} GFLOP/s "
                f"({min(found) / 1e9:.0f} to {max(found) / 1e9:.0f}), measured in every round."
            )


def _tally(results: Sequence[CaseResult]) -> Iterator[str]:
    judged = [result.met for result in results if result.goal is not None]
    if judged:
        yield f"Goals met: {judged.count('yes')} of {len(judged)}."


def _overhead(record: GoalRecord) -> Table:
    rows = [
        (
            each.name,
            f"{statistics.median(each.ours_s) * 1e6:.1f}",
            f"{statistics.median(each.torch_s) * 1e6:.1f}",
            f"{each.times:.2f}x",
            f"at most {each.goal:g}x",
            each.met,
        )
        for each in record.overhead
    ]
    head = ("call", "ours us", "torch us", "times torch's", "goal", "met")
    return Table("What one call of a tiny problem costs", head, rows)


def _scaling(record: GoalRecord) -> Table:
    rows = [
        (
            each.name,
            each.dtype,
            f"{min(each.one_s) * 1e3:.4g}",
            f"{min(each.two_s) * 1e3:.4g}",
            f"{each.ours:.2f}",
            f"{each.bare_loop:.2f}",
            f"{each.same_length:.2f}",
            f"{each.relative:.2f}",
            each.met or "-",
        )
        for each in record.scaling
    ]
    times = ("1 thread ms", "2 threads ms", "t1/2t2")
    head = ("case", "dtype", *times, "bare loop", "as short", "share", "met")
    notes = _scaling_notes(record)
    return Table("Two threads against one, wall time, best round", head, rows, notes)


def _scaling_notes(record: GoalRecord) -> tuple[str, ...]:
    """Return how many cases scale as they should, and an equally short bare loop for the others."""
    judged = [each for each in record.scaling if each.has_goal]
    if not judged:
        return ()
    missed = [each for each in judged if each.met == "no"]
    count = f"{len(judged) - len(missed)} of {len(judged)} cases"
    note = f"Two threads scale at least {SCALING_GOAL} as well as the bare loop in {count}."
    if not missed:
        return (note,)
    why = "The others, and in brackets a bare loop of their length, which has to wake a thread too:"
    each_missed = (
        f"- {each.name} {each.dtype}: {each.ours:.2f} ({each.same_length:.2f})" for each in missed
    )
    return note, why, *each_missed


def _memory(record: GoalRecord) -> Table:
    head = ("case", "dtype", "side", "peak MB beyond operands", "of it result MB")
    rows = [
        (
            each.name,
            each.dtype,
            each.side,
            f"{each.extra_bytes / 1e6:.1f}",
            f"{each.result_bytes / 1e6:.1f}",
        )
        for each in record.memory
    ]
    return Table("Memory of one pass, 2 heads", head, rows)


def suite_heading(record: SuiteRecord) -> list[str]:
    """Return a few lines that say where the record was measured and whether it is complete."""
    machine = record.machine
    named = {name: machine["versions"].get(name) for name in _RUN_BY}
    versions = [f"{name} {value}" for name, value in named.items() if value]
    run_by = ", ".join([*versions, f"Python {machine['python']}"])
    clock = "CUDA events" if record.device == "cuda" else "processor time of one thread"
    return [
        _where(machine, machine["chip"], machine["instruction_set"], run_by),
        f"Times: {clock}, medians of rounds in which all methods take turns, with half the "
        "distance between the quartiles.",
        *_missing(record),
    ]


def suite_tables(record: SuiteRecord, suite: str) -> list[Table]:
    """Return a table for each case and dtype; of many cases a table for each dtype, cases down."""
    points = record.of(suite)
    found = _crossed(points) if suite == "paper" else []
    if suite in BY_CASE:
        for dtype in dict.fromkeys(point.dtype for point in points):
            own = [point for point in points if point.dtype == dtype]
            found.append(_by_case(f"{suite}, {dtype}: {TITLES['seconds']}", own))
        return found
    for (case, dtype, quantity), own in groups(points).items():
        found.append(_by_length(f"{case}, {dtype}: {TITLES[quantity]}", own))
    return found


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


def _by_length(title: str, points: Sequence[Point]) -> Table:
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


def _by_case(title: str, points: Sequence[Point]) -> Table:
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
