"""A page of HTML that loads nothing, from a template in a package."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tilelab.common.svg import style_sheet


def page_of(package: str, **values: Any) -> str:
    """Return the page; every text that comes from outside is escaped by the template engine.

    Args:
        package: whose folder ``templates`` has ``page.html``.
        values: names in the template; ``style`` is the style sheet.
    """
    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(style=Markup(style_sheet()), **values)
