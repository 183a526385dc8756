"""The effects of a factorial design: a map of what factors do alone and together, and a table."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.patches import Rectangle

from tilelab.common.svg import BETTER, INK, RULE, SOFT, WORSE, canvas, finish, place
from tilelab.study.ask.metrics import ahead
from tilelab.study.report.curves import WIDTH
from tilelab.study.report.verdicts import digits_of
from tilelab.study.report.view import Cell, Chart, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ExperimentVerdict, FactorEffect
from tilelab.study.verdict.text import UNITS

__all__ = ["effects_chart", "effects_table"]

_FOUND = ("better", "worse", "better together", "worse together")
_LETTER = 8.2
_LONGEST = 13
_ROW = 56.0
_DEEPEST = 0.62  # how much colour the largest effect has: its number stays readable


def effects_table(experiment: ExperimentVerdict) -> Table | None:
    """Return every effect in words and numbers; None without a design."""
    if not experiment.effects:
        return None
    digits = digits_of(experiment)
    aliased = any(each.aliases for each in experiment.effects)

    def row(each: FactorEffect) -> tuple[Cell, ...]:
        effect = Cell("\N{EN DASH}", tone="soft")
        if each.effect is not None:
            ends = (each.interval.low, each.interval.high) if each.interval else ()
            said = f"[{', '.join(words.signed(end, digits) for end in ends)}]" if ends else ""
            effect = Cell(words.signed(each.effect, digits), said)
        same = [Cell(", ".join(map(words.typeset, each.aliases)))] if aliased else []
        p = Cell(words.p_value(each.p_holm))
        reason = Cell(words.typeset(each.reason))
        return Cell(_name(each)), Cell(each.label), effect, p, *same, reason

    head = ("factors", "verdict", "effect", "p (Holm)", *(["aliases"] if aliased else []), "")
    notes = [
        f"In {UNITS[experiment.metric]}, averaged over the levels of all other factors. Of one "
        "factor: with it less without it. Of several: beyond the sum of what smaller sets do.",
    ]
    if aliased:
        notes.append(
            "A fraction: each number is its own effect and its aliases together, with their sign."
        )
    return Table(
        "Effects of the factors", head, tuple(map(row, experiment.effects)), tuple(notes), "effects"
    )


def effects_chart(effects: Sequence[FactorEffect], metric: str, name: str) -> Chart | None:
    """Main effects on the diagonal, interactions of two below it, darker where larger.

    Args:
        effects: of a design.
        metric: what the effects are of.
        name: of the figure, unique in the page.
    """
    factors = [each.factors[0] for each in effects if len(each.factors) == 1]
    shown = {each.factors: each for each in effects if len(each.factors) < 3}
    most = max((abs(each.effect) for each in shown.values() if each.effect is not None), default=0)
    if not most:
        return None
    rows = len(factors)
    figure = canvas(WIDTH, _ROW * rows + 46)
    axes = place(figure, 20 + _LETTER * min(max(map(len, factors)), _LONGEST), 40, 10, 6)
    axes.set_xlim(-0.5, rows - 0.5)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    labels = [words.short_name(each, _LONGEST) for each in factors]
    axes.set_xticks(range(rows), labels=labels, parse_math=False)
    axes.set_yticks(range(rows), labels=labels, parse_math=False)
    digits = words.digits_for(most) - 1
    for row, factor in enumerate(factors):
        for column in range(row + 1):
            key = (factor,) if row == column else (factors[column], factor)
            each = shown.get(key)
            value = None if each is None else each.effect
            strength = 0.0 if value is None else _DEEPEST * abs(value) / most
            colour = BETTER if value is not None and ahead(metric, value) else WORSE
            corner = (column - 0.47, row - 0.46)
            box = Rectangle(corner, 0.94, 0.92, facecolor=colour, alpha=strength, linewidth=0)
            frame = Rectangle(corner, 0.94, 0.92, fill=False, edgecolor=RULE, linewidth=1)
            axes.add_patch(box)
            axes.add_patch(frame)
            found = each is not None and each.label in _FOUND
            said = "aliased" if each is None else "\N{EN DASH}"
            axes.text(
                column,
                row,
                said if value is None else words.signed(value, digits),
                ha="center",
                va="center",
                color=INK if found else SOFT,
                weight="bold" if found else "normal",
            )
    caption = (
        "On the diagonal each factor alone, averaged over the others; below it what two do beyond "
        "the sum. Blue: better, orange: worse. Bold: found by the test (Holm); grey: not."
    )
    told = (
        f"{_name(each)} {words.signed(each.effect, digits)}"
        for each in shown.values()
        if each.effect is not None
    )
    unit = UNITS[metric]
    summary = f"Effects and interactions in {unit}: {'; '.join(told)}"
    return Chart(f"Effects and interactions, {unit}", finish(figure, name, summary), caption)


def _name(effect: FactorEffect) -> str:
    return " \N{MULTIPLICATION SIGN} ".join(effect.factors)
