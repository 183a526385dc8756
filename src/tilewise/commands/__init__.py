"""The subcommands; those of other packages, by their entry points; and what all print."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tilewise.errors import TilewiseError

_GROUP = "tilewise.commands"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but the tab and the end of a line


def plugin(name: str) -> Callable[..., Any]:
    """Return the function that an installed package offers under a name.

    Raises:
        TilewiseError: no package offers it, or a package that it needs is missing.
    """
    found = entry_points(group=_GROUP, name=name)
    cure = "install it with: pip install 'tilewise[lab]'"
    if not found:
        raise TilewiseError(f"{name} is part of the package tilelab, which is missing; {cure}")
    try:
        function: Callable[..., Any] = next(iter(found)).load()
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(("tilewise", "tilelab.")):
            raise
        raise TilewiseError(f"the package {error.name!r} is missing; {cure}") from error
    return function


def visible(text: str) -> str:
    r"""Replace every control character by its code, the escape character by ``\x1b``.

    A terminal would obey those in text from files.
    """
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
