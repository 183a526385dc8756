"""A record as one HTML page that loads nothing, and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tilelab.bench.suites import figures
from tilelab.bench.suites.memory import CURE, DOUBLE
from tilelab.bench.suites.methods import OURS
from tilelab.bench.suites.point import COMPLETE, Point, Record, groups
from tilelab.bench.suites.sentences import lead, sentences
from tilelab.bench.suites.tables import BY_CASE, TITLES, heading, tables
from tilelab.bench.table import Table
from tilelab.bench.table import markdown as markdown_table
from tilelab.common.svg import house_style, standalone, style_sheet

__all__ = ["ABOUT", "html", "markdown", "pictures"]

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
}


class _Figure(NamedTuple):
    """A drawing, unique by its name in the page, and what is below it."""

    name: str
    drawing: Markup
    caption: str


class _Section(NamedTuple):
    """A suite on the page."""

    name: str
    about: str
    sentences: list[str]
    figures: list[_Figure]
    tables: list[Table]


def html(record: Record) -> str:
    """Return the page; every text that comes from outside is escaped by the template engine."""
    environment = Environment(
        loader=PackageLoader("tilelab.bench.suites"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = style_sheet()
    with house_style():
        sections = [_section(record, suite) for suite in record.suites]
    return environment.get_template("page.html").render(
        style=Markup(style),
        chip=record.machine["chip"],
        lead=lead(record),
        heading=heading(record),
        complete=record.status == COMPLETE,
        sections=sections,
        settings="; ".join(f"{name} {_said(value)}" for name, value in record.settings.items()),
    )


def pictures(record: Record) -> dict[str, str]:
    """Return every figure of the page as an SVG file, by its name."""
    with house_style():
        every = [each for suite in record.suites for each in _figures(suite, record.of(suite))]
    return {each.name: standalone(each.drawing) for each in every}


def _said(value: Any) -> str:
    """Return an option's value in words."""
    if isinstance(value, list):
        return ", ".join(str(each) for each in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _section(record: Record, suite: str) -> _Section:
    points = record.of(suite)
    return _Section(
        suite,
        ABOUT[suite],
        sentences(record, suite),
        _figures(suite, points),
        tables(record, suite),
    )


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
            drawing = figures.lines(own, methods, quantity, name)
        if drawing is not None:
            words = _SHARE if quantity == "error" else TITLES[quantity]
            found.append(_Figure(name, drawing, f"{case}, {dtype}: {words}"))
    if suite in BY_CASE:
        for dtype in dict.fromkeys(point.dtype for point in points):
            own = [point for point in points if point.dtype == dtype]
            ratios = _ratios(own)
            words = f"times faster than plain attention, {dtype}"
            name = f"{suite}-bars-{dtype}"
            drawing = figures.bars(ratios, words, name, mark=1.0)
            if drawing is not None:
                found.append(_Figure(name, drawing, f"{suite}: {words}"))
    return found


def _bars(points: Sequence[Point], name: str) -> Markup | None:
    """Draw bytes or seconds of measurements at one length, with ticks for predictions."""
    in_bytes = points[0].quantity == "bytes"
    factor = 1e-6 if in_bytes else 1e3
    shown = [point for point in points if point.median]
    return figures.bars(
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


def markdown(record: Record) -> str:
    """Return the same without figures."""
    parts = ["# tilewise bench: " + ", ".join(record.suites), "\n\n".join(heading(record))]
    for suite in record.suites:
        parts += [f"## {suite}", ABOUT[suite]]
        parts += ["\n".join(f"- {line}" for line in sentences(record, suite))]
        parts += [markdown_table(table) for table in tables(record, suite)]
    return "\n\n".join(filter(None, parts)) + "\n"
