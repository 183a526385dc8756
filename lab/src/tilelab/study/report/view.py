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
    """One cell of a table.

    Args:
        text: what it says.
        note: smaller, below it.
        tone: ``"best"``, ``"soft"``, ``"bad"``, ``"changed"`` or nothing.
    """

    text: str
    note: str = ""
    tone: str = ""


NONE = Cell("\N{EN DASH}", tone="soft")


class Table(NamedTuple):
    """A table in words.

    Args:
        title: what it shows.
        head: the columns' names, the first that of the rows.
        rows: as many cells as columns.
        notes: sentences below it.
        key: what it is about, in a word.
        text: whether its cells are words, to be read from the left.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    key: str = ""
    text: bool = False


class Chart(NamedTuple):
    """A figure.

    Args:
        title: what it shows.
        svg: the drawing, ready for the page.
        caption: how to read it.
        legend: names and the CSS variables of their colours; empty where the lines are labelled.
    """

    title: str
    svg: Markup
    caption: str
    legend: tuple[tuple[str, str], ...] = ()


class Writing(NamedTuple):
    """A text that models wrote.

    Args:
        arms: that wrote it, in words.
        prompt: what they were given.
        text: how they went on.
    """

    arms: str
    prompt: str
    text: str


class Fact(NamedTuple):
    """A name and what it is."""

    name: str
    value: str


class Definition(NamedTuple):
    """The definition of a word.

    Args:
        name: the word.
        value: a sentence or two.
        anchor: of the section of ``docs/metrics.md`` that has all of it.
    """

    name: str
    value: str
    anchor: str


class Mark(NamedTuple):
    """A verdict as people see it: never by colour alone.

    Args:
        label: the word.
        symbol: one character.
        css: the class that gives the colour.
    """

    label: str
    symbol: str
    css: str


class Band(NamedTuple):
    """The place of a drawn effect, in percent of the width.

    Args:
        point: the mean difference.
        low, high: the interval, cut off at the frame; None without one.
        cut_low, cut_high: whether it goes on beyond.
        seeds: the difference of every seed.
    """

    point: float
    low: float | None
    high: float | None
    cut_low: bool
    cut_high: bool
    seeds: tuple[float, ...]


class Forest(NamedTuple):
    """The common scale of the effects of an experiment.

    Args:
        zero: where no difference is, in percent of the width.
        matters_low, matters_high: the differences between them are too small to matter.
        ticks: place in percent, and label.
    """

    zero: float
    matters_low: float
    matters_high: float
    ticks: tuple[tuple[float, str], ...]


class VerdictRow(NamedTuple):
    """An arm in the verdict table.

    Args:
        arm, place: name, and place in the experiment: the colour.
        change: what it changes, in words.
        mark: the verdict.
        effect, interval: the mean paired difference and its interval.
        band: the same as a drawing; None without an effect.
        p: Holm-adjusted.
        seeds: how many pairs, and what is missing.
        speed, memory: against the baseline.
        cost: of all its runs.
        reason: the decision as a sentence.
        flags: warnings about kernels, as sentences; ``alarm`` where one was not expected.
        notes: further sentences.
    """

    arm: str
    place: int
    change: str
    mark: Mark
    effect: str
    interval: str
    band: Band | None
    p: Cell
    seeds: str
    speed: Cell
    memory: Cell
    cost: Cell
    reason: str
    flags: tuple[str, ...]
    alarm: bool
    notes: tuple[str, ...]
