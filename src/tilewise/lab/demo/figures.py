"""The four figures of the report, from a record."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape

from tilewise.lab.demo.chart import Axis, Line, Point, decades, draw, linear
from tilewise.lab.demo.longtable import Cell
from tilewise.lab.demo.record import Record
from tilewise.lab.demo.settings import CONTROLS
from tilewise.lab.demo.verdict import FIRST_LIMIT, FIRST_STEPS, gaps
from tilewise.nn import Implementation

_FLOOR = 1e-8  # where the gap chart ends: float32 losses are equal or further apart than that


def _figure(title: str, chart: str, caption: str) -> str:
    return f"<figure><h3>{title}</h3>{chart}<figcaption>{caption}</figcaption></figure>"


def _steps_axis(record: Record) -> Axis:
    steps = record.settings.steps
    axis = linear("step", [0, steps])  # ends at a round number, which may be far past the last step
    return replace(axis, high=steps, ticks=tuple(tick for tick in axis.ticks if tick[0] <= steps))


def loss_figure(record: Record) -> str:
    """The losses of both arms."""
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    if not plain.losses:
        return ""
    lines = [
        Line(arm.name, list(enumerate(arm.losses, 1)), style)
        for arm, style in ((plain, "plain wide"), (tilewise, "tilewise"))
    ]
    chart = draw(
        _steps_axis(record),
        linear("loss, nats per byte", plain.losses + tilewise.losses),
        lines,
        f"Training loss falls from {plain.losses[0]:.2f} to {plain.losses[-1]:.2f}, alike in both.",
    )
    return _figure("Training loss", chart, "The thin line lies on the wide one.")


def gap_figure(record: Record) -> str:
    """How far each run is from the plain one, step by step."""
    plain, tilewise = record.arm("plain"), record.arm("tilewise")
    controls = [record.arm(name) for name in CONTROLS]
    runs = [(arm, "control", title) for arm, title in zip(controls, _control_titles(), strict=True)]
    runs.append((tilewise, "tilewise", "tilewise"))
    found = [(gaps(arm, plain), style, title) for arm, style, title in runs]
    highest = max([FIRST_LIMIT, *[gap for seen, _, _ in found for gap in seen]])
    y = decades("relative gap to plain", -8, max(-4, math.ceil(math.log10(highest))))
    limit = [(0.0, FIRST_LIMIT), (float(FIRST_STEPS), FIRST_LIMIT)]
    lines = [Line("limit of the first steps", limit, "limit")]
    for seen, style, title in found:
        points = [(float(step), max(gap, _FLOOR)) for step, gap in enumerate(seen, 1)]
        lines.append(Line(title, points, style, dots=2.4, joined=False))
    summary = "Relative gap of each run's loss to the plain run's, on a logarithmic scale."
    caption = "Dots on the bottom edge: steps whose losses are equal to the last bit."
    return _figure(
        "Distance from the plain run", draw(_steps_axis(record), y, lines, summary), caption
    )


def _control_titles() -> list[str]:
    return ["plain, nudged by one ulp", *[""] * (len(CONTROLS) - 1)]


def long_memory_figure(record: Record) -> str:
    """Peak memory against the window's length."""

    def peak(cell: Cell) -> float | None:
        return None if cell.peak_bytes is None else cell.peak_bytes / 1e9

    lines = _long_lines(record, peak)
    estimates = [
        (float(cell.context), cell.estimate_bytes / 1e9)
        for cell in record.cells
        if cell.estimate_bytes is not None
    ]
    if any(cell.reason for cell in record.cells if cell.implementation == "plain"):
        lines.insert(0, Line("plain, estimated", estimates, "estimate"))
    return _long_figure(record, "Peak memory", "GB", lines)


def long_time_figure(record: Record) -> str:
    """Time against the window's length."""
    lines = _long_lines(record, lambda cell: cell.wall_s)
    return _long_figure(record, "Time of forward and backward", "seconds", lines)


def _long_lines(record: Record, value: Callable[[Cell], float | None]) -> list[Line]:
    def points(name: Implementation) -> Sequence[Point]:
        return [
            (float(cell.context), found)
            for cell in record.cells
            if cell.implementation == name and (found := value(cell)) is not None
        ]

    order: tuple[Implementation, ...] = ("plain", "sdpa", "tilewise")
    return [Line(name, points(name), name, dots=4.0) for name in order]


def _long_figure(record: Record, title: str, unit: str, lines: list[Line]) -> str:
    values = [value for line in lines for _, value in line.points]
    if not values:
        return ""
    contexts = sorted({cell.context for cell in record.cells})
    ticks = tuple((float(context), f"{context:,}") for context in contexts)
    x = Axis("window, bytes", contexts[0] / 1.2, contexts[-1] * 1.2, ticks, log=True)
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    y = decades(unit, low, max(high, low + 1))
    summary = f"{title} against the window's length, on logarithmic scales, for each attention."
    return _figure(escape(title), draw(x, y, lines, summary), "Both scales are logarithmic.")
