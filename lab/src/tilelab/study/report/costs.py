"""Figures and tables of what arms cost: memory, what a target took, and quality against cost."""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tilelab.common import svg
from tilelab.study.ask.metrics import METRICS, rank
from tilelab.study.records.events import Memory
from tilelab.study.report import lines
from tilelab.study.report.page import NONE, Cell, Chart, Table
from tilelab.study.report.verdicts import digits_of
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import ArmVerdict, Baseline, ExperimentVerdict, Interval

PARTS = ("weights", "gradients", "optimizer", "activations", "other")
_ROW = 34.0  # height of an arm


def memory_chart(verdict: ExperimentVerdict, name: str) -> Chart | None:
    """Draw the parts of memory of every arm that has them, and the peak as a mark."""
    arms = [
        (arm.name, at, arm.measures.memory)
        for at, arm in enumerate(verdict.all_arms)
        if arm.measures.memory is not None and parts_of(arm.measures.memory)
    ]
    if not arms:
        return None
    summary = "Memory: " + "; ".join(
        f"{arm}: peak {words.amount(split.peak_bytes)}" for arm, _, split in arms
    )
    figure, axes = _rows([arm for arm, _, _ in arms], [at for _, at, _ in arms], 58)
    most = max(max(split.peak_bytes, sum(drawn_parts(split))) for _, _, split in arms)
    units = ((2e9, 1e9, "GB"), (2e6, 1e6, "MB"), (0.0, 1e3, "kB"))
    factor, unit = next((factor, unit) for least, factor, unit in units if most >= least)
    axes.set_xlim(0, most / factor)
    for row, (_, _, split) in enumerate(arms):
        left = 0.0
        for part, colour in zip(drawn_parts(split), svg.PART_COLOURS, strict=True):
            axes.barh(row, part / factor, left=left, height=0.6, color=colour, linewidth=0)
            left += part / factor
        peak = split.peak_bytes / factor
        axes.plot([peak, peak], [row - 0.42, row + 0.42], color=svg.INK, linewidth=2, clip_on=False)
        svg.beside(axes, (max(peak, left), row), words.amount(split.peak_bytes), 9)
    axes.set_xlabel(unit, color=svg.SOFT, labelpad=7)
    caption = (
        "Storages counted once; activations are what autograd keeps of one micro-batch. Other is "
        "the rest of the peak: what is there for a moment, and freed blocks. Activations end at "
        "the peak where gradients are not there at the same time. The mark and the number are the "
        "peak of the process (of the allocator on a GPU)."
    )
    legend = tuple((part, f"--part-{number}") for number, part in enumerate(PARTS))
    return Chart("Where memory goes", svg.finish(figure, name, summary), caption, legend)


def target_charts(verdict: ExperimentVerdict, slug: str) -> list[Chart | None]:
    """Draw what the target took: tokens, time, and the share of runs that are not there yet."""
    known = [
        (arm.name, at, arm.target)
        for at, arm in enumerate(verdict.all_arms)
        if arm.target is not None
    ]
    if not known:
        return []
    by_processor = bool(verdict.slowed)
    said = f"{known[0][2].target:g} {METRICS[verdict.metric].unit}"
    tokens = [(arm, at, each.tokens, each.median_tokens) for arm, at, each in known]
    time = [
        (arm, at, each.cpu_s, each.median_cpu_s)
        if by_processor
        else (arm, at, each.wall_s, each.median_wall_s)
        for arm, at, each in known
    ]
    clock = "processor seconds of training" if by_processor else "seconds of training"
    name = f"{slug}-target"
    return [
        _taken_chart("Tokens", tokens, said, "training tokens", _short, f"{name}-tokens"),
        _taken_chart("Time", time, said, clock, words.duration, f"{name}-time"),
        survival_chart(verdict, said, f"{slug}-survival"),
    ]


def _short(amount: float) -> str:
    return words.shorten(float(f"{amount:.3g}"))


def _taken_chart(
    kind: str,
    # Of each arm its name, its place, what each seed took (None for a miss), and their median.
    every: Sequence[tuple[str, int, Sequence[float | None], float | None]],
    target: str,
    what: str,
    show: Callable[[float], str],
    name: str,
) -> Chart | None:
    """Draw a dot per seed, the median as a bar, and misses at the edge; None without a dot."""
    arms = [each for each in every if each[2]]
    numbers = [number for _, _, taken, _ in arms for number in taken if number is not None]
    if not numbers:
        return None
    right = 118 if any(None in taken for _, _, taken, _ in arms) else 84  # room for "3 of 5"
    figure, axes = _rows([arm for arm, *_ in arms], [at for _, at, *_ in arms], right)
    axes.set_xlim(0, max(numbers) * 1.04)
    labels = []
    for row, (arm, at, taken, middle) in enumerate(arms):
        colour = svg.arm_colour(at)
        reached = sorted(number for number in taken if number is not None)
        if middle is not None:
            axes.plot([0, middle], [row, row], color=colour, linewidth=2.4, alpha=0.35, zorder=2)
            axes.plot(
                [middle] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=2.6, clip_on=False
            )
        rows = [row] * len(reached)
        lines.marks(axes, reached, rows, at, "o", 6.5, markeredgewidth=0, alpha=0.75, zorder=5)
        label = "not reached" if middle is None else show(middle)
        if len(reached) < len(taken) and middle is not None:
            label += f", {len(reached)} of {len(taken)}"
        svg.beside(
            axes, (axes.get_xlim()[1], row), label, 9, svg.SOFT if middle is None else svg.INK
        )
        labels.append(f"{arm}: {label}")
    axes.set_xlabel(what, color=svg.SOFT, labelpad=7)
    caption = (
        f"The first evaluation at {target} or better. Dots: seeds; bar: their median. A run that "
        "missed the target counts as longer than any that reached it."
    )
    heading = f"{kind} to {target}"
    summary = f"{heading}: {'; '.join(labels)}"
    return Chart(heading, svg.finish(figure, name, summary), caption)


def _rows(arms: Sequence[str], indices: Sequence[int], right: float) -> tuple[Figure, Axes]:
    """Axes with a row per arm, the first on top, and the arms' names on the left."""
    figure = svg.canvas(lines.WIDTH, _ROW * len(arms) + 62)
    longest = min(max(map(len, arms)), svg.LONGEST_LABEL)
    axes = svg.place(figure, 16 + lines.LETTER * longest, 50, right, 12)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=svg.RULE, linewidth=1)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    names = [svg.short_name(arm, svg.LONGEST_LABEL) for arm in arms]
    axes.set_yticks(range(len(arms)), labels=names, parse_math=False)
    for label, index in zip(axes.get_yticklabels(), indices, strict=True):
        label.set_color(svg.arm_colour(index))
        label.set_fontweight("bold")
    lines.amounts_below(axes, 4)
    return figure, axes


def parts_of(split: Memory) -> dict[str, float]:
    """Return the bytes of each part; ``other`` is what the peak has beside those that are known."""
    values = {part: getattr(split, f"{part}_bytes") for part in PARTS[:-1]}
    known = {part: float(each) for part, each in values.items() if each is not None}
    if len(known) < len(values):  # of a script
        return {}
    return {**known, "other": max(0.0, split.peak_bytes - sum(known.values()))}


def drawn_parts(split: Memory) -> list[float]:
    """Return lengths that add up to the peak: activations are drawn up to it."""
    # Gradients and activations may never be there at once.
    parts = parts_of(split)
    rest = split.peak_bytes - sum(parts.values()) + parts["activations"]
    return list({**parts, "activations": max(0.0, min(parts["activations"], rest))}.values())


class Survival(NamedTuple):
    """A curve that begins at 1 and goes down where runs reach the target."""

    at: tuple[float, ...]  # where it goes down, in ascending order
    share: tuple[float, ...]  # S after each of these
    intervals: tuple[Interval | None, ...]  # pointwise; None where the share is 0
    censored: tuple[float, ...]  # where runs ended without having reached it

    @property
    def median(self) -> float | None:
        """The first place at which half of the runs or fewer are left; None where more are."""
        return next((x for x, s in zip(self.at, self.share, strict=True) if s <= 0.5), None)

    @property
    def end(self) -> float:
        """How far its runs went."""
        return max((*self.at, *self.censored, 0.0))

    def share_at(self, where: float) -> float:
        """Return the share that has not reached the target there."""
        return (1.0, *self.share)[bisect_right(self.at, where)]


def kaplan_meier(
    reached: Sequence[float], censored: Sequence[float], confidence: float
) -> Survival:
    """Return the Kaplan-Meier estimate of the share of runs that have not reached the target.

    The interval is Greenwood's variance on the scale of log(-log S), which stays within 0 and 1. A
    censored run was at risk up to and at the place where it ended.
    """
    from scipy.stats import CensoredData, ecdf  # slow to import, and few studies have a target

    curve = ecdf(CensoredData(uncensored=reached, right=censored)).sf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the intervals that do not exist
        ends = curve.confidence_interval(confidence, method="log-log")
    places = sorted(set(reached))
    low, high = (each.evaluate(places).tolist() for each in (ends.low, ends.high))
    return Survival(
        at=tuple(places),
        share=tuple(curve.evaluate(places).tolist()),
        intervals=tuple(
            None if math.isnan(a) else Interval(a, b) for a, b in zip(low, high, strict=True)
        ),
        censored=tuple(sorted(censored)),
    )


def _survivals(experiment: ExperimentVerdict) -> list[tuple[str, int, Survival]]:
    """Return arm, place and curve of every arm; nothing where no run reached the target."""
    found = []
    for at, arm in enumerate(experiment.all_arms):
        if arm.target is not None and arm.target.tokens:
            reached = [each for each in arm.target.tokens if each is not None]
            curve = kaplan_meier(reached, arm.target.censored, experiment.confidence)
            found.append((arm.name, at, curve))
    return found if any(curve.at for _, _, curve in found) else []


def survival_table(experiment: ExperimentVerdict) -> Table:
    """Return the curves as numbers; no rows where no run reached the target or there is none."""
    rows = []
    for arm, _, curve in _survivals(experiment):
        median = NONE if curve.median is None else Cell(words.integer(curve.median))
        left = Cell("100 %")
        if curve.share:
            interval = curve.intervals[-1]
            said = ""
            if interval is not None:
                said = f"{100 * interval.low:.0f} to {100 * interval.high:.0f} %"
            left = Cell(f"{100 * curve.share[-1]:.0f} %", said)
        steps = ", ".join(
            f"{_short(at)}: {100 * share:.0f} %"
            for at, share in zip(curve.at, curve.share, strict=True)
        )
        rows.append((Cell(arm), median, left, Cell(steps) if steps else NONE))
    notes = (
        "Kaplan-Meier: a run that never reached the target, diverged ones too, is censored at the "
        "end of its budget. Intervals are pointwise.",
    )
    head = ("arm", "median tokens", "not there at the end", "tokens: share not there yet")
    return Table("Runs that have not reached the target", head, tuple(rows), notes, "survival")


def survival_chart(experiment: ExperimentVerdict, target: str, name: str) -> Chart | None:
    """Draw a falling line for every arm, with a stroke where runs were censored."""
    curves = _survivals(experiment)
    if not curves:
        return None
    above = "runs not at the target yet"
    figure, axes = lines.beside_labels([len(arm) for arm, _, _ in curves], above)
    axes.set_xlim(0, max(curve.end for _, _, curve in curves))
    axes.set_ylim(0, 1.04)
    lines.amounts_below(axes, 5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
    ends = []
    for arm, at, curve in curves:
        end = svg.LineEnd(arm, at, curve.end, curve.share_at(curve.end))
        x, y = [0.0, *curve.at, end.x], [1.0, *curve.share, end.y]
        axes.step(x, y, where="post", clip_on=False, **lines.line_style(at))
        ended = sorted(set(curve.censored))
        shares = [curve.share_at(each) for each in ended]
        lines.marks(axes, ended, shares, at, "|", 12, markeredgewidth=2, zorder=20)
        ends.append(end)
    svg.label_ends(axes, ends)
    axes.set_xlabel("training tokens", color=svg.SOFT, labelpad=7)
    caption = (
        f"Kaplan-Meier estimate of the share of runs that have not reached {target}. Strokes: runs "
        "that ended without it (censored; one that diverged at the end of its budget)."
    )
    left = "; ".join(f"{end.name} {100 * end.y:.0f} % left" for end in ends)
    return Chart(f"Runs not at {target} yet", svg.finish(figure, name, f"{above}: {left}"), caption)


_LONGEST_POINT = 22


class Point(NamedTuple):
    """An arm."""

    arm: str
    place: int  # in the experiment
    cost: float  # CPU seconds of a run that counts, the mean
    metric: float  # the mean, as measured
    rank: float  # the same so that lower is better


def front(points: Sequence[Point], smallest: float = 0.0) -> list[Point]:
    """Return the Pareto front, cheapest first: points that no other beats on cost and quality.

    One that costs more is on it only if it is better than all cheaper ones by the smallest effect.
    """
    found: list[Point] = []
    for each in sorted(points, key=lambda point: (point.cost, point.rank)):
        if not found or (each.rank < found[-1].rank and each.rank <= found[-1].rank - smallest):
            found.append(each)
    return found


def _to_weigh(experiment: ExperimentVerdict) -> list[Point]:
    """Return the points of an experiment; none where no arm is better than another by an effect."""
    points = []
    base, others = experiment.baseline, experiment.arms
    arms: list[Baseline | ArmVerdict] = [base, *(arm for arm in others if not arm.diverged)]
    for at, arm in enumerate(arms):
        metric, cost = arm.measures.mean(experiment.metric), arm.cost
        runs = cost.runs - cost.sweep_runs
        if metric is None or cost.cpu_s is None or cost.sweep_cpu_s is None or not runs:
            continue  # withheld, or nothing has come yet
        spent = (cost.cpu_s - cost.sweep_cpu_s) / runs
        points.append(Point(arm.name, at, spent, metric, rank(experiment.metric, metric)))
    ranks = [each.rank for each in points]
    apart = len(points) > 1 and max(ranks) - min(ranks) >= experiment.smallest_effect
    return points if apart else []


def pareto_table(experiment: ExperimentVerdict) -> Table | None:
    """Return the arms on the front, and who beats each of the others in both."""
    points, smallest = _to_weigh(experiment), experiment.smallest_effect
    if not points:
        return None
    best, digits = front(points, smallest), digits_of(experiment)
    rows = []
    for each in sorted(points, key=lambda point: (point.cost, point.rank)):
        cheaper = [one for one in best if one.cost <= each.cost]
        ahead = [one.arm for one in cheaper if one.rank <= each.rank]
        level = [one.arm for one in cheaper if one.rank - smallest < each.rank]
        said = f"beaten by {words.listing(ahead)}" if ahead else ""
        said = said or f"not better than {words.listing(level)} by what matters, and costs more"
        verdict = Cell("on the front", tone="best") if each in best else Cell(said)
        metric = Cell(words.plain(each.metric, digits))
        rows.append((Cell(each.arm), Cell(words.duration(each.cost)), metric, verdict))
    head = ("arm", "CPU time of a run", METRICS[experiment.metric].unit, "")
    notes = (
        "By the means alone. An arm that costs more is on the front if it is better by "
        f"{smallest:g} or more.",
    )
    return Table("Quality against cost", head, tuple(rows), notes, "pareto")


def pareto_chart(experiment: ExperimentVerdict, name: str) -> Chart | None:
    """Draw a point per arm, and the front as a staircase."""
    points = _to_weigh(experiment)
    if not points:
        return None
    best = front(points, experiment.smallest_effect)
    figure = svg.canvas(lines.WIDTH, lines.HEIGHT)
    axes = svg.place(figure, 56, 48, 30, 30)
    axes.grid(axis="x", color=svg.RULE, linewidth=1)
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
        color=svg.SOFT,
        linewidth=1.4,
        linestyle=(0, (4, 2)),
        zorder=2,
    )
    for each in points:
        colour, on = svg.arm_colour(each.place), each in best
        at, size, inside = ([each.cost], [each.metric]), 9 if on else 7, colour if on else "none"
        lines.marks(axes, *at, each.place, "o", size, markerfacecolor=inside, zorder=5)
        if on or len(points) <= 6:
            label = svg.short_name(each.arm, _LONGEST_POINT)
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
    axes.set_xlabel("CPU time of a run", color=svg.SOFT, labelpad=7)
    unit = METRICS[experiment.metric].unit
    axes.text(0, 1 + 13 / (lines.HEIGHT - 78), unit, color=svg.SOFT, transform=axes.transAxes)
    caption = (
        "Filled and named: better by the smallest effect or more than every arm that costs less "
        "(by the means alone, not by tests). Cost is of the runs that count, trials of a sweep "
        "left out."
    )
    summary = f"Quality against cost; on the front: {words.listing([each.arm for each in best])}"
    return Chart("Quality against cost", svg.finish(figure, name, summary), caption)


def _margin(values: Sequence[float]) -> float:
    low, high = min(values), max(values)
    return 0.12 * (high - low) or 0.05 * abs(high) or 1.0
