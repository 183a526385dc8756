"""``tilewise study verdict TABLE``: the verdict on runs that were made elsewhere.

The table is an export of W&B or MLflow, or any CSV or JSON: ``tilelab.stats.tables`` reads it, and
``tilelab.stats`` decides. Nothing is known of such runs but their last values: so there is a
verdict, and no cost, speed or curve.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
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
from tilelab.stats.tables import bare, paired_values, read, values_of, where
from tilelab.stats.values import Interaction, Verdict
from tilelab.study.verdict import text as words
from tilewise.commands.visible import visible
from tilewise.errors import InvalidArgument


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
    """Return the verdict on every arm of a table, as ``tilelab.stats`` decides it."""
    seeds = None if options.seeds is None else _whole_numbers("--seeds", options.seeds)
    rows, unit = where(read(options.table), options.where), bare(options.metric)
    found = values_of(rows, arm=options.arm, seed=options.seed, metric=options.metric)
    base, arms = paired_values(found, options.baseline, seeds)
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
