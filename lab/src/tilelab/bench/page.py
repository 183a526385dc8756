"""A record as one HTML page that loads nothing, with its figures, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from tilelab.bench.sentences import lead, sentences
from tilelab.bench.steps import Point, Quantity, SuiteRecord, amount_of, groups
from tilelab.bench.suites import CURE, DOUBLE
from tilelab.bench.tables import BY_CASE, TITLES, suite_heading, suite_tables
from tilelab.common.files import COMPLETE
from tilelab.common.svg import (
    INK,
    RULE,
    SOFT,
    LineEnd,
    arm_colour,
    arm_dashes,
    beside,
    canvas,
    finish,
    house_style,
    label_ends,
    page_of,
    place,
    standalone,
)
from tilelab.common.tables import markdown as markdown_table
from tilelab.peers.methods import OURS

_WIDTH, _HEIGHT = 560, 360
_LEFT, _BOTTOM, _TOP = 78, 48, 16
_LETTER = 7.4


class _Line(NamedTuple):
    """A method along the length."""

    name: str
    place: int
    x: list[int]
    y: list[float]
    predicted: list[tuple[int, float]]


def _places(methods: Sequence[str]) -> dict[str, int]:
    """Return a colour's place for each method: plain is the baseline, ours comes first."""
    ordered = list(dict.fromkeys(["plain", OURS, *methods]))
    return {name: ordered.index(name) for name in methods}


def _lines(points: Sequence[Point], methods: Sequence[str]) -> list[_Line]:
    at = _places(methods)
    found = []
    for name in dict.fromkeys(point.method for point in points):
        own = [p for p in points if p.method == name and p.median and p.status == "ok"]
        own.sort(key=lambda point: point.length)
        if own:
            predicted = [(p.length, p.predicted) for p in own if p.predicted]
            # Of errors the share of what is allowed: which gradient has the largest one differs.
            medians = [(p.median or 0.0) / (p.allowed or 1.0) for p in own]
            found.append(_Line(name, at[name], [p.length for p in own], medians, predicted))
    return found


def _draw_lines(
    points: Sequence[Point], methods: Sequence[str], quantity: Quantity, name: str
) -> Markup | None:
    """Draw the medians of all methods by length; None where nothing has two lengths."""
    drawn = _lines(points, methods)
    if not any(len(line.x) > 1 for line in drawn):
        return None
    figure = canvas(_WIDTH, _HEIGHT)
    widest = max(len(line.name) for line in drawn)
    axes = place(figure, _LEFT, _BOTTOM, 24 + _LETTER * widest, _TOP)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = sorted({n for line in drawn for n in line.x})
    axes.set_xlim(every[0], every[-1])
    values = [y for line in drawn for y in (*line.y, *(p for _, p in line.predicted))]
    axes.set_ylim(min(values) / 1.6, max(values) * 1.6)
    for line in drawn:
        _draw(axes, line)
    ends = [
        LineEnd(each.name, each.place, each.x[-1], each.y[-1], strong=each.name.startswith(OURS))
        for each in drawn
    ]
    label_ends(axes, ends, widest)
    axes.xaxis.set_major_locator(FixedLocator([float(n) for n in every]))
    axes.xaxis.set_minor_locator(NullLocator())
    few = max(values) < 100 * min(values)  # powers of ten alone would be one line or two
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=12))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _short(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _amount(y, quantity)))
    axes.set_xlabel("queries and keys", color=SOFT, labelpad=7)
    said = "; ".join(f"{line.name}: {_amount(line.y[-1], quantity)}" for line in drawn)
    return finish(figure, name, f"At {every[-1]} or the longest measured: {said}")


def _amount(value: float, quantity: Quantity) -> str:
    return f"{value:.2g}" if quantity == "error" else amount_of(value, quantity)


def _draw(axes: Axes, line: _Line) -> None:
    colour, own = arm_colour(line.place), line.name.startswith(OURS)
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linewidth=2.4 if own else 1.6,
        linestyle=arm_dashes(line.place),
        marker="o",
        markersize=4,
        markeredgewidth=0,
        clip_on=False,
        zorder=4 if own else 3,
    )
    if line.predicted:
        x, y = zip(*line.predicted, strict=True)
        axes.plot(x, y, color=colour, linewidth=1.2, linestyle=(0, (1, 2)), zorder=2)


def _short(length: float) -> str:
    whole = round(length)
    return f"{whole // 1024}k" if whole >= 1024 and whole % 1024 == 0 else str(whole)


def _draw_bars(
    values: Sequence[tuple[str, float]],
    unit: str,
    name: str,
    *,
    mark: float | None = None,
    predicted: Sequence[float | None] = (),
) -> Markup | None:
    """Draw a bar for each name, a line across at ``mark``, and ticks at what is predicted."""
    if not values:
        return None
    widest = min(44, max(len(words) for words, _ in values))
    figure = canvas(680, 62 + 24 * len(values))
    axes = place(figure, 20 + 7 * widest, 44, 70, 8)
    ticks = [*predicted, *[None] * (len(values) - len(predicted))]
    for row, ((_, value), tick) in enumerate(zip(values, ticks, strict=True)):
        axes.barh(row, value, height=0.62, color=arm_colour(1))
        beside(axes, (max(value, tick or 0.0), row), f"{value:.3g}")
        if tick is not None:
            axes.plot([tick, tick], [row - 0.36, row + 0.36], color=INK, linewidth=1.6)
    axes.set_yticks(range(len(values)), [words[:44] for words, _ in values])
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.set_ylim(len(values) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=True, color=RULE, linewidth=1)
    axes.set_xlim(0, max(*(value for _, value in values), *(tick or 0.0 for tick in ticks)) * 1.08)
    if mark is not None:
        axes.axvline(mark, color=SOFT, linewidth=1.2)
    axes.set_xlabel(unit, color=SOFT, labelpad=7)
    said = "; ".join(f"{words} {value:.3g}" for words, value in values)
    return finish(figure, name, f"{unit}: {said}")


_SHARE = "the largest error against float64, as a share of what is allowed"

ABOUT = {
    "speed": "Exact methods side by side. What fails the 2x rule is not timed.",
    "memory": "Peak memory of one pass beyond its operands: on a CPU in a process of its own, on a "
    "GPU by the allocator's statistics. Dotted, and in brackets: what the model predicts.",
    "accuracy": "The largest error against float64, and in brackets what the 2x rule allows: twice "
    "the error of the plain implementation in the same dtype, and rounding.",
    "paper": "The runtime figures of the FlashAttention paper: exact methods, the block-sparse "
    "kernel, and approximate ones with their error against exact attention: root mean square of "
    "the difference over that of the values, on normal numbers, which attend most evenly.",
    "models": "One attention layer of well-known models, end to end: projections, attention, "
    "output projection.",
    "variants": "Masks and scores of the catalogue, beside plain attention and FlexAttention.",
    "lists": "Each row reads some keys; 64 heads of width 128 share them. tilewise reads by key "
    "lists, the others by a mask. tilewise over all keys computes something else: see its error.",
    "list-memory": "Peak memory of one pass beyond q, k, v and the output's gradient; lists and "
    "masks count. Each row reads 512 keys. tilewise over all keys computes something else.",
    "widths": "Causal attention with heads of other widths than 64 and 128. Latent: 16 heads over "
    "keys of 576 whose first 512 numbers are the values.",
    "doors": "Calls of torch's function that tilewise.sdpa takes, with what converting them costs.",
}


# A name that is unique in the page, the drawing, and what is below it.
_Figure = tuple[str, Markup, str]


def html(record: SuiteRecord) -> str:
    """Return the page."""
    with house_style():
        sections = [
            {
                "name": suite,
                "about": ABOUT[suite],
                "sentences": sentences(record, suite),
                "figures": _figures(suite, record.of(suite)),
                "tables": suite_tables(record, suite),
            }
            for suite in record.suites
        ]
    return page_of(
        "tilelab.bench",
        chip=record.machine["chip"],
        lead=lead(record),
        heading=suite_heading(record),
        complete=record.status == COMPLETE,
        sections=sections,
        settings="; ".join(f"{name} {_said(value)}" for name, value in record.settings.items()),
    )


def pictures(record: SuiteRecord) -> dict[str, str]:
    """Return every figure of the page as an SVG file, by its name."""
    with house_style():
        every = [each for suite in record.suites for each in _figures(suite, record.of(suite))]
    return {name: standalone(drawing) for name, drawing, _ in every}


def _said(value: Any) -> str:
    """Return an option's value in words."""
    if isinstance(value, list):
        return ", ".join(str(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _figures(suite: str, points: Sequence[Point]) -> list[_Figure]:
    along = [point for point in points if point.case not in (CURE, DOUBLE)]
    methods = list(dict.fromkeys(point.method for point in along))
    found = []
    for index, ((case, dtype, quantity), own) in enumerate(groups(points).items()):
        name = f"{suite}-{index}"
        drawing = None
        if case in (CURE, DOUBLE):
            drawing = _bars(own, name)
        elif suite not in BY_CASE:
            drawing = _draw_lines(own, methods, quantity, name)
        if drawing is not None:
            words = _SHARE if quantity == "error" else TITLES[quantity]
            found.append((name, drawing, f"{case}, {dtype}: {words}"))
    if suite in BY_CASE:
        for dtype in dict.fromkeys(point.dtype for point in points):
            own = [point for point in points if point.dtype == dtype]
            words = f"times faster than plain attention, {dtype}"
            name = f"{suite}-bars-{dtype}"
            drawing = _draw_bars(_ratios(own), words, name, mark=1.0)
            if drawing is not None:
                found.append((name, drawing, f"{suite}: {words}"))
    return found


def _bars(points: Sequence[Point], name: str) -> Markup | None:
    """Draw bytes or seconds of measurements at one length, with ticks for predictions."""
    in_bytes = points[0].quantity == "bytes"
    factor = 1e-6 if in_bytes else 1e3
    shown = [point for point in points if point.median]
    return _draw_bars(
        [(point.method, (point.median or 0.0) * factor) for point in shown],
        "MB beyond the operands; ticks: predicted" if in_bytes else "ms",
        name,
        predicted=[None if p.predicted is None else p.predicted * factor for p in shown],
    )


def _ratios(points: Sequence[Point]) -> list[tuple[str, float]]:
    """Plain attention's time over ours."""
    medians = {(p.case, p.length, p.method): p.median for p in points if p.median}
    found = []
    for case, length, method in medians:
        ours, other = medians[case, length, method], medians.get((case, length, "plain"))
        if method == OURS and ours and other:
            found.append((f"{case} ({length})", other / ours))
    return found


def markdown(record: SuiteRecord) -> str:
    """Return the same without figures."""
    parts = ["# tilewise bench: " + ", ".join(record.suites), "\n\n".join(suite_heading(record))]
    for suite in record.suites:
        parts += [f"## {suite}", ABOUT[suite]]
        parts += ["\n".join(f"- {line}" for line in sentences(record, suite))]
        parts += [markdown_table(table) for table in suite_tables(record, suite)]
    return "\n\n".join(filter(None, parts)) + "\n"
