"""The values that the page shows, and the page: one HTML file that loads nothing, and its twin.

The Markdown twin is written from the same values. None of them is escaped: the templates do that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from tilelab.common.svg import style_sheet


class Cell(NamedTuple):
    """One cell of a table."""

    text: str
    note: str = ""  # smaller, below it
    tone: str = ""  # ``"best"``, ``"soft"``, ``"bad"``, ``"changed"`` or nothing


NONE = Cell("\N{EN DASH}", tone="soft")


class Table(NamedTuple):
    """A table in words."""

    title: str
    head: tuple[str, ...]  # the columns' names, the first that of the rows
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()  # sentences below it
    key: str = ""  # what it is about, in a word
    text: bool = False  # whether its cells are words, to be read from the left


class Chart(NamedTuple):
    """A figure."""

    title: str
    svg: Markup  # ready for the page
    caption: str  # how to read it
    legend: tuple[tuple[str, str], ...] = ()  # names and CSS variables; none: labelled lines


class Mark(NamedTuple):
    """A verdict as people see it: never by colour alone."""

    label: str
    symbol: str  # one character
    css: str  # the class that gives the colour


class Band(NamedTuple):
    """The place of a drawn effect, in percent of the width."""

    point: float  # the mean difference
    low: float | None  # of the interval, cut off at the frame
    high: float | None
    cut_low: bool  # whether it goes on beyond
    cut_high: bool
    seeds: tuple[float, ...]  # the difference of every seed


class Forest(NamedTuple):
    """The common scale of the effects of an experiment."""

    zero: float  # where no difference is, in percent of the width
    matters_low: float  # between these, differences are too small to matter
    matters_high: float
    ticks: tuple[tuple[float, str], ...]  # place in percent, and label


class VerdictRow(NamedTuple):
    """An arm in the verdict table."""

    arm: str
    place: int  # in the experiment: the colour
    change: str  # what it changes, in words
    mark: Mark
    effect: str  # the mean paired difference
    seeds: str  # how many pairs, and what is missing
    speed: Cell  # against the baseline, as memory
    memory: Cell
    cost: Cell  # of all its runs
    notes: tuple[str, ...]
    interval: str = ""
    band: Band | None = None  # None without an effect
    p: Cell = NONE  # Holm-adjusted
    reason: str = ""
    flags: tuple[str, ...] = ()  # warnings about kernels, as sentences
    alarm: bool = False


_PACKAGE = "tilelab.study.report"
_UNSAFE = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_JOINT = re.compile(r"((?<=[a-z_])\.(?=[a-z_])|(?<=\w)\+(?=\w))")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def html(page: Mapping[str, Any]) -> str:
    """Return the page; every text that comes from outside is escaped by the template engine."""
    template = _environment(escaped=True).get_template("report.html")
    return template.render(page=page, style=Markup(style_sheet()))


def markdown(page: Mapping[str, Any]) -> str:
    """Return the same content without figures."""
    text = _environment(escaped=False).get_template("report.md").render(page=page)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def markdown_text(text: object) -> str:
    """Return a text that Markdown shows as it is: on one line, nothing in it means anything."""
    return _UNSAFE.sub(r"\\\1", " ".join(printable(text).split()))


def printable(text: object) -> str:
    """Return a text without characters that are not seen or turn the direction of what follows."""
    return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", str(text))


def breakable(text: object) -> Markup:
    """Return a text for HTML that may wrap after a dot of a path or a plus of an arm."""
    return Markup(_JOINT.sub(r"\1<wbr>", str(escape(printable(text)))))


def fenced(text: object) -> str:
    """Return a Markdown code block; its fence is longer than any row of backticks in the text."""
    body = printable(text)
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{body}\n{fence}"


def _environment(*, escaped: bool) -> Environment:
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "templates"),
        autoescape=escaped,
        undefined=StrictUndefined,  # a wrong name is an error, not a hole in the page
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown if escaped else None,
    )
    environment.filters |= {"md": markdown_text, "fenced": fenced, "breakable": breakable}
    return environment


def _shown(value: object) -> object:
    """Return markup and numbers as they are, and text without unprintable characters."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value
