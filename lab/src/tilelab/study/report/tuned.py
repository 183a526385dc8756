"""Tuning before the runs that count: the trials of every arm as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tilelab.common.svg import SOFT, arm_colour, arm_dashes, finish
from tilelab.study.report.curves import LineEnd, beside_labels, label_ends
from tilelab.study.report.verdicts import digits_of
from tilelab.study.report.view import Cell, Chart, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import Candidate, ExperimentVerdict, SweepResult
from tilelab.study.verdict.text import UNITS

__all__ = ["sweep_chart", "sweep_table"]

_LETTER = 9.2
_LONGEST = 15
_APART = 1 / 4  # of the axis: its numbers do not touch


class _Trials(NamedTuple):
    """Trials of one length: ``steps`` is None without successive halving."""

    steps: int | None
    candidates: Sequence[Candidate]


def _lengths(sweep: SweepResult) -> list[_Trials]:
    if not sweep.rungs:
        return [_Trials(None, sweep.candidates)]
    return [_Trials(rung.steps, rung.candidates) for rung in sweep.rungs]


def sweep_table(experiment: ExperimentVerdict) -> Table | None:
    """Return every trial, the arms' budgets, and what was chosen."""
    sweeps, digits = experiment.sweeps, digits_of(experiment)
    if not sweeps:
        return None
    halved = any(sweep.rungs for sweep in sweeps)
    rows = []
    for sweep in sweeps:
        lengths = _lengths(sweep)
        for at, trials in enumerate(lengths):
            last = at == len(lengths) - 1
            for each in trials.candidates:
                chosen = last and each.value == sweep.chosen
                metric = "" if each.metric is None else words.plain(each.metric, digits)
                steps = [] if not halved else [Cell(words.integer(trials.steps or 0))]
                rows.append(
                    (
                        Cell(sweep.arm),
                        *steps,
                        Cell(f"{each.value:g}", tone="best" if chosen else ""),
                        Cell(metric or each.status, tone="" if metric else "bad"),
                        Cell("chosen" if chosen else "", tone="best"),
                    )
                )
    unit = UNITS[experiment.metric]
    head = ("arm", *(["steps"] if halved else []), sweeps[0].path, unit, "")
    notes = (*(words.typeset(sweep.words) for sweep in sweeps), *_budgets(experiment))
    return Table("Sweep", head, tuple(rows), notes, "sweep")


def _budgets(experiment: ExperimentVerdict) -> Iterator[str]:
    """Say how many tokens the trials of an arm may take, and which arms took fewer."""
    taken = {experiment.baseline.name: experiment.baseline.cost.sweep_tokens}
    taken |= {arm.arm: arm.cost.sweep_tokens for arm in experiment.arms}
    stated = {sweep.budget_tokens for sweep in experiment.sweeps}
    said = words.listing([words.integer(tokens) for tokens in sorted(stated)])
    whose = "every arm" if len(stated) == 1 else "an arm, by its own budget,"
    yield f"Tokens that the trials of {whose} may take: {said}. They are charged to it as cost."
    less = [
        f"{sweep.arm} {words.integer(taken[sweep.arm])}"
        for sweep in experiment.sweeps
        if taken[sweep.arm] < sweep.budget_tokens
    ]
    if less:
        yield f"Fewer so far, or because trials diverged: {words.listing(less)}."


def sweep_chart(sweeps: Sequence[SweepResult], unit: str, name: str) -> Chart | None:
    """Draw the final metric by the swept value, a line per arm; the chosen value is ringed.

    With successive halving every rung is a line of its own, thin for the short trials.

    Args:
        sweeps: the baseline first.
        unit: of the metric.
        name: of the figure, unique in the page.
    """
    trials = [each for sweep in sweeps for each in _lengths(sweep)]
    tried = [candidate for each in trials for candidate in each.candidates]
    metrics = [candidate.metric for candidate in tried if candidate.metric is not None]
    if not metrics:
        return None
    longest = min(max(len(sweep.arm) for sweep in sweeps), _LONGEST)
    above = f"{unit}, end of a trial"
    figure, axes = beside_labels(len(sweeps), 22 + _LETTER * longest, above)
    values = sorted({candidate.value for candidate in tried})
    if min(values) > 0:
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_apart(values)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: f"{number:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    low, high = min(metrics), max(metrics)
    span = max(high - low, 1e-3 * abs(high), 1e-9)
    axes.set_ylim(low - 0.12 * span, high + 0.24 * span)
    for index, sweep in enumerate(sweeps):
        _lines(axes, sweep, index, high + 0.16 * span)
    label_ends(axes, [end for index, sweep in enumerate(sweeps) for end in _end(sweep, index)])
    axes.set_xlabel(sweeps[0].path, color=SOFT, labelpad=7, parse_math=False)
    caption = "Ringed: chosen. Crosses on the upper edge: trials that diverged."
    if any(sweep.rungs for sweep in sweeps):
        caption += " Thin lines: the shorter trials, of which the best went on."
    summary = " ".join(sweep.words for sweep in sweeps)
    return Chart(f"Sweep of {sweeps[0].path}", finish(figure, name, summary), caption)


def _apart(values: Sequence[float]) -> list[float]:
    """Return the rising values that the axis has room for, the first one always."""
    at = [math.log(each) for each in values] if values[0] > 0 else list(values)
    found = [0]
    for index in range(1, len(values)):
        if at[index] - at[found[-1]] >= _APART * (at[-1] - at[0]):
            found.append(index)
    return [values[index] for index in found]


def _done(candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    return [(each.value, each.metric) for each in candidates if each.metric is not None]


def _end(sweep: SweepResult, index: int) -> list[LineEnd]:
    """Return the place of an arm's name: the largest value of its longest trials."""
    for trials in reversed(_lengths(sweep)):
        done = _done(trials.candidates)
        if done:
            return [LineEnd(sweep.arm, index, *done[-1])]
    return []


def _lines(axes: Axes, sweep: SweepResult, index: int, edge: float) -> None:
    colour, lengths = arm_colour(index), _lengths(sweep)
    for at, trials in enumerate(lengths):
        last = at == len(lengths) - 1
        done = _done(trials.candidates)
        lost = [each.value for each in trials.candidates if each.status == "diverged"]
        axes.plot(
            [value for value, _ in done],
            [metric for _, metric in done],
            color=colour,
            linewidth=2.1 if last else 1.0,
            linestyle=arm_dashes(index),
            alpha=1.0 if last else 0.65,
            marker="o",
            markersize=5.5 if last else 3.5,
            clip_on=False,
        )
        axes.plot(
            lost, [edge] * len(lost), color=colour, marker="X", markersize=8, linestyle="none"
        )
        for value, metric in done:
            if last and value == sweep.chosen:
                axes.plot(
                    [value],
                    [metric],
                    marker="o",
                    markersize=13,
                    markerfacecolor="none",
                    markeredgecolor=colour,
                    markeredgewidth=1.6,
                    clip_on=False,
                )
