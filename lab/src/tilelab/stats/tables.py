"""Tables of runs that were made elsewhere: exports of W&B and MLflow, and any CSV or JSON.

A table is a list of rows, each a run: column -> value. ``read`` takes

* ``.csv``: a row a run, such as the export of W&B's table of runs, or ``mlflow experiments csv``;
* ``.json``: a list of objects, or an object with such a list as ``runs``; ``.jsonl``: an object a
  line. Nested values get dotted names (``config.lr``); W&B's ``{"value": ...}`` is its value. A
  list ``history`` of objects gives each key's last value;
* a folder ``mlruns`` of MLflow: parameters, tags and the last value of each metric.

``values_of`` sorts a column by arm and seed, as ``compare_all`` takes it. A column may be named
without what these put before it: ``lr`` finds ``params.lr``, ``config.lr`` or ``metrics.lr``.
"""

from __future__ import annotations

import csv
import difflib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilelab.stats.errors import invalid

Row = Mapping[str, Any]
_BEFORE = ("params.", "config.", "metrics.", "summary.", "tags.", "history.")
_STEPS = ("_step", "step")  # of rows that are evaluations of a run
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
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [dict(row) for row in csv.DictReader(file)]
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
    bare = [each.partition(".")[2] or each for each in known]
    near = difflib.get_close_matches(name, [*known, *bare], n=1)
    fix = f"Did you mean {near[0]!r}?" if near else ""
    shown = ", ".join(known[:_MOST]) + (", ..." if len(known) > _MOST else "")
    raise invalid(argument, f"{name!r}, which is no column", f"one of {shown}", fix)


def where(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """Return the rows that meet every ``column=value``."""
    kept = list(rows)
    for each in conditions:
        name, equals, value = each.partition("=")
        if not equals:
            raise invalid("--where", repr(each), "column=value, such as State=finished")
        key = column(rows, name, "--where")
        kept = [row for row in kept if str(row.get(key, "")) == value]
        if not kept:
            raise invalid("--where", repr(each), f"a value that a run has in {key}")
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
            without a value, or two runs of an arm with the same seed.
    """
    arms = [column(rows, each, "--arm") for each in arm]
    by_seed, value = column(rows, seed, "--seed"), column(rows, metric, "--metric")
    steps = next((each for each in _STEPS if any(each in row for row in rows)), None)
    found: dict[str, dict[int, tuple[float, float | None]]] = {}
    empty = []
    for at, row in enumerate(rows, 1):
        if any(_missing(row.get(each)) for each in arms):
            fix = "--where leaves rows out."
            raise invalid("--arm", f"row {at} without a {arms[0]}", "a value in every row", fix)
        name = "/".join(str(row[each]) for each in arms)
        number = _seed(row.get(by_seed), at, by_seed)
        step = _number(row.get(steps)) if steps else None
        if _missing(row.get(value)):
            if step is None:
                empty.append(f"{name} with seed {number}")
            continue  # a row of a history that has other numbers
        result = _number(row[value], value)
        runs = found.setdefault(name, {})
        if number in runs and step is None:
            required = "one run for each arm and seed"
            fix = "Name what else they differ in by another --arm, or leave rows out by --where."
            raise invalid("table", f"two runs of {name} with seed {number}", required, fix)
        if number not in runs or (step or 0.0) >= runs[number][0]:
            runs[number] = (step or 0.0, result)
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


def _objects(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".json":
            whole = json.loads(text)
            found = whole.get("runs", [whole]) if isinstance(whole, dict) else whole
        else:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise invalid("table", f"{path} ({error})", "JSON") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise invalid("table", str(path), "a list of objects, each a run")
    return found


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if key == "history" and isinstance(value, list):
            for line in value:
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
        deleted = "lifecycle_stage: deleted" in meta.read_text(encoding="utf-8")
        if deleted or ".trash" in run.parts or not (run / "metrics").is_dir():
            continue
        row: dict[str, Any] = {"run_id": run.name, "experiment_id": run.parent.name}
        for part in ("params", "tags"):
            for name, text in _files(run / part):
                row[f"{part}.{name}"] = text.strip()
        for name, text in _files(run / "metrics"):
            lines = [line.split() for line in text.splitlines() if line.strip()]
            if lines:  # time, value, step
                row[f"metrics.{name}"] = max(lines, key=lambda line: int(line[2]))[1]
        yield row


def _files(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")


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
    number = _number(value)
    if number is None or number != int(number):
        raise invalid("--seed", f"{value!r} in {name}, row {row}", "whole numbers")
    return int(number)
