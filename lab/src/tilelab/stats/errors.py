"""The error of a wrong argument, made where one is raised.

``tilewise.errors`` loads torch with its package, which takes seconds. So it is imported
when something is wrong, and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.errors import InvalidArgument


def invalid(argument: str, came: str, required: str, fix: str = "") -> InvalidArgument:
    """Return the ``tilewise.errors.InvalidArgument`` of these words."""
    from tilewise.errors import InvalidArgument

    return InvalidArgument(argument, came, required, fix)
