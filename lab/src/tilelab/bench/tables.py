"""The tables of the cases that have goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tilelab.bench.cases import SCALING_GOAL
from tilelab.bench.results import COMPLETE, CaseResult, Memory, Record
from tilelab.common.tables import Table


def tables(record: Record, *, brief: bool = False) -> list[Table]:
    """Return every table that a record has something for.

    Args:
        record: what was measured.
        brief: dtypes side by side, and two threads as one line.
    """
    makers = (_brief, _overhead, _memory) if brief else (_cases, _overhead, _scaling, _memory)
    return [table for table in (make(record) for make in makers) if table.rows]


def heading(record: Record) -> list[str]:
    """Return a few lines that say where the record was measured."""
    machine = record.machine
    versions = machine["versions"]
    loads = " to ".join(str(load) for load in machine["load_average"] if load is not None)
    numbers = "/".join(filter(None, (machine["family"], machine["model"])))
    chip = f"{machine['chip']} (family/model {numbers})" if numbers else machine["chip"]
    lines = [
        f"{chip}, {machine['cores']} cores, {machine['isa']}; torch {versions['torch']}, "
        f"Python {versions['python']}, {machine['system']}; load {loads or 'unknown'}",
    ]
    if record.status != COMPLETE:
        lines.append(f"Not everything is here: {record.status}.")
    return lines


def _title(record: Record) -> str:
    clock = "processor time" if record.threads == 1 else "wall time"
    threads = f"{record.threads} thread{'s' if record.threads != 1 else ''}"
    return f"Attention against torch's scaled_dot_product_attention: {threads}, {clock}, medians"


def _brief(record: Record) -> Table:
    dtypes = tuple(dict.fromkeys(result.dtype for result in record.cases))
    names = tuple(dict.fromkeys(result.name for result in record.cases))
    found = {(result.name, result.dtype): result for result in record.cases}
    rows = [(name, *(_brief_cell(found.get((name, dtype))) for dtype in dtypes)) for name in names]
    notes = ["Times faster than torch, and the share of the machine's measured peak."]
    missed = [
        result
        for name in names
        for result in record.cases
        if result.name == name and result.met.startswith("no") and not result.wrong
    ]
    if missed:
        notes.append("* below its goal: " + "; ".join(map(_miss, missed)) + ".")
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


def _miss(result: CaseResult) -> str:
    return f"{result.name} {result.dtype} ({_goal(result)})"


def _cases(record: Record) -> Table:
    head = (
        "case",
        "dtype",
        "ours ms",
        "torch ms",
        "ratio [min, max]",
        "% of peak",
        "goal",
        "met",
    )
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


def _overhead(record: Record) -> Table:
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


def _scaling(record: Record) -> Table:
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


def _scaling_notes(record: Record) -> tuple[str, ...]:
    """Return how many cases scale as they should, and an equally short bare loop for the others."""
    judged = [each for each in record.scaling if each.has_goal]
    if not judged:
        return ()
    missed = [each for each in judged if each.met == "no"]
    count = f"{len(judged) - len(missed)} of {len(judged)} cases"
    note = f"Two threads scale at least {SCALING_GOAL} as well as the bare loop in {count}."
    if not missed:
        return (note,)
    each_missed = "; ".join(
        f"{each.name} {each.dtype} {each.ours:.2f} ({each.same_length:.2f})" for each in missed
    )
    why = "The others, and a bare loop no longer than they are, which has to wake a thread too"
    return note, f"{why}: {each_missed}."


def _memory(record: Record) -> Table:
    head = ("case", "dtype", "side", "peak MB beyond operands", "of it result MB")
    return Table(
        "Memory of one pass, 2 heads", head, [_memory_cells(each) for each in record.memory]
    )


def _memory_cells(each: Memory) -> tuple[str, ...]:
    sizes = (f"{size / 1e6:.1f}" for size in (each.extra_bytes, each.result_bytes))
    return each.name, each.dtype, each.side, *sizes
