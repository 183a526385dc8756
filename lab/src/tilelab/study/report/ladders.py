"""A ladder on the page: effects against the text read (or the size), and how well they foretell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from tilelab.common.svg import RULE, SOFT, LineEnd, arm_colour, finish, label_ends
from tilelab.study.ask.metrics import METRICS
from tilelab.study.report.lines import WIDTH, beside_labels, line_style, marks
from tilelab.study.report.page import NONE, Cell, Chart, Table
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import (
    Clock,
    EqualTime,
    ExperimentVerdict,
    Interval,
    LadderArm,
    LadderPoint,
    LadderVerdict,
)

_AXES = {"text": "bytes of text read", "tokens": "training tokens", "parameters": "parameters"}
_CLOCKS: dict[Clock, str] = {"cpu": "processor time", "wall": "wall time"}


def ladder_of(found: LadderVerdict, smallest: float, slug: str) -> dict[str, Any]:
    """Return what the templates show of a ladder, by its name there."""
    chart = effect_chart(found, smallest, f"{slug}-effects")
    timed = (_equal_time(found, clock) for clock in _CLOCKS)
    tables = (_effects(found), *timed, _rates(found))
    return {
        "name": found.experiment,
        "slug": slug,
        "question": found.question,
        "meaning": meaning(found, smallest),
        "charts": [] if chart is None else [chart],
        "tables": [table for table in tables if table.rows],
    }


def meaning(found: LadderVerdict, smallest: float) -> str:
    """Return the ladder in a few sentences: the first rung, the last, and the prediction."""
    unit, axis = METRICS[found.metric].unit, _AXES[found.axis]
    ends = [each for each in found.arms if len(each.points) > 1]
    if not ends:
        return "Too few rungs are over to say how effects change."
    said = []
    for each in ends:
        first, last = each.points[0], each.points[-1]
        low, high = (words.shorten(point.at) for point in (first, last))
        said.append(
            f"{each.arm} {words.signed(first.effect, 3)} at {low} and "
            f"{words.signed(last.effect, 3)} at {high}"
        )
    text = f"Effects in {unit}, by {axis}: {'; '.join(said)}."
    foretold = [each for each in found.arms if each.miss is not None]
    if foretold:
        held = [each.arm for each in foretold if abs(each.miss or 0.0) <= smallest]
        text += (
            f" The fit without the last rung foretold it within {smallest:g} for "
            f"{len(held)} of {words.count(len(foretold), 'arm')}."
        )
    return text


def ends(found: LadderVerdict, rungs: Sequence[ExperimentVerdict], digits: int) -> str:
    """Return which arm leads at the first and at the last rung, and whose effect changes its sign.

    The arm that leads has the best mean; the baseline leads where no arm's is better. A sign
    changes where an arm is better at one rung and worse at another, by its verdicts. Empty while
    runs of a rung are missing.
    """
    if any(arm.label == "incomplete" for rung in rungs for arm in rung.arms):
        return ""
    places = [
        rung if at is None else words.shorten(at)
        for rung, at in zip(found.rungs, found.places, strict=True)
    ]
    first, last = (_leader(rungs[at], digits) for at in (0, -1))
    other = " and" if first[0] == last[0] else f", {last[0]}"
    said = f"{first[0]} leads at {places[0]} ({first[1]}){other} at {places[-1]} ({last[1]})"
    turned = _turned(rungs, places)
    rest = words.listing(turned) if turned else "no arm's effect is shown to change its sign"
    return f"By {_AXES[found.axis]}, {said}; {rest}."


def _leader(rung: ExperimentVerdict, digits: int) -> tuple[str, str]:
    """Return the arm with the best mean of a rung, and by how much it leads."""
    sign = -1 if METRICS[rung.metric].higher_is_better else 1
    known = [(sign * arm.effect, at) for at, arm in enumerate(rung.arms) if arm.effect is not None]
    effect, at = min(known, default=(0.0, 0))
    if effect >= 0:
        return rung.baseline.name, "the baseline"
    arm = rung.arms[at]
    doubts: list[str] = [] if arm.label == "better" else [arm.label]
    doubts += ["not learnt"] if arm.neither_learnt else []
    size = f"by {words.plain(-effect, digits)} {METRICS[rung.metric].unit}"
    return arm.arm, ", ".join([size, *doubts])


def _turned(rungs: Sequence[ExperimentVerdict], places: Sequence[str]) -> list[str]:
    """Return the arms that are better at one rung and worse at another, in words."""
    labels: dict[str, dict[str, str]] = {}  # arm -> place -> its label
    for rung, place in zip(rungs, places, strict=True):
        for arm in rung.arms:
            if arm.label in ("better", "worse"):
                labels.setdefault(arm.arm, {})[place] = arm.label
    said = []
    for name, by_place in labels.items():
        (place, label), *others = by_place.items()
        other = next(((at, each) for at, each in reversed(others) if each != label), None)
        if other is not None:
            said.append(f"{name} is {label} at {place} and {other[1]} at {other[0]}")
    return said


def effect_chart(
    found: LadderVerdict, smallest: float, name: str, width: float = WIDTH
) -> Chart | None:
    """Draw the effect of every arm at every rung with its interval, and the fitted line's band."""
    places = {each.arm: place for place, each in enumerate(found.arms, 1)}
    drawn = [each for each in found.arms if len(each.points) > 1]
    at = sorted({point.at for each in drawn for point in each.points})
    if not drawn:
        return None
    unit = METRICS[found.metric].unit
    letters = [len(each.arm) for each in drawn]
    figure, axes = beside_labels(letters, f"{unit}, arm less {found.baseline}"[:46], width=width)
    axes.set_xscale("log")
    axes.set_xlim(at[0], at[-1])
    axes.xaxis.set_major_locator(FixedLocator(at))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: words.shorten(number)))
    axes.set_xlabel(_AXES[found.axis], color=SOFT, labelpad=7)
    seen = [point.effect for each in drawn for point in each.points]
    low, high = min(*seen, -1.5 * smallest), max(*seen, 1.5 * smallest)
    margin = 0.12 * (high - low)
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda number, _: words.shorten(number)))
    axes.axhspan(-smallest, smallest, color=RULE, alpha=0.55, linewidth=0, zorder=0)
    axes.axhline(0, color=SOFT, linewidth=1.2, zorder=1)
    for each in drawn:
        place, colour = places[each.arm], arm_colour(places[each.arm])
        x, y = [point.at for point in each.points], [point.effect for point in each.points]
        if each.curve:
            line_x, line_y, below, above = zip(*each.curve, strict=True)
            axes.fill_between(line_x, below, above, color=colour, alpha=0.16, linewidth=0, zorder=2)
            axes.plot(line_x, line_y, **line_style(place))
        else:
            axes.plot(x, y, **line_style(place))
        marks(axes, x, y, place, "o", 5.5, markeredgewidth=0, zorder=30)
        if each.predicted is not None:
            empty = {"markerfacecolor": "none", "markeredgewidth": 1.4, "zorder": 31}
            marks(axes, x[-1:], [each.predicted], place, "D", 7, **empty)
    last = [(each.arm, places[each.arm], each.points[-1]) for each in drawn]
    label_ends(axes, [LineEnd(arm, place, end.at, end.effect) for arm, place, end in last])
    summary = f"Effect in {unit} by {_AXES[found.axis]}: " + "; ".join(
        f"{each.arm} from {each.points[0].effect:+.3f} to {each.points[-1].effect:+.3f}"
        for each in drawn
    )
    caption = (
        "Dots: the mean of the paired seeds. Lines and bands: the fit and its interval. Empty "
        f"diamonds: what the fit without the last rung foretells. Grey: within ±{smallest:g}, too "
        "small to matter."
    )
    title = f"Effect by {_AXES[found.axis]}"
    return Chart(title, finish(figure, name, summary), caption)


def _effects(found: LadderVerdict) -> Table:
    top = found.rungs[-1]
    head = (
        "arm",
        *(
            rung if at is None else f"{rung} ({words.shorten(at)})"
            for rung, at in zip(found.rungs, found.places, strict=True)
        ),
        f"foretold at {top}",
        "missed by",
        "limit",
    )
    losses = [NONE if each is None else Cell(f"{each:.4f}") for each in found.losses]
    rows = [(Cell(found.baseline, note=METRICS[found.metric].unit), *losses, NONE, NONE, NONE)]
    rows += [_row(each, found) for each in found.arms]
    notes = [
        f"The first row has the baseline's {METRICS[found.metric].unit}; the others the "
        "differences to it, the mean of the paired seeds.",
    ]
    if found.exponent is not None:
        notes.append(
            f"Fit: a + b x^-{found.exponent:.2f}, x in {_AXES[found.axis]}, with the exponent of "
            "the baseline's own law. The limit is a."
        )
    return Table("Effects at every rung", head, tuple(rows), tuple(notes), key="plain")


def _row(arm: LadderArm, found: LadderVerdict) -> tuple[Cell, ...]:
    points = {each.rung: each for each in arm.points}
    cells = [_effect(points.get(rung)) for rung in found.rungs]
    foretold = miss = limit = NONE
    if arm.predicted is not None and arm.miss is not None:
        foretold = Cell(words.signed(arm.predicted, 4), _ends(arm.predicted_interval))
        miss = Cell(words.signed(arm.miss, 4))
    if arm.constants:
        limit = Cell(words.signed(arm.constants[0], 3))
    return (Cell(arm.arm), *cells, foretold, miss, limit)


def _equal_time(found: LadderVerdict, clock: Clock) -> Table:
    """Return the effects of every arm at the times at which the baseline ended its rungs."""
    timed = {
        arm.arm: {each.rung: each for each in arm.equal_time if each.clock == clock}
        for arm in found.arms
    }
    at = {rung: each.at_s for known in timed.values() for rung, each in known.items()}
    rungs = [rung for rung in found.rungs if rung in at]

    rows = [
        (Cell(arm), *(_effect(known.get(rung)) for rung in rungs))
        for arm, known in timed.items()
        if known
    ]
    notes = [
        f"Differences to {found.baseline} after the {_CLOCKS[clock]} that it takes for a rung. "
        + (
            "An arm whose steps take longer has read less by then: its result lies on the straight "
            "line, by the logarithm of the text read, between its own rungs. "
            if found.axis != "parameters"
            else "An arm's result at that time lies on the straight line, by the logarithm of "
            "time, between its own rungs. "
        )
        + "A dash, or no column: outside of its rungs nothing is extrapolated."
    ]
    if clock == "wall":
        notes.append("Runs beside one another, and other load, move wall time.")
    head = ("arm", *(f"{rung} ({words.duration(at[rung])})" for rung in rungs))
    title = f"Effects at equal {_CLOCKS[clock]}"
    return Table(title, head, tuple(rows), tuple(notes), key="plain")


def _effect(each: LadderPoint | EqualTime | None) -> Cell:
    return NONE if each is None else Cell(words.signed(each.effect, 4), _ends(each.interval))


def _ends(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{words.signed(interval.low, 3)} to {words.signed(interval.high, 3)}"


def _rates(found: LadderVerdict) -> Table:
    arms = dict.fromkeys(arm for each in found.rates.values() for arm in each)
    rows = [
        (Cell(arm), *(_rate(found.rates.get(rung, {}), arm) for rung in found.rungs))
        for arm in arms
    ]
    notes = ("Tuned at some rungs, on the line through these optima at the others.",)
    return Table("Tuned values", ("arm", *found.rungs), tuple(rows), notes, key="rates")


def _rate(values: Mapping[str, float | None], arm: str) -> Cell:
    if arm not in values:
        return NONE
    value = values[arm]
    return Cell("diverged", tone="bad") if value is None else Cell(f"{value:g}")
