"""Renders a report: one HTML page that loads nothing, and its Markdown twin."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from tilelab.common.svg import style_sheet
from tilelab.study.report.view import Definition

__all__ = ["DEFINITIONS", "html", "markdown", "markdown_text"]

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
