"""The values that the page shows, and the page: one HTML file that loads nothing, and its twin.

The Markdown twin is written from the same values. None of them is escaped: the templates do that.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
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


_PACKAGE = "tilelab.study.report"
_UNSAFE = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_JOINT = re.compile(r"((?<=[a-z_])\.(?=[a-z_])|(?<=\w)\+(?=\w))")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def html(page: Mapping[str, Any]) -> str:
    """Return the page; every text that comes from outside is escaped by the template engine."""
    environment = _environment(escaped=True)
    style = style_sheet()
    return environment.get_template("report.html").render(page=page, style=Markup(style))


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
    # StrictUndefined: a name that a template gets wrong is an error, not a hole in the page.
    undefined: type[Undefined] = StrictUndefined
    environment = Environment(
        loader=PackageLoader(_PACKAGE, "templates"),
        autoescape=escaped,
        undefined=undefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown if escaped else None,
    )
    environment.filters["md"] = markdown_text
    environment.filters["fenced"] = fenced
    environment.filters["breakable"] = breakable
    return environment


def _shown(value: object) -> object:
    """Return markup and numbers as they are, and text without unprintable characters."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


DEFINITIONS = (
    Definition(
        "Effect",
        "The mean over seeds of an arm's final held-out metric less the baseline's with the same "
        "seed. Of a loss, below zero is better; of an accuracy or a correlation, above zero.",
        "verdicts",
    ),
    Definition(
        "Interval",
        "The t interval of that mean: what the effect would be with many more seeds, at the stated "
        "confidence and not adjusted for the number of arms.",
        "verdicts",
    ),
    Definition(
        "p (Holm)",
        "Of the paired t test that there is no effect, made larger by Holm's method for the number "
        "of arms that are judged together.",
        "verdicts",
    ),
    Definition(
        "Better, worse",
        "The Holm-adjusted test says that there is an effect, and it was not found too small to "
        "matter.",
        "verdicts",
    ),
    Definition(
        "No difference",
        "Two one-sided tests (Holm-adjusted) say that the effect is smaller than the smallest that "
        "matters, in either direction. This is found, not assumed.",
        "verdicts",
    ),
    Definition(
        "Undecided",
        "Neither was found with these seeds. The number of seeds that it still needs is for the "
        "wished power to see the smallest effect that matters.",
        "verdicts",
    ),
    Definition(
        "Diverged",
        "A loss, a gradient or a held-out loss was not finite. Such a run counts; it is never "
        "left out.",
        "stability",
    ),
    Definition(
        "Speed withheld",
        "An arm that only computes differently (a systems arm) shows its speed once its losses "
        "have been found equal to the baseline's; before that the comparison would mean nothing.",
        "what-is-withheld-and-what-is-warned-of",
    ),
    Definition(
        "tokens/s",
        "Tokens of optimizer steps over the time of these steps; evaluation and the first steps of "
        "a process are left out. Per CPU-second: over the CPU time of all threads.",
        "speed",
    ),
    Definition(
        "MFU",
        "Model operations per second over the measured peak of multiply-adds: 6 per "
        "multiplied weight and token, and c · layers · width · context for attention, where c = 12 "
        "counts every pair and c = 6 only those that a causal mask lets through. The speed is per "
        "second of wall time, the peak of a CPU per second of CPU time: waiting lowers it.",
        "speed",
    ),
    Definition(
        "Spikes",
        "The share of steps whose training loss lay more than seven robust standard deviations "
        "over that of the steps before.",
        "stability",
    ),
    Definition(
        "Attention logits, entropy",
        "Of a few held-out windows, from the attention kernel's own statistics: the largest score "
        "before the softmax, and the entropy of the weights of a query, in nats.",
        "stability",
    ),
    Definition(
        "Kernel flag",
        "In every run the kernel that each attention layer really ran is recorded. An arm whose "
        "kernels differ from the baseline's changed more than it says.",
        "attention-kernels",
    ),
)
