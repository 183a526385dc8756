"""Effects of a factorial design, and the trials of a sweep: tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tilelab.common import svg
from tilelab.study.ask.metrics import METRICS, ahead
from tilelab.study.report.lines import WIDTH, beside_labels, marks
from tilelab.study.report.page import NONE, Cell, Chart, Table
from tilelab.study.report.verdicts import digits_of
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import (
    Candidate,
    ExperimentVerdict,
    FactorEffect,
    Interaction,
    RungResult,
    SweepResult,
)

_FOUND = ("better", "worse", "better together", "worse together")
_LETTER_OF_FACTOR = 8.2
_LONGEST_FACTOR = 13
_ROW = 56.0
_DEEPEST = 0.62  # how much colour the largest effect has: its number stays readable


def effects_table(experiment: ExperimentVerdict) -> Table:
    """Return every effect in words and numbers; no rows without a design."""
    digits = digits_of(experiment)
    aliased = any(each.aliases for each in experiment.effects)

    def row(each: FactorEffect) -> tuple[Cell, ...]:
        same = [Cell(", ".join(map(words.typeset, each.aliases)))] if aliased else []
        *decided, reason = _decided(each, digits)
        return Cell(_name(each)), *decided, *same, reason

    head = ("factors", "verdict", "effect", "p (Holm)", *(["aliases"] if aliased else []), "")
    notes = [
        f"In {METRICS[experiment.metric].unit}, averaged over the levels of all other factors. Of "
        "one factor: with it less without it. Of several: beyond the sum of what smaller sets do.",
    ]
    if aliased:
        notes.append(
            "A fraction: each number is its own effect and its aliases together, with their sign."
        )
    return Table(
        "Effects of the factors", head, tuple(map(row, experiment.effects)), tuple(notes), "effects"
    )


def interactions_table(experiment: ExperimentVerdict) -> Table:
    """Return what arms named ``a+b`` do beyond their parts."""
    digits = digits_of(experiment)
    return Table(
        "Do they add up?",
        ("together", "verdict", "beyond the sum", "p (Holm)", ""),
        tuple((Cell(each.together), *_decided(each, digits)) for each in experiment.interactions),
        (),
        "interaction",
    )


def _decided(each: FactorEffect | Interaction, digits: int) -> tuple[Cell, ...]:
    """Return the label of a contrast, its size with its interval, its p-value and the reason."""
    effect = NONE
    if each.effect is not None:
        ends = (each.interval.low, each.interval.high) if each.interval else ()
        said = f"[{', '.join(words.signed(end, digits) for end in ends)}]" if ends else ""
        effect = Cell(words.signed(each.effect, digits), said)
    p, reason = Cell(words.p_value(each.p_holm)), Cell(words.typeset(each.reason))
    return Cell(each.label), effect, p, reason


def effects_chart(effects: Sequence[FactorEffect], metric: str, name: str) -> Chart | None:
    """Main effects on the diagonal, interactions of two below it, darker where larger."""
    factors = [each.factors[0] for each in effects if len(each.factors) == 1]
    shown = {each.factors: each for each in effects if len(each.factors) < 3}
    most = max((abs(each.effect) for each in shown.values() if each.effect is not None), default=0)
    if not most:
        return None
    rows = len(factors)
    figure = svg.canvas(WIDTH, _ROW * rows + 46)
    longest = min(max(map(len, factors)), _LONGEST_FACTOR)
    axes = svg.place(figure, 20 + _LETTER_OF_FACTOR * longest, 40, 10, 6)
    axes.set_xlim(-0.5, rows - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    labels = [svg.short_name(each, _LONGEST_FACTOR) for each in factors]
    axes.set_xticks(range(rows), labels=labels, parse_math=False)
    axes.set_yticks(range(rows), labels=labels, parse_math=False)
    digits = words.digits_for(most) - 1
    absent = "aliased" if any(each.aliases for each in effects) else "\N{EN DASH}"
    for row, factor in enumerate(factors):
        for column in range(row + 1):
            key = (factor,) if row == column else (factors[column], factor)
            each = shown.get(key)
            value = None if each is None else each.effect
            strength = 0.0 if value is None else _DEEPEST * abs(value) / most
            colour = svg.BETTER if value is not None and ahead(metric, value) else svg.WORSE
            corner = (column - 0.47, row - 0.46)
            box = Rectangle(corner, 0.94, 0.92, facecolor=colour, alpha=strength, linewidth=0)
            frame = Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=svg.RULE, linewidth=1)
            axes.add_patch(box)
            axes.add_patch(frame)
            found = each is not None and each.label in _FOUND
            axes.text(
                column,
                row,
                absent if value is None else words.signed(value, digits),
                ha="center",
                va="center",
                color=svg.INK if found else svg.SOFT,
                weight="bold" if found else "normal",
            )
    caption = (
        "On the diagonal each factor alone, averaged over the others; below it what two do beyond "
        "the sum. Blue: better, orange: worse. Bold: found by the test (Holm); grey: not."
    )
    sizes = (
        f"{_name(each)} {words.signed(each.effect, digits)}"
        for each in shown.values()
        if each.effect is not None
    )
    unit = METRICS[metric].unit
    summary = f"Effects and interactions in {unit}: {'; '.join(sizes)}"
    return Chart(f"Effects and interactions, {unit}", svg.finish(figure, name, summary), caption)


def _name(effect: FactorEffect) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(effect.factors)


_APART = 1 / 4  # of the axis: its numbers do not touch


def _lengths(sweep: SweepResult) -> Sequence[RungResult]:
    """Return the trials by their length; without successive halving all have one (0 steps)."""
    return sweep.rungs or [RungResult(0, sweep.candidates)]


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
                steps = [] if not halved else [Cell(words.integer(trials.steps))]
                point = ", ".join(f"{path} {value:g}" for path, value in each.point.items())
                rows.append(
                    (
                        Cell(sweep.arm),
                        *steps,
                        Cell(f"{each.value:g}", point, tone="best" if chosen else ""),
                        Cell(metric or each.status, tone="" if metric else "bad"),
                        Cell("chosen" if chosen else "", tone="best"),
                    )
                )
    unit = METRICS[experiment.metric].unit
    head = ("arm", *(["steps"] if halved else []), sweeps[0].path, unit, "")
    notes = (*(words.typeset(sweep.words) for sweep in sweeps), *_budgets(experiment))
    return Table("Sweep", head, tuple(rows), notes, "sweep")


def _budgets(experiment: ExperimentVerdict) -> Iterator[str]:
    """Say how many tokens the trials of an arm may take, and which arms took fewer."""
    taken = {arm.name: arm.cost.sweep_tokens for arm in experiment.all_arms}
    stated = {sweep.budget_tokens for sweep in experiment.sweeps}
    if stated == {0}:  # of a script
        yield "Trials are charged to their arm as cost."
        return
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
    """Draw the final metric by the swept value, a line per arm and rung; the chosen is ringed."""
    trials = [each for sweep in sweeps for each in _lengths(sweep)]
    tried = [candidate for each in trials for candidate in each.candidates]
    metrics = [candidate.metric for candidate in tried if candidate.metric is not None]
    if not metrics:
        return None
    above = f"{unit}, end of a trial"
    figure, axes = beside_labels([len(sweep.arm) for sweep in sweeps], above)
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
        _sweep_lines(axes, sweep, index, high + 0.16 * span)
    ends = [end for index, sweep in enumerate(sweeps) for end in _sweep_end(sweep, index)]
    svg.label_ends(axes, ends)
    axes.set_xlabel(sweeps[0].path, color=svg.SOFT, labelpad=7, parse_math=False)
    caption = "Ringed: chosen. Crosses on the upper edge: trials that diverged."
    if any(sweep.rungs for sweep in sweeps):
        caption += " Thin lines: the shorter trials, of which the best went on."
    summary = " ".join(sweep.words for sweep in sweeps)
    return Chart(f"Sweep of {sweeps[0].path}", svg.finish(figure, name, summary), caption)


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


def _sweep_end(sweep: SweepResult, index: int) -> list[svg.LineEnd]:
    """Return the place of an arm's name: the largest value of its longest trials."""
    for trials in reversed(_lengths(sweep)):
        done = _done(trials.candidates)
        if done:
            return [svg.LineEnd(sweep.arm, index, *done[-1])]
    return []


def _sweep_lines(axes: Axes, sweep: SweepResult, index: int, edge: float) -> None:
    colour, lengths = svg.arm_colour(index), _lengths(sweep)
    for at, trials in enumerate(lengths):
        last = at == len(lengths) - 1
        done = _done(trials.candidates)
        lost = [each.value for each in trials.candidates if each.status == "diverged"]
        axes.plot(
            [value for value, _ in done],
            [metric for _, metric in done],
            color=colour,
            linewidth=2.1 if last else 1.0,
            linestyle=svg.arm_dashes(index),
            alpha=1.0 if last else 0.65,
            marker="o",
            markersize=5.5 if last else 3.5,
            clip_on=False,
        )
        marks(axes, lost, [edge] * len(lost), index, "X", 8, clip_on=True)
        for value, metric in done:
            if last and value == sweep.chosen:
                ring = {"markerfacecolor": "none", "markeredgewidth": 1.6}
                marks(axes, [value], [metric], index, "o", 13, **ring)
