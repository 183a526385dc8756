"""The subcommands, and ``plugin``: those of other packages, by their entry points."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tilewise.errors import TilewiseError

_GROUP = "tilewise.commands"


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
