"""Lines along the runs of an experiment: its metric, differences to the baseline, attention.

A line is the mean over seeds with a band from the lowest to the highest. Of attention there is a
line for each layer, of its largest logit and of its entropy.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tilelab.common import svg
from tilelab.study.ask.metrics import METRICS
from tilelab.study.records.events import Evaluation, RunRecord
from tilelab.study.report.page import Chart
from tilelab.study.verdict import text as words
from tilelab.study.verdict.measures import metric_of
from tilelab.study.verdict.result import FloorResult

Abscissa = Literal["tokens", "time", "processor"]
Records = Mapping[int, RunRecord]  # seed -> record


class Series(NamedTuple):
    """The mean over seeds, and how far the seeds reach."""

    arm: str
    place: int  # in its experiment, 0 for the baseline: the colour
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]  # of the outermost seeds
    high: tuple[float, ...]
    seeds: int  # how many went into every point
    broken: bool  # a run of the arm diverged


def _finite(record: RunRecord, metric: str) -> dict[int, Evaluation]:
    return {each.step: each for each in record.evaluations if metric_of(each, metric) is not None}


def _furthest(records: Records, metric: str) -> list[int]:
    """Return the seeds of the runs that came furthest, and of those that diverged on the way."""
    # In a study that is not finished, the others would cut the lines off where they are.
    last = {seed: max(found) for seed, run in records.items() if (found := _finite(run, metric))}
    furthest = max(last.values(), default=0)
    return [seed for seed, step in last.items() if step == furthest or records[seed].diverged]


def _common(found: Sequence[Mapping[int, Evaluation]]) -> list[int]:
    return sorted(set.intersection(*(set(each) for each in found))) if found else []


def _number(evaluation: Evaluation, metric: str) -> float:
    number = metric_of(evaluation, metric)
    assert number is not None  # _finite has left the others out
    return number


def curve(arm: str, place: int, records: Records, metric: str, along: Abscissa) -> Series:
    """Return the held-out metric of an arm along its runs, those that have come furthest.

    Time is the mean over seeds of the seconds in optimizer steps, by the wall or the processor.
    """
    found = [_finite(records[seed], metric) for seed in _furthest(records, metric)]
    x, rows = [], []
    for step in _common(found):
        here = [each[step] for each in found]
        x.append(
            float(here[0].tokens)
            if along == "tokens"
            else statistics.fmean(
                each.train_wall_s if along == "time" else each.train_cpu_s for each in here
            )
        )
        rows.append([_number(each, metric) for each in here])
    broken = any(record.diverged for record in records.values())
    return _series(arm, place, x, rows, len(found), broken)


def difference(arm: str, place: int, records: Records, baseline: Records, metric: str) -> Series:
    """Return the arm minus the baseline, seed by seed, by tokens; for a loss, below 0 is ahead.

    Both are taken after equally many tokens. Where they share no evaluation by tokens except the
    start (as where one of them pads), both are taken after equally many steps, and the tokens are
    the arm's.
    """
    both = sorted(set(_furthest(records, metric)) & set(_furthest(baseline, metric)))
    pairs = [
        (list(_finite(records[seed], metric).values()), _finite(baseline[seed], metric).values())
        for seed in both
    ]
    broken = any(record.diverged for record in records.values())
    x: list[float] = []
    rows: list[list[float]] = []
    for key in (attrgetter("tokens"), attrgetter("step")):
        theirs = [{key(each): each for each in base} for _, base in pairs]
        ours = [{key(each): each for each in evaluations} for evaluations, _ in pairs]
        both_have = [set(mine) & set(other) for mine, other in zip(ours, theirs, strict=True)]
        common = sorted(set.intersection(*both_have)) if pairs else []
        x = [statistics.fmean(mine[at].tokens for mine in ours) for at in common]
        rows = [
            [
                _number(mine[at], metric) - _number(other[at], metric)
                for mine, other in zip(ours, theirs, strict=True)
            ]
            for at in common
        ]
        if len(common) > 1:
            break
    return _series(arm, place, x, rows, len(pairs), broken)


def _series(
    arm: str,
    place: int,
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    seeds: int,
    broken: bool,
) -> Series:
    mean = tuple(statistics.fmean(row) for row in rows)
    low, high = tuple(min(row) for row in rows), tuple(max(row) for row in rows)
    return Series(arm, place, tuple(x), mean, low, high, seeds, broken)


WIDTH, HEIGHT = 470, 310
_LEFT, _BOTTOM, _TOP = 50, 48, 30
LETTER = 9.2  # about as wide as a letter of a label
_AXES = {
    "tokens": "training tokens",
    "time": "seconds of training",
    "processor": "processor seconds of training",
}
_FEWEST_POINTS = 4  # of the longest line: fewer are read from the table


def enough(series: Sequence[Series]) -> list[Series]:
    """Return the lines, or none where the longest has too few points to be a curve."""
    longest = max((len(each.x) for each in series), default=0)
    return list(series) if longest >= _FEWEST_POINTS else []


_MOST_GROWN = 2.0  # of the frame's height, for a floor


def loss_chart(
    series: Sequence[Series],
    along: Abscissa,
    metric: str,
    name: str,
    floor: FloorResult | None = None,
) -> Chart | None:
    """Draw the held-out metric of every arm, with the outermost seeds as a band.

    Arms of fewer than two points are left out. A metric that rises is cut off below, a loss above.
    The floor is a dashed line, if it is in that metric and the frame need not grow too much for it.
    """
    unit, rises = METRICS[metric].unit, METRICS[metric].higher_is_better
    drawn = [each for each in series if len(each.x) > 1]
    if not drawn:
        return None
    what = unit[0].upper() + unit[1:] if rises else "Loss"
    held_out = f"Held-out {unit}" if rises else f"Held-out loss in {unit}"
    summary = f"{held_out} by {_AXES[along]}: " + "; ".join(
        f"{each.arm} from {each.mean[0]:.3f} to {each.mean[-1]:.3f}" for each in drawn
    )
    low, high, cut = _limits(drawn, rises)
    caption = _band_words(drawn)
    if cut:
        caption += " The frame leaves out the steep beginning."
    level = None
    if floor is not None and floor.metric == metric:
        margin = 0.06 * (high - low)
        ends = min(low, floor.value - margin), max(high, floor.value + margin)
        if ends[1] - ends[0] <= _MOST_GROWN * (high - low):
            (low, high), level = ends, floor.value
        where = "Outside of the frame" if level is None else "Dashed"
        caption += f" {where}: the {floor.name} ({floor.value:.3f})."
    figure, axes = _curves(drawn, f"{unit}, held-out data", _AXES[along], (low, high))
    if level is not None:
        axes.axhline(level, color=svg.SOFT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    title = f"{what} by {'processor time' if along == 'processor' else along}"
    return Chart(title, svg.finish(figure, name, summary), caption)


def difference_chart(
    series: Sequence[Series], smallest: float, metric: str, baseline: str, name: str
) -> Chart | None:
    """Draw every arm less the baseline, seed by seed, along the run; ±smallest does not matter."""
    unit, rises = METRICS[metric].unit, METRICS[metric].higher_is_better
    drawn = [each for each in series if len(each.x) > 1]
    if not drawn:
        return None
    summary = f"Paired difference to {baseline} in {unit} by tokens: " + "; ".join(
        f"{each.arm} ends at {each.mean[-1]:+.4f}" for each in drawn
    )
    # The last half decides the frame: what happens in the first steps is large and passes.
    late = [
        number
        for each in drawn
        for line in (each.low, each.high)
        for number in line[len(line) // 2 :]
    ]
    low, high = min(*late, -1.5 * smallest), max(*late, 1.5 * smallest)
    margin = 0.12 * (high - low)
    above, limits = f"{unit}, arm less {baseline}"[:46], (low - margin, high + margin)
    figure, axes = _curves(drawn, above, _AXES["tokens"], limits)
    axes.axhspan(-smallest, smallest, color=svg.RULE, alpha=0.55, linewidth=0, zorder=0)
    axes.axhline(0, color=svg.SOFT, linewidth=1.2, zorder=1)
    side = "above" if rises else "below"
    caption = (
        f"Each seed against the baseline's same seed; {side} the line an arm is ahead. "
        f"Grey: within ±{smallest:g}, too small to matter. {_band_words(drawn)}"
    )
    return Chart("Paired difference along the run", svg.finish(figure, name, summary), caption)


def _frame(letters: Sequence[int], end: float, above: str, below: str) -> tuple[Figure, Axes]:
    """Return an empty figure for lines up to an end, with room for their names on the right."""
    figure, axes = beside_labels(letters, above, 18)
    axes.set_xlabel(below, color=svg.SOFT, labelpad=7)
    amounts_below(axes, 5)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    axes.set_xlim(0, end)
    return figure, axes


def beside_labels(
    letters: Sequence[int], above: str, margin: float = 22, width: float = WIDTH
) -> tuple[Figure, Axes]:
    """Return an empty figure, with room on the right for names of so many letters."""
    inside = max(HEIGHT - _BOTTOM - _TOP, svg.LABEL_GAP * (len(letters) - 1))
    figure = svg.canvas(width, inside + _BOTTOM + _TOP)
    right = margin + LETTER * min(max(letters), svg.LONGEST_LABEL)
    axes = svg.place(figure, _LEFT, _BOTTOM, right, _TOP)
    axes.text(0, 1 + 13 / inside, above, color=svg.SOFT, transform=axes.transAxes)
    return figure, axes


def amounts_below(axes: Axes, ticks: int) -> None:
    """Write at most so many amounts below the horizontal axis: ``250``, ``1.2M``."""
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: words.shorten(number)))


def _limits(drawn: Sequence[Series], rises: bool) -> tuple[float, float, bool]:
    """Return both ends of the frame, and whether it leaves out the steep beginning."""
    # Upside down, what is said of falling lines holds for rising ones.
    sign = -1.0 if rises else 1.0
    behind = [[sign * at for at in (each.low if rises else each.high)] for each in drawn]
    best = min(sign * at for each in drawn for at in (each.high if rises else each.low))
    # It does where the slowest arm comes much closer to the best in a tenth of the run.
    early = max(line[max(1, round(len(line) * 0.12))] for line in behind)
    whole, edge = max(map(max, behind)), early + 0.12 * (early - best)
    end = min(whole, edge)
    # Losses that are all one number, as of runs that have only begun, still need a frame.
    low, high = sorted((sign * (best - (0.06 * (end - best) or 1.0)), sign * end))
    return low, high, edge < whole


def _curves(
    drawn: Sequence[Series], above: str, below: str, limits: tuple[float, float]
) -> tuple[Figure, Axes]:
    letters = [len(each.arm) + 2 * each.broken for each in drawn]
    figure, axes = _frame(letters, max(each.x[-1] for each in drawn), above, below)
    axes.set_ylim(limits)
    for each in drawn:  # bands first: no line is covered by a band
        if each.seeds > 1:
            colour = svg.arm_colour(each.place)
            axes.fill_between(
                each.x, each.low, each.high, color=colour, alpha=0.16, linewidth=0, zorder=2
            )
    for each in drawn:
        axes.plot(each.x, each.mean, solid_capstyle="round", **line_style(each.place))
        marker, size = ("X", 8) if each.broken else ("o", 5.5)
        end = each.x[-1:], each.mean[-1:]
        marks(axes, *end, each.place, marker, size, linestyle="-", markeredgewidth=0, zorder=30)
    ends = [(each.arm, each.place, each.x[-1], each.mean[-1], each.broken) for each in drawn]
    svg.label_ends(axes, [svg.LineEnd(*each) for each in ends])
    return figure, axes


def line_style(place: int) -> dict[str, Any]:
    """Return the look of an arm's main line."""
    style = {"color": svg.arm_colour(place), "linestyle": svg.arm_dashes(place)}
    return {**style, "linewidth": 2.1, "zorder": 3 + place}


def marks(
    axes: Axes,
    x: Sequence[float],
    y: Sequence[float],
    place: int,
    marker: str,
    size: float,
    **style: Any,
) -> None:
    """Draw points of an arm, which may reach over the frame, without a line between them."""
    usual: dict[str, Any] = {"linestyle": "none", "clip_on": False}
    axes.plot(x, y, color=svg.arm_colour(place), marker=marker, markersize=size, **usual | style)


def _band_words(drawn: Sequence[Series]) -> str:
    seeds = {each.seeds for each in drawn}
    if seeds == {1}:
        return "One seed."
    said = words.count(max(seeds), "seed") if len(seeds) == 1 else "the seeds that have come so far"
    ended = [each.arm for each in drawn if each.broken]
    crosses = f" Crosses: a run of {words.listing(ended)} diverged there." if ended else ""
    return f"Lines: the mean of {said}. Bands: from the lowest to the highest.{crosses}"


class ArmLayers(NamedTuple):
    """The attention layers of an arm along its runs, means over the seeds."""

    arm: str
    place: int  # in its experiment: the colour
    x: tuple[float, ...]  # tokens trained on, at each evaluation
    entropy: tuple[tuple[float, ...], ...]  # of each layer, mean over its heads, nats
    lowest_head: tuple[tuple[float, ...], ...]  # of each layer, that of its lowest head
    logits: tuple[tuple[float, ...], ...]  # the largest of each layer
    broken: bool  # whether a run of the arm diverged


def layers_of(arm: str, place: int, records: Mapping[int, RunRecord]) -> ArmLayers | None:
    """Return the layer statistics of an arm's runs where all are finite; None where none are."""
    runs = [found for record in records.values() if (found := _finite_layers(record))]
    steps = _common(runs)
    if not steps:
        return None

    def lines(name: str) -> tuple[tuple[float, ...], ...]:
        layers = [[run[step].softmaxes or () for run in runs] for step in steps]
        return tuple(
            tuple(statistics.fmean(getattr(run[layer], name) for run in at) for at in layers)
            for layer in range(len(layers[0][0]))
        )

    return ArmLayers(
        arm,
        place,
        tuple(statistics.fmean(run[step].tokens for run in runs) for step in steps),
        lines("entropy"),
        lines("lowest_head"),
        lines("max_logit"),
        any(record.diverged for record in records.values()),
    )


def _finite_layers(record: RunRecord) -> dict[int, Evaluation]:
    return {
        each.step: each
        for each in record.evaluations
        if each.softmaxes and all(None not in vars(layer).values() for layer in each.softmaxes)
    }


# Title, field of ``ArmLayers``, unit, what the thick line is of the layers, and caption.
_LAYER_FIGURES: tuple[tuple[str, str, str, Callable[[Sequence[float]], float], str], ...] = (
    (
        *("Largest attention logit", "logits", "largest logit", max),
        "Thin lines: the largest score of each layer over a few held-out windows, before the "
        "softmax. Thick: the largest of all layers. One that grows without bound ends badly.",
    ),
    (
        *("Entropy of attention", "entropy", "nats", statistics.fmean),
        "Thin lines: the entropy of each layer's attention, mean over heads and queries of a few "
        "held-out windows. Thick: the mean of the layers. At 0 every query looks at one key.",
    ),
)


def attention_charts(arms: Sequence[ArmLayers], slug: str) -> Iterator[Chart]:
    """Draw the largest logit and the entropy by tokens, thin for layers and thick for arms."""
    drawn = [each for each in arms if len(each.x) > 3]
    for title, field, unit, together, caption in _LAYER_FIGURES if drawn else ():
        letters = [len(each.arm) + 2 * each.broken for each in drawn]
        figure, axes = _frame(letters, max(each.x[-1] for each in drawn), unit, "training tokens")
        ends, said = [], []
        for each in drawn:
            layers, colour = getattr(each, field), svg.arm_colour(each.place)
            for line in layers:
                axes.plot(each.x, line, color=colour, linewidth=0.9, alpha=0.45, zorder=2)
            thick = [together(column) for column in zip(*layers, strict=True)]
            axes.plot(each.x, thick, **line_style(each.place))
            ends.append(svg.LineEnd(each.arm, each.place, each.x[-1], thick[-1]))
            said.append(f"{each.arm} from {thick[0]:.3g} to {thick[-1]:.3g}")
        low, high = axes.dataLim.intervaly
        margin = 0.06 * (high - low) or 1.0
        axes.set_ylim(low - margin, high + margin)
        svg.label_ends(axes, ends)
        summary = f"{title} by training tokens: {'; '.join(said)}"
        yield Chart(title, svg.finish(figure, f"{slug}-{field}", summary), caption)
