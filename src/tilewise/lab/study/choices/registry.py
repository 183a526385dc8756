"""The registry of choices: a choice is one function with a name; its keywords are its options.

Adding one is writing one function::

    @register("schedule")
    def cosine(progress: Progress, *, warmup: float = 0.05, floor: float = 0.1) -> float:
        ...

Its keyword-only parameters, with their defaults, are what a config may set and what a report shows;
nothing else has to be touched.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeVar

from tilewise.errors import InvalidArgument

__all__ = ["Entry", "Kind", "Value", "find", "names", "nearest", "register", "resolve"]

Kind = Literal["optimizer", "schedule", "variant"]
Value = bool | int | float | str | tuple[float, ...]
F = TypeVar("F", bound=Callable[..., Any])


class Entry(NamedTuple):
    """A registered choice.

    Args:
        kind: what it is a choice of.
        name: the function's name, with dashes for underscores.
        function: what it does.
        defaults: every option and its standard value.
        summary: the first line of its docstring.
    """

    kind: Kind
    name: str
    function: Callable[..., Any]
    defaults: Mapping[str, Value]
    summary: str


_ENTRIES: dict[tuple[Kind, str], Entry] = {}
# Where the choices of a kind are; imported when one is first asked for.
_MODULES: dict[Kind, str] = {
    "optimizer": "tilewise.lab.study.choices.optimizers",
    "schedule": "tilewise.lab.study.choices.schedules",
    "variant": "tilewise.lab.study.choices.variants",
}


def register(kind: Kind) -> Callable[[F], F]:
    """Decorator that makes a function a choice of that kind, under its own name."""

    def add(function: F) -> F:
        options = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY
        }
        without = [name for name, value in options.items() if value is inspect.Parameter.empty]
        assert not without, f"{function.__name__}: give {', '.join(without)} a standard value"
        assert function.__doc__, f"{function.__name__}: say in a docstring what it does"
        name = function.__name__.replace("_", "-")
        summary = function.__doc__.strip().splitlines()[0]
        _ENTRIES[kind, name] = Entry(kind, name, function, MappingProxyType(options), summary)
        return function

    return add


def names(kind: Kind) -> tuple[str, ...]:
    """The names of all choices of a kind, in alphabetical order."""
    import_module(_MODULES[kind])
    return tuple(sorted(name for known, name in _ENTRIES if known == kind))


def find(kind: Kind, name: str) -> Entry:
    """The choice of that name.

    Raises:
        InvalidArgument: there is none; the message suggests the nearest.
    """
    import_module(_MODULES[kind])
    found = _ENTRIES.get((kind, name))
    if found is None:
        known = names(kind)
        required = f"one of {', '.join(known)}"
        raise InvalidArgument(f"{kind}.name", repr(name), required, nearest(name, known))
    return found


def resolve(kind: Kind, name: str, options: Mapping[str, Any]) -> dict[str, Value]:
    """All options of a choice: what was given, and the standard value of the rest.

    Raises:
        InvalidArgument: no such choice, no such option, or a value of another type.
    """
    entry = find(kind, name)
    for key, value in options.items():
        if key not in entry.defaults:
            required = f"one of {', '.join(entry.defaults) or 'none: it has no options'}"
            raise InvalidArgument(
                f"{kind}.{key}", repr(value), required, nearest(key, entry.defaults)
            )
    return {
        key: _as(f"{kind}.{key}", options.get(key, default), default)
        for key, default in entry.defaults.items()
    }


def _as(path: str, value: Any, default: Value) -> Value:
    """The value in the type of the standard one; a whole number may stand for a float."""
    if isinstance(default, tuple):
        if isinstance(value, (list, tuple)) and len(value) == len(default):
            return tuple(float(each) for each in value)
        raise InvalidArgument(path, repr(value), f"{len(default)} numbers")
    if (
        isinstance(default, float)
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ):
        return float(value)
    if type(value) is type(default):
        return value
    raise InvalidArgument(path, repr(value), f"a value of type {type(default).__name__}")


def nearest(word: str, known: Any) -> str:
    """A sentence that suggests the nearest known word, or ``""`` where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
