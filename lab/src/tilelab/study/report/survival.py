"""Share of every arm's runs that have not reached the target yet, by tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tilelab.common.svg import SOFT, arm_colour, arm_dashes, finish
from tilelab.study.report.curves import LineEnd, beside_labels, label_ends
from tilelab.study.report.view import Cell, Chart, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ExperimentVerdict
from tilelab.study.verdict.survival import Survival, kaplan_meier

__all__ = ["survival_chart", "survival_table"]

_LETTER = 9.2
_LONGEST = 15
_NONE = Cell("\N{EN DASH}", tone="soft")


class _Line(NamedTuple):
    """The curve of an arm; ``place`` decides its colour, ``end`` is how far its runs went."""

    arm: str
    place: int
    curve: Survival
    end: float


def _lines(experiment: ExperimentVerdict) -> list[_Line]:
    results = [(experiment.baseline.name, experiment.baseline.target)]
    results += [(arm.arm, arm.target) for arm in experiment.arms]
    found = []
    for at, (arm, target) in enumerate(results):
        if target is None or not target.tokens:
            continue
        reached = [each for each in target.tokens if each is not None]
        curve = kaplan_meier(reached, target.censored, experiment.confidence)
        found.append(_Line(arm, at, curve, max(*reached, *target.censored, 0.0)))
    return found


def survival_table(experiment: ExperimentVerdict) -> Table | None:
    """Return the curves as numbers; None where no run reached the target or there is none."""
    lines = _lines(experiment)
    if not any(line.curve.at for line in lines):
        return None
    rows = []
    for arm, _, curve, _ in lines:
        median = _NONE if curve.median is None else Cell(words.integer(curve.median))
        left = Cell("100 %")
        if curve.share:
            interval = curve.intervals[-1]
            said = ""
            if interval is not None:
                said = f"{100 * interval.low:.0f} to {100 * interval.high:.0f} %"
            left = Cell(f"{100 * curve.share[-1]:.0f} %", said)
        steps = ", ".join(
            f"{words.shorten(float(f'{at:.3g}'))}: {100 * share:.0f} %"
            for at, share in zip(curve.at, curve.share, strict=True)
        )
        rows.append((Cell(arm), median, left, Cell(steps) if steps else _NONE))
    notes = (
        "Kaplan-Meier: a run that never reached the target, diverged ones too, is censored at the "
        "end of its budget. Intervals are pointwise.",
    )
    head = ("arm", "median tokens", "not there at the end", "tokens: share not there yet")
    return Table("Runs that have not reached the target", head, tuple(rows), notes, "survival")


def survival_chart(experiment: ExperimentVerdict, target: str, name: str) -> Chart | None:
    """Draw a falling line for every arm, with a stroke where runs were censored.

    Args:
        experiment: its verdict.
        target: in words.
        name: of the figure, unique in the page.
    """
    lines = _lines(experiment)
    if not any(line.curve.at for line in lines):
        return None
    longest = min(max(len(line.arm) for line in lines), _LONGEST)
    above = "runs not at the target yet"
    figure, axes = beside_labels(len(lines), 22 + _LETTER * longest, above)
    last = max(line.end for line in lines)
    axes.set_xlim(0, last)
    axes.set_ylim(0, 1.04)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: words.shorten(number)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
    for line in lines:
        _draw(axes, line)
    ends = [LineEnd(line.arm, line.place, line.end, _at(line.curve, line.end)) for line in lines]
    label_ends(axes, ends)
    axes.set_xlabel("training tokens", color=SOFT, labelpad=7)
    caption = (
        f"Kaplan-Meier estimate of the share of runs that have not reached {target}. Strokes: runs "
        "that ended without it (censored; one that diverged at the end of its budget)."
    )
    told = "; ".join(f"{line.arm} {100 * _at(line.curve, line.end):.0f} % left" for line in lines)
    return Chart(f"Runs not at {target} yet", finish(figure, name, f"{above}: {told}"), caption)


def _draw(axes: Axes, line: _Line) -> None:
    colour, curve = arm_colour(line.place), line.curve
    x = [0.0, *curve.at, line.end]
    y = [1.0, *curve.share, _at(curve, line.end)]
    axes.step(
        x,
        y,
        where="post",
        color=colour,
        linewidth=2.1,
        linestyle=arm_dashes(line.place),
        clip_on=False,
        zorder=3 + line.place,
    )
    marks = sorted(set(curve.censored))
    axes.plot(
        marks,
        [_at(curve, each) for each in marks],
        color=colour,
        marker="|",
        markersize=12,
        markeredgewidth=2,
        linestyle="none",
        clip_on=False,
        zorder=20,
    )


def _at(curve: Survival, where: float) -> float:
    """S at a place."""
    shares: Sequence[float] = [
        share for at, share in zip(curve.at, curve.share, strict=True) if at <= where
    ]
    return shares[-1] if shares else 1.0
