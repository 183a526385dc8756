"""Line charts as SVG text: enough for the report, and nothing to load from elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from tilewise.lab.demo.words import power_of_ten

WIDTH, HEIGHT = 480, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 42
Point = tuple[float, float]


@dataclass(frozen=True)
class Axis:
    """One axis.

    Args:
        title: what it shows, with its unit.
        low, high: its ends; above 0 where ``log``.
        log: logarithmic.
        ticks: where the labels stand, and the labels.
    """

    title: str
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    log: bool = False

    def place(self, value: float) -> float:
        """Where a value stands, 0 at ``low`` and 1 at ``high``; what is outside is moved in."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Args:
        title: its name in the legend; empty for a line that another one's name covers.
        points: (x, y).
        style: CSS classes, which hold the colour and the stroke.
        dots: radius of a dot on every point; 0 for none.
        joined: draw the line between the points.
    """

    title: str
    points: Sequence[Point]
    style: str
    dots: float = 0.0
    joined: bool = True


def linear(title: str, values: Sequence[float], least: float | None = None) -> Axis:
    """A linear axis around values, with four to seven round ticks."""
    low, high = min(values), max(values)
    if least is not None:
        low = min(low, least)
    if high - low < 1e-12:
        low, high = low - 0.5, high + 0.5
    step = _round_step((high - low) / 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(0, -math.floor(math.log10(step)))
    ticks = [(index * step, f"{index * step:,.{digits}f}") for index in range(first, last + 1)]
    return Axis(title, first * step, last * step, tuple(ticks))


def decades(title: str, low: int, high: int) -> Axis:
    """A logarithmic axis from 10**low to 10**high."""
    stride = max(1, math.ceil((high - low) / 6))
    ticks = [(10.0**power, power_of_ten(power)) for power in range(low, high + 1, stride)]
    return Axis(title, 10.0**low, 10.0**high, tuple(ticks), log=True)


def draw(x: Axis, y: Axis, lines: Sequence[Line], summary: str) -> str:
    """The chart with its legend.

    Args:
        x: the axis across.
        y: the axis upwards.
        lines: drawn in order, the last on top; those without points are left out.
        summary: the chart in a sentence, for those who cannot see it.
    """
    drawn = [line for line in lines if line.points]
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(summary)}">',
        *[_x_tick(x, value, label) for value, label in x.ticks],
        *[_y_tick(y, value, label) for value, label in y.ticks],
        f'<text class="axis" x="{(_LEFT + WIDTH - _RIGHT) / 2}" y="{HEIGHT - 6}" '
        f'text-anchor="middle">{escape(x.title)}</text>',
        f'<text class="axis" transform="translate(13 {(_TOP + HEIGHT - _BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y.title)}</text>',
        *[_line(x, y, line) for line in drawn],
        "</svg>",
    ]
    names = [
        f'<li><i class="key {line.style}{"" if line.joined else " round"}"></i>'
        f"{escape(line.title)}</li>"
        for line in drawn
        if line.title
    ]
    return "\n".join(parts) + f'\n<ul class="legend">{"".join(names)}</ul>'


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def _across(x: Axis, value: float) -> float:
    return _LEFT + x.place(value) * (WIDTH - _LEFT - _RIGHT)


def _down(y: Axis, value: float) -> float:
    return HEIGHT - _BOTTOM - y.place(value) * (HEIGHT - _TOP - _BOTTOM)


def _x_tick(x: Axis, value: float, label: str) -> str:
    at = f"{_across(x, value):.1f}"
    return (
        f'<text class="tick" x="{at}" y="{HEIGHT - _BOTTOM + 17}" text-anchor="middle">'
        f"{escape(label)}</text>"
    )


def _y_tick(y: Axis, value: float, label: str) -> str:
    at = _down(y, value)
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">'
        f"{escape(label)}</text>"
    )


def _line(x: Axis, y: Axis, line: Line) -> str:
    places = [(_across(x, a), _down(y, b)) for a, b in line.points]
    shapes = []
    if line.joined:
        path = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        shapes.append(f'<polyline class="line {line.style}" points="{path}"/>')
    if line.dots:
        shapes += [
            f'<circle class="dot {line.style}" cx="{across:.1f}" cy="{down:.1f}" r="{line.dots}"/>'
            for across, down in places
        ]
    return "".join(shapes)
