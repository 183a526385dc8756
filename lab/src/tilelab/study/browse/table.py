"""``tilewise study verdict TABLE``: the verdict on runs that were made elsewhere.

The table is an export of W&B or MLflow, or any CSV or JSON. It is read here, and ``tilelab.stats``
decides. Nothing is known of such runs but their last values: so there is a verdict, and no cost,
speed or curve.

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

import argparse
import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table

from tilelab.common.files import write_atomically
from tilelab.common.terminal import Text
from tilelab.stats import compare_all, interactions_of, paired, summary
from tilelab.stats.paired import ALWAYS_THE_SAME, SAME_WITH_EVERY_SEED, constant
from tilelab.stats.values import Interaction, Verdict
from tilelab.study.ask.values import nearest
from tilelab.study.verdict import text as words
from tilewise.commands import visible
from tilewise.errors import InvalidArgument

Row = Mapping[str, Any]
_BEFORE = ("params.", "config.", "metrics.", "summary.", "tags.", "history.")
_STEPS = ("_step", "step")  # of rows that are evaluations of a run
_RUNS = ("run_id", "Run ID", "run", "Run", "run_name", "Name", "name")  # which run a row is of
_STATUS = ("", "RUNNING", "SCHEDULED", "FINISHED", "FAILED", "KILLED")  # by MLflow's number
_MOST = 12  # columns or runs that a message names


def main(argv: Sequence[str], console: Console) -> int:
    """Do the command; return the exit status.

    Raises:
        InvalidArgument: the table, a column or a value is not what it has to be; seeds that do not
            pair up.
    """
    options = _parser().parse_args(argv)
    found = _judged(options)
    console.print(shown(found))
    if options.report is not None:
        _write("--report", options.report, visible(report(found)))
    if options.json is not None:
        _write("--json", options.json, json.dumps(asdict(found), indent=1) + "\n")
    return 0


def _write(argument: str, path: Path, text: str) -> None:
    try:
        write_atomically(path, text)
    except OSError as error:
        required = "a file that can be written, in a folder that is there"
        raise InvalidArgument(argument, f"{path} ({error.strerror})", required) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tilewise study verdict", description="The verdict on runs that were made elsewhere."
    )
    add = parser.add_argument
    add("table", type=Path, help="runs as .csv, .json or .jsonl, or a folder mlruns of MLflow")
    add(
        "--arm",
        action="append",
        required=True,
        metavar="COLUMN",
        help="whose values name the arms (repeat: a/b)",
    )
    add("--seed", default="seed", metavar="COLUMN", help="that pairs runs (seed)")
    add("--metric", required=True, metavar="COLUMN", help="that decides, e.g. val_loss")
    add("--baseline", required=True, metavar="ARM", help="that the others are compared with")
    add(
        "--smallest-effect",
        type=float,
        required=True,
        metavar="DIFFERENCE",
        help="of the metric: what is smaller does not matter",
    )
    add("--higher-is-better", action="store_true", help="of the metric, such as an accuracy")
    add("--confidence", type=float, default=0.95, metavar="SHARE", help="of intervals (0.95)")
    add("--seeds", metavar="LIST", help="that count, e.g. 0,1,2 (all, and every arm has them)")
    add(
        "--where",
        action="append",
        default=[],
        metavar="COLUMN=VALUE",
        help="take these rows only, e.g. State=finished (repeat)",
    )
    add("--report", type=Path, metavar="FILE", help="write the verdicts as Markdown too")
    add("--json", type=Path, metavar="FILE", help="write them as JSON too")
    return parser


def _whole_numbers(argument: str, text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise InvalidArgument(argument, repr(text), "whole numbers, such as 0,1,2") from None


@dataclass(frozen=True)
class Judged:
    """The verdict on a table."""

    table: str
    metric: str
    baseline: str
    smallest_effect: float
    confidence: float
    seeds: tuple[int, ...]
    mean: float | None  # of the baseline, over the seeds that did not diverge
    arms: tuple[Verdict, ...]
    interactions: tuple[Interaction, ...]  # of arms named ``a+b``


def _judged(options: argparse.Namespace) -> Judged:
    seeds = None if options.seeds is None else _whole_numbers("--seeds", options.seeds)
    rows, unit = where(read(options.table), options.where), _bare(options.metric)
    columns: dict[str, Any] = {"arm": options.arm, "seed": options.seed, "metric": options.metric}
    found = values_of(rows, **columns, seeds=seeds)
    base, arms = _paired_values(found, options.baseline, seeds)
    rules: dict[str, Any] = {
        "smallest_effect": options.smallest_effect,
        "higher_is_better": options.higher_is_better,
        "unit": unit,
        "confidence": options.confidence,
    }
    verdicts = compare_all(base, arms, **rules)
    whole = summary([value for value in base.values() if value is not None])
    return Judged(
        table=str(options.table),
        metric=unit,
        baseline=options.baseline,
        smallest_effect=options.smallest_effect,
        confidence=options.confidence,
        seeds=tuple(base),
        mean=None if whole is None else whole.mean,
        arms=tuple(verdicts.values()),
        interactions=interactions_of(base, arms, **rules),
    )


def shown(found: Judged) -> RenderableType:
    """Return the verdicts for the terminal."""
    title = f"{_heading(found)}\n{_baseline(found)}"
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="")
    for head in ("arm", "verdict", ""):
        table.add_column(head)
    for each in found.arms:
        table.add_row(Text(each.arm), Text(each.label), Text(words.typeset(_reason(each))))
    for one in found.interactions:
        name = Text(" with ".join(one.arms))
        table.add_row(name, Text(one.label), Text(words.typeset(one.reason)))
    return Group(table)


def report(found: Judged) -> str:
    """Return the verdicts as a page of Markdown."""
    # Here, because training on a bare machine imports the command, and this needs jinja2.
    from tilelab.study.report.page import markdown_text

    digits = max(words.digits_for(found.smallest_effect) - 1, 3)
    head = ("arm", "verdict", "effect", f"{found.confidence:.0%} interval", "p (Holm)", "seeds")
    lines = [f"# {markdown_text(_heading(found))}", "", markdown_text(_baseline(found)), ""]
    lines += [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for each in found.arms:
        effect = "" if each.effect is None else words.signed(each.effect, digits)
        ends = each.interval
        interval = ""
        if ends is not None:
            low, high = (words.signed(end, digits) for end in (ends.low, ends.high))
            interval = f"{low} to {high}"
        cells = (each.arm, each.label, effect, interval, words.p_value(each.p_holm), str(each.n))
        lines.append(f"| {' | '.join(map(markdown_text, cells))} |")
    lines.append("")
    reasons = [(each.arm, _reason(each)) for each in found.arms]
    reasons += [
        (" with ".join(one.arms), f"{one.label}: {one.reason}") for one in found.interactions
    ]
    lines += [
        f"- **{markdown_text(name)}**: {markdown_text(words.typeset(reason))}"
        for name, reason in reasons
    ]
    return "\n".join([*lines, ""])


def _reason(verdict: Verdict) -> str:
    differences = [each.difference for each in verdict.per_seed if each.difference is not None]
    if constant(paired(differences, 0.95)):
        return f"{verdict.reason} {SAME_WITH_EVERY_SEED}"
    unchanged = len(differences) > 1 and set(differences) == {0.0}
    return f"{verdict.reason} {ALWAYS_THE_SAME}" if unchanged else verdict.reason


def _heading(found: Judged) -> str:
    return f"{Path(found.table).name}: {found.metric} against {found.baseline}"


def _baseline(found: Judged) -> str:
    mean = "" if found.mean is None else f", mean {found.mean:.4g}"
    return (
        f"Baseline {found.baseline}{mean}; {words.seeds_text(found.seeds)}. Effects are paired by "
        f"seed; smaller than {found.smallest_effect:g} does not matter."
    )


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file or a folder; see the top of this file.

    Raises:
        InvalidArgument: there is nothing, it is of another form, or has no rows.
    """
    if path.is_dir():
        rows = list(_of_mlflow(path))
    elif not path.is_file():
        raise InvalidArgument("table", f"{path}, which is no file", "a table of runs")
    elif path.suffix == ".csv":
        rows = _of_csv(path)
    elif path.suffix in (".json", ".jsonl", ".ndjson"):
        rows = [_flat(each) for each in _objects(path)]
    else:
        required = "a name that ends in .csv, .json or .jsonl, or a folder mlruns"
        raise InvalidArgument("table", str(path), required)
    if not rows:
        raise InvalidArgument("table", f"{path}, without a row", "a row for each run")
    return rows


def _column(rows: Sequence[Row], name: str, argument: str) -> str:
    """Return the full name of a column; refuse one that no row has, or that may be several."""
    known = list(dict.fromkeys(key for row in rows for key in row))
    if name in known:
        return name
    found = [f"{before}{name}" for before in _BEFORE if f"{before}{name}" in known]
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidArgument(argument, repr(name), f"one of {', '.join(found)}")
    required, fix = f"one of {_some(known)}", nearest(name, [*known, *map(_bare, known)])
    raise InvalidArgument(argument, f"{name!r}, which is no column", required, fix)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (", ..." if len(names) > _MOST else "")


def _bare(name: str) -> str:
    """Return the name of a column without what an export put before it."""
    return next((name.removeprefix(each) for each in _BEFORE if name.startswith(each)), name)


def where(rows: Sequence[Row], conditions: Iterable[str]) -> list[Row]:
    """Return the rows that meet every ``column=value``."""
    kept = list(rows)
    for each in conditions:
        name, equals, value = each.partition("=")
        if not equals:
            raise InvalidArgument("--where", repr(each), "column=value, such as State=finished")
        key = _column(rows, name, "--where")
        there = sorted({str(row.get(key, "")) for row in kept})
        kept = [row for row in kept if str(row.get(key, "")) == value]
        if not kept:
            required = f"a value that a run has in {key}: {_some(there)}"
            raise InvalidArgument("--where", repr(each), required)
    return kept


def values_of(
    rows: Sequence[Row],
    *,
    arm: Sequence[str],
    seed: str,
    metric: str,
    seeds: Sequence[int] | None = None,
) -> dict[str, dict[int, float | None]]:
    """Return arm -> seed -> metric; None for a number that is not finite.

    The values of the columns ``arm``, joined with ``/``, name an arm. Of rows with the same arm and
    seed the last step counts, where they have steps (``_step`` or ``step``). Rows of seeds that are
    not among ``seeds`` do not count, such as those of trials.

    Raises:
        InvalidArgument: a column that is not there, a seed that is no whole number, a metric
            without a value, or two runs of an arm with the same seed: rows that name other
            runs, or have other values at the same step.
    """
    arms = [_column(rows, each, "--arm") for each in arm]
    by_seed, value = _column(rows, seed, "--seed"), _column(rows, metric, "--metric")
    steps = next((each for each in _STEPS if any(each in row for row in rows)), None)
    run = next((each for each in _RUNS if any(each in row for row in rows)), "")
    found: dict[str, dict[int, tuple[float, float | None]]] = {}
    whose: dict[tuple[str, int], object] = {}
    at_step: dict[tuple[str, int, float | None], float | None] = {}
    for at, row in enumerate(rows, 1):
        if any(_missing(row.get(each)) for each in arms):
            came, fix = f"row {at} without a {arms[0]}", "--where leaves rows out."
            raise InvalidArgument("--arm", came, "a value in every row", fix)
        name = "/".join(str(row[each]) for each in arms)
        number = _seed(row.get(by_seed), at, by_seed)
        if seeds is not None and number not in seeds:
            continue
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
            raise InvalidArgument("table", f"two runs of {name} with seed {number}", required, fix)
        if number not in runs or (step or 0.0) >= runs[number][0]:
            runs[number] = (step or 0.0, result)
    empty = [f"{name} with seed {number}" for name, number in whose if number not in found[name]]
    if empty:
        required = f"a value of {value} for every run: nan for one that diverged"
        fix = "Leave out runs that have not ended, such as by --where State=finished."
        raise InvalidArgument("--metric", f"no {value} of {_some(empty)}", required, fix)
    return {
        name: {each: result for each, (_, result) in sorted(runs.items())}
        for name, runs in found.items()
    }


def _paired_values(
    values: Mapping[str, Mapping[int, float | None]],
    baseline: str,
    seeds: Sequence[int] | None,
) -> tuple[Mapping[int, float | None], dict[str, Mapping[int, float | None]]]:
    """Return the values of the baseline and of the arms; refuse arms of other seeds than its."""
    if baseline not in values:
        required = f"one of {', '.join(values)}"
        raise InvalidArgument("--baseline", repr(baseline), required, nearest(baseline, values))
    if len(values) < 2:
        raise InvalidArgument("--arm", f"{baseline} alone", "a column with two values or more")
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
            raise InvalidArgument("--seed", f"{name} {what}", required, fix)
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
            raise InvalidArgument("table", f"{path} with two columns {twice[0]}", "every name once")
        for row in reader:
            if any(each.strip() for each in row[len(head) :]):
                came = f"line {reader.line_num} of {path} with {len(row)} values"
                fix = "Numbers have a decimal point, not a comma."
                raise InvalidArgument("table", came, f"{len(head)}, as many as columns", fix)
            if row:
                rows.append(dict(zip(head, row, strict=False)))
    except csv.Error as error:
        raise InvalidArgument("table", f"{path} ({error})", "CSV") from None
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidArgument("table", f"{path} ({error})", "text in UTF-8") from None


def _objects(path: Path) -> list[dict[str, Any]]:
    text = _text(path)
    if path.suffix == ".json":
        whole = _json(text, str(path))
        found = whole.get("runs", [whole]) if isinstance(whole, dict) else whole
    else:
        lines = enumerate(text.split("\n"), 1)
        found = [_json(line, f"line {at} of {path}") for at, line in lines if line.strip()]
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InvalidArgument("table", str(path), "a list of objects, each a run")
    return found


def _json(text: str, whose: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("table", f"{whose} ({error})", "JSON") from None


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{above}{key}"
        if key == "history" and isinstance(value, list):
            for line in value:
                if not isinstance(line, Mapping):
                    required = 'objects, such as {"_step": 10, "val_loss": 1.5}'
                    raise InvalidArgument("table", f"a history of {line!r}", required)
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
        raise InvalidArgument("--metric", f"{value!r} in {name}", required) from None
    return number if math.isfinite(number) else None


def _seed(value: object, row: int, name: str) -> int:
    try:
        return int(str(value))  # a float holds no seed of 64 bits
    except ValueError:
        number = _number(value)
    if number is None or number != int(number):
        raise InvalidArgument("--seed", f"{value!r} in {name}, row {row}", "whole numbers")
    return int(number)
