"""Renders a report: one HTML page that loads nothing, and its Markdown twin."""

from __future__ import annotations

import re

from jinja2 import Environment, PackageLoader, StrictUndefined, Undefined
from markupsafe import Markup, escape

from tilelab.common.svg import style_sheet
from tilelab.study.report.view import Page

__all__ = ["html", "markdown", "markdown_text"]

_PACKAGE = "tilelab.study.report"
_UNSAFE = re.compile(r"([\\`*_{}\[\]<>#|~$!&])")
_JOINT = re.compile(r"((?<=[a-z_])\.(?=[a-z_])|(?<=\w)\+(?=\w))")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def html(page: Page) -> str:
    """Return the page; every text that comes from outside is escaped by the template engine."""
    environment = _environment(escaped=True)
    style = style_sheet()
    return environment.get_template("report.html").render(page=page, style=Markup(style))


def markdown(page: Page) -> str:
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
