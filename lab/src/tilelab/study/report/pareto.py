"""Quality against cost: which arms no other arm beats in both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from matplotlib.ticker import FuncFormatter, MaxNLocator

from tilelab.common.svg import RULE, SOFT, arm_colour, canvas, finish, place
from tilelab.study.ask.metrics import METRICS, rank
from tilelab.study.report.curves import HEIGHT, WIDTH
from tilelab.study.report.verdicts import digits_of, metric_mean
from tilelab.study.report.view import Cell, Chart, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ArmMeasures, Cost, ExperimentVerdict

__all__ = ["Point", "front", "pareto_chart", "pareto_table"]

_LONGEST = 22


class Point(NamedTuple):
    """An arm.

    Args:
        arm, place: name, and place in the experiment.
        cost: CPU seconds of a run that counts, the mean.
        metric: the mean, as measured.
        rank: the same so that lower is better.
    """

    arm: str
    place: int
    cost: float
    metric: float
    rank: float


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front, cheapest first: points that no other beats on cost and quality."""
    found: list[Point] = []
    for each in sorted(points, key=lambda point: (point.cost, point.rank)):
        if not found or each.rank < found[-1].rank:
            found.append(each)
    return found


def _points(experiment: ExperimentVerdict) -> Iterator[Point]:
    base = experiment.baseline
    arms: list[tuple[str, ArmMeasures, Cost]] = [(base.name, base.measures, base.cost)]
    arms += [(arm.arm, arm.measures, arm.cost) for arm in experiment.arms if not arm.diverged]
    for at, (arm, measures, cost) in enumerate(arms):
        metric, runs = metric_mean(measures, experiment), cost.runs - cost.sweep_runs
        if metric is None or cost.cpu_s is None or cost.sweep_cpu_s is None or not runs:
            continue  # withheld, or nothing has come yet
        spent = (cost.cpu_s - cost.sweep_cpu_s) / runs
        yield Point(arm, at, spent, metric, rank(experiment.metric, metric))


def pareto_table(experiment: ExperimentVerdict) -> Table | None:
    """Return the arms on the front, and who beats each of the others in both."""
    points = list(_points(experiment))
    if len(points) < 2:
        return None
    best, digits = front(points), digits_of(experiment)
    rows = []
    for each in sorted(points, key=lambda point: (point.cost, point.rank)):
        ahead = [one.arm for one in best if one.cost <= each.cost and one.rank <= each.rank]
        on = each in best
        told = (
            Cell("on the front", tone="best") if on else Cell(f"beaten by {words.listing(ahead)}")
        )
        metric = Cell(words.plain(each.metric, digits))
        rows.append((Cell(each.arm), Cell(words.duration(each.cost)), metric, told))
    head = ("arm", "CPU time of a run", METRICS[experiment.metric].unit, "")
    notes = ("By the means alone: neighbours may differ by less than their intervals.",)
    return Table("Quality against cost", head, tuple(rows), notes, "pareto")


def pareto_chart(experiment: ExperimentVerdict, name: str) -> Chart | None:
    """Draw a point per arm, and the front as a staircase.

    Args:
        experiment: its verdict.
        name: of the figure, unique in the page.
    """
    points = list(_points(experiment))
    if len(points) < 2:
        return None
    best = front(points)
    figure = canvas(WIDTH, HEIGHT)
    axes = place(figure, 56, 48, 30, 30)
    axes.grid(axis="x", color=RULE, linewidth=1)
    costs, metrics = [each.cost for each in points], [each.metric for each in points]
    wide, high = _margin(costs), _margin(metrics)
    axes.set_xlim(min(costs) - wide, max(costs) + 2.2 * wide)
    axes.set_ylim(min(metrics) - high, max(metrics) + high)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: words.duration(number)))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    stairs = [*((each.cost, each.metric) for each in best), (axes.get_xlim()[1], best[-1].metric)]
    axes.step(
        [x for x, _ in stairs],
        [y for _, y in stairs],
        where="post",
        color=SOFT,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        zorder=2,
    )
    for each in points:
        colour, on = arm_colour(each.place), each in best
        axes.plot(
            [each.cost],
            [each.metric],
            marker="o",
            markersize=9 if on else 7,
            color=colour,
            markerfacecolor=colour if on else "none",
            linestyle="none",
            clip_on=False,
            zorder=5,
        )
        if on or len(points) <= 6:
            label = words.short_name(each.arm, _LONGEST)
            axes.annotate(
                label,
                (each.cost, each.metric),
                xytext=(8, 7),
                textcoords="offset points",
                color=colour,
                weight="bold" if on else "normal",
                parse_math=False,
                annotation_clip=False,
            )
    axes.set_xlabel("CPU time of a run", color=SOFT, labelpad=7)
    unit = METRICS[experiment.metric].unit
    axes.text(0, 1 + 13 / (HEIGHT - 78), unit, color=SOFT, transform=axes.transAxes)
    caption = (
        "Filled and named: no other arm has both less cost and a better mean (by the means alone, "
        "not by tests). Cost is of the runs that count, trials of a sweep left out."
    )
    summary = f"Quality against cost; on the front: {words.listing([each.arm for each in best])}"
    return Chart("Quality against cost", finish(figure, name, summary), caption)


def _margin(values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return 0.12 * (high - low) or 0.05 * abs(high) or 1.0
