"""Tables of runs that were made elsewhere: exports of W&B and MLflow, and any CSV or JSON.

A table is a list of rows, each a run: column -> value. ``read`` takes

* ``.csv``: a row a run, such as the export of W&B's table of runs, or ``mlflow experiments csv``;
  ``;`` or a tab may separate its values;
* ``.json``: a list of objects, or an object with such a list as ``runs``; ``.jsonl``: an object a
  line. Nested values get dotted names (``config.lr``); W&B's ``{"value": ...}`` is its value. A
  list ``history`` of objects gives each key's last value;
* a folder ``mlruns`` of MLflow: status, parameters, tags and the last value of each metric.

``values_of`` sorts a column by arm and seed, as ``compare_all`` takes it. A column may be named
without what these put before it: ``lr`` finds ``params.lr``, ``config.lr`` or ``metrics.lr``.
"""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilelab.stats.values import invalid

Row = Mapping[str, Any]
_BEFORE = ("params.", "config.", "metrics.", "summary.", "tags.", "history.")
_STEPS = ("_step", "step")  # of rows that are evaluations of a run
_RUNS = ("run_id", "Run ID", "run", "Run", "run_name", "Name", "name")  # which run a row is of
_STATUS = ("", "RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")  # by MLflow's number
_MOST = 12  # columns or runs that a message names


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file or a folder; see the top of this file.

    Raises:
        InvalidArgument: there is nothing, it is of another form, or has no rows.
    """
    if path.is_dir():
        rows = list(_of_mlflow(path))
    elif not path.is_file():
        raise invalid("table", f"{path}, which is no file", "a table of runs")
    elif path.suffix == ".csv":
        rows = _of_csv(path)
    elif path.suffix in (".json", ".jsonl", ".ndjson"):
        rows = [_flat(each) for each in _objects(path)]
    else:
        required = "a name that ends in .csv, .json or .jsonl, or a folder mlruns"
        raise invalid("table", str(path), required)
    if not rows:
        raise invalid("table", f"{path}, without a row", "a row for each run")
    return rows


def column(rows: Sequence[Row], name: str, argument: str) -> str:
    """Return the full name of a column.

    Raises:
        InvalidArgument: of that argument: no row has it, or it may be one of several.
    """
    known = list(dict.fromkeys(key for row in rows for key in row))
    if name in known:
        return name
    found = [f"{before}{name}" for before in _BEFORE if f"{before}{name}" in known]
    if len(found) == 1:
        return found[0]
    if found:
        raise invalid(argument, repr(name), f"one of {', '.join(found)}")
    near = difflib.get_close_matches(name, [*known, *map(bare, known)], n=1)
    fix = f"Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(known[:_MOST]) + (", ..." if len(known) > _MOST else "")
    raise invalid(argument, f"{name!r}, which is no column", f"one of {shown}", fix)


def bare(name: str) -> str:
    """Return the name of a column without what an export put before it."""
    return next((name.removeprefix(each) for each in _BEFORE if name.startswith(each)), name)


def where(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """Return the rows that meet every ``column=value``."""
    kept = list(rows)
    for each in conditions:
        name, equals, value = each.partition("=")
        if not equals:
            raise invalid("--where", repr(each), "column=value, such as State=finished")
        key = column(rows, name, "--where")
        there = sorted({str(row.get(key, "")) for row in kept})
        kept = [row for row in kept if str(row.get(key, "")) == value]
        if not kept:
            shown = ", ".join(there[:_MOST]) + (", ..." if len(there) > _MOST else "")
            raise invalid("--where", repr(each), f"a value that a run has in {key}: {shown}")
    return kept


def values_of(
    rows: Sequence[Row], *, arm: Sequence[str], seed: str, metric: str
) -> dict[str, dict[int, float | None]]:
    """Return arm -> seed -> metric; None for a number that is not finite.

    Args:
        rows: of ``read``.
        arm: columns whose values, joined with ``/``, name an arm.
        seed: the column of seeds.
        metric: the column of the metric. Of rows with the same arm and seed the last step counts,
            where they have steps (``_step`` or ``step``).

    Raises:
        InvalidArgument: a column that is not there, a seed that is no whole number, a metric
            without a value, or two runs of an arm with the same seed: rows that name other
            runs, or have other values at the same step.
    """
    arms = [column(rows, each, "--arm") for each in arm]
    by_seed, value = column(rows, seed, "--seed"), column(rows, metric, "--metric")
    steps = next((each for each in _STEPS if any(each in row for row in rows)), None)
    run = next((each for each in _RUNS if any(each in row for row in rows)), "")
    found: dict[str, dict[int, tuple[float, float | None]]] = {}
    whose: dict[tuple[str, int], object] = {}
    at_step: dict[tuple[str, int, float | None], float | None] = {}
    for at, row in enumerate(rows, 1):
        if any(_missing(row.get(each)) for each in arms):
            fix = "--where leaves rows out."
            raise invalid("--arm", f"row {at} without a {arms[0]}", "a value in every row", fix)
        name = "/".join(str(row[each]) for each in arms)
        number = _seed(row.get(by_seed), at, by_seed)
        again = whose.setdefault((name, number), row.get(run)) != row.get(run)
        step = _number(row.get(steps)) if steps else None
        runs = found.setdefault(name, {})
        if _missing(row.get(value)):
            continue  # a row of a history that has other numbers, or a run without the metric
        result = _number(row[value], value)
        again |= number in runs and step is None
        again |= at_step.setdefault((name, number, step), result) != result
        if again:
            required = "one run for each arm and seed"
            fix = "Name what else they differ in by another --arm, or leave rows out by --where."
            raise invalid("table", f"two runs of {name} with seed {number}", required, fix)
        if number not in runs or (step or 0.0) >= runs[number][0]:
            runs[number] = (step or 0.0, result)
    empty = [f"{name} with seed {number}" for name, number in whose if number not in found[name]]
    if empty:
        came = ", ".join(empty[:_MOST]) + (", ..." if len(empty) > _MOST else "")
        required = f"a value of {value} for every run: nan for one that diverged"
        fix = "Leave out runs that have not ended, such as by --where State=finished."
        raise invalid("--metric", f"no {value} of {came}", required, fix)
    return {
        name: {each: result for each, (_, result) in sorted(runs.items())}
        for name, runs in found.items()
    }


def paired_values(
    values: Mapping[str, Mapping[int, float | None]],
    baseline: str,
    seeds: Sequence[int] | None = None,
) -> tuple[Mapping[int, float | None], dict[str, Mapping[int, float | None]]]:
    """Return the values of the baseline and of the arms, which have the same seeds.

    Args:
        values: of ``values_of``.
        baseline: one of its arms.
        seeds: those that count; None for all of the baseline's.

    Raises:
        InvalidArgument: no such arm, or an arm without one of the seeds, or with more.
    """
    if baseline not in values:
        near = difflib.get_close_matches(baseline, list(values), n=1)
        fix = f"Did you mean {near[0]!r}?" if near else ""
        raise invalid("--baseline", repr(baseline), f"one of {', '.join(values)}", fix)
    if len(values) < 2:
        raise invalid("--arm", f"{baseline} alone", "a column with two values or more")
    wanted = set(values[baseline]) if seeds is None else set(seeds)
    common = sorted(set.intersection(*map(set, values.values())))
    shared = ",".join(map(str, common))
    fix = f"--seeds {shared} compares those that all have." if common else "No seed is in all arms."
    for name, own in values.items():
        lacks = sorted(wanted - set(own))
        more = sorted(set(own) - wanted) if seeds is None else []
        if lacks or more:
            what = f"without seeds {lacks}" if lacks else f"with seeds {more} more"
            required = f"the seeds of every arm to be the same: {sorted(wanted)}"
            raise invalid("--seed", f"{name} {what}", required, fix)
    kept = {name: {each: own[each] for each in sorted(wanted)} for name, own in values.items()}
    return kept.pop(baseline), dict(kept)


def _of_csv(path: Path) -> list[dict[str, Any]]:
    file = io.StringIO(_text(path), newline="")
    separator = max(",;\t", key=file.readline().count)  # of equals the comma
    file.seek(0)
    reader = csv.reader(file, delimiter=separator, skipinitialspace=True, strict=True)
    rows: list[dict[str, Any]] = []
    try:
        head = next(reader, [])
        twice = [name for at, name in enumerate(head) if name.strip() and name in head[:at]]
        if twice:
            raise invalid("table", f"{path} with two columns {twice[0]}", "every name once")
        for row in reader:
            if any(each.strip() for each in row[len(head) :]):
                came = f"line {reader.line_num} of {path} with {len(row)} values"
                fix = "Numbers have a decimal point, not a comma."
                raise invalid("table", came, f"{len(head)}, as many as columns", fix)
            if row:
                rows.append(dict(zip(head, row, strict=False)))
    except csv.Error as error:
        raise invalid("table", f"{path} ({error})", "CSV") from None
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise invalid("table", f"{path} ({error})", "text in UTF-8") from None


def _objects(path: Path) -> list[dict[str, Any]]:
    text = _text(path)
    if path.suffix == ".json":
        whole = _json(text, str(path))
        found = whole.get("runs", [whole]) if isinstance(whole, dict) else whole
    else:
        lines = enumerate(text.split("\n"), 1)
        found = [_json(line, f"line {at} of {path}") for at, line in lines if line.strip()]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise invalid("table", str(path), "a list of objects, each a run")
    return found


def _json(text: str, whose: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid("table", f"{whose} ({error})", "JSON") from None


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if key == "history" and isinstance(value, list):
            for line in value:
                if not isinstance(line, Mapping):
                    required = 'objects, such as {"_step": 10, "val_loss": 1.5}'
                    raise invalid("table", f"a history of {line!r}", required)
                last = {f"history.{each}": one for each, one in line.items() if one is not None}
                found.update(last)
        elif isinstance(value, Mapping) and "value" in value and set(value) <= {"value", "desc"}:
            found[name] = value["value"]
        elif isinstance(value, Mapping):
            found |= _flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def _of_mlflow(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each run of MLflow's folder that was not deleted."""
    metas = sorted(folder.glob("*/*/meta.yaml")) or sorted(folder.glob("*/meta.yaml"))
    for meta in metas:
        run = meta.parent
        facts = dict(line.partition(": ")[::2] for line in _text(meta).splitlines())
        deleted = facts.get("lifecycle_stage") == "deleted"
        if deleted or ".trash" in run.parts or not (run / "metrics").is_dir():
            continue
        row: dict[str, Any] = {"run_id": run.name, "experiment_id": run.parent.name}
        if facts.get("status", "").isdigit():
            number = int(facts["status"])
            row["status"] = _STATUS[number] if number < len(_STATUS) else facts["status"]
        for part in ("params", "tags"):
            for name, text in _files(run / part):
                row[f"{part}.{name}"] = text.strip()
        for name, text in _files(run / "metrics"):
            lines = [line.split() for line in text.splitlines() if line.strip()]
            if lines:
                row[f"metrics.{name}"] = max(lines, key=_step_and_time)[1]
        yield row


def _step_and_time(line: Sequence[str]) -> tuple[int, int]:
    """Return how MLflow orders the lines of a metric, which have time, value and, mostly, step."""
    return int(line[2]) if len(line) > 2 else 0, int(line[0])


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), _text(path)


def _missing(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())


def _number(value: object, name: str = "") -> float | None:
    """Return a finite number; None for one that is not, or where there is none and no name."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        if not name:
            return None
        required = "numbers; nan for a run that diverged"
        raise invalid("--metric", f"{value!r} in {name}", required) from None
    return number if math.isfinite(number) else None


def _seed(value: object, row: int, name: str) -> int:
    try:
        return int(str(value))  # a float holds no seed of 64 bits
    except ValueError:
        number = _number(value)
    if number is None or number != int(number):
        raise invalid("--seed", f"{value!r} in {name}, row {row}", "whole numbers")
    return int(number)
