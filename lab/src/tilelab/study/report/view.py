"""The values that the page shows: the HTML page and its Markdown twin are written from them.

Nothing here is escaped: the templates do that.
"""

from __future__ import annotations

from typing import NamedTuple

from markupsafe import Markup

__all__ = [
    "NONE",
    "Band",
    "Cell",
    "Chart",
    "Definition",
    "Fact",
    "Forest",
    "Mark",
    "Table",
    "Writing",
]
__all__ += ["VerdictRow"]


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


class Writing(NamedTuple):
    """A text that models wrote."""

    arms: str  # that wrote it, in words
    prompt: str  # what they were given
    text: str  # how they went on


class Fact(NamedTuple):
    """A name and what it is."""

    name: str
    value: str


class Definition(NamedTuple):
    """The definition of a word."""

    name: str
    value: str
    anchor: str  # of the section of ``docs/metrics.md`` that has all of it


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
    interval: str
    band: Band | None  # None without an effect
    p: Cell  # Holm-adjusted
    seeds: str  # how many pairs, and what is missing
    speed: Cell  # against the baseline, as memory
    memory: Cell
    cost: Cell  # of all its runs
    reason: str
    flags: tuple[str, ...]  # warnings about kernels, as sentences
    alarm: bool
    notes: tuple[str, ...]
