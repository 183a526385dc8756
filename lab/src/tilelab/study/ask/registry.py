"""The registry of choices: a choice is one function with a name; its keywords are its options.

Adding one is writing one function::

    @register("schedule")
    def cosine(progress: Progress, *, warmup: Share = 0.05, floor: Share = 0.1) -> float:
        ...

Its keyword-only parameters, with their types and defaults, are what a config may set and what a
report shows; nothing else has to be touched. A type may carry pydantic's bounds.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from tilewise.errors import InvalidArgument

Kind = Literal["optimizer", "schedule", "variant", "task"]
Value = bool | int | float | str | tuple[float, ...]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
F = TypeVar("F", bound=Callable[..., Any])


class Entry(NamedTuple):
    """A registered choice."""

    kind: Kind
    name: str  # the function's, with dashes
    function: Callable[..., Any]
    options: type[BaseModel]  # with their types, bounds and standard values
    summary: str  # the first line of its docstring
    check: Callable[..., None] | None  # raises where options do not fit together

    @property
    def defaults(self) -> dict[str, Value]:
        """Every option and its standard value."""
        return {key: field.default for key, field in self.options.model_fields.items()}


# A whole number may stand for a float, and nothing else for anything else. A standard value obeys
# its own bounds.
_STRICT = ConfigDict(strict=True, allow_inf_nan=False, extra="forbid", validate_default=True)
_ENTRIES: dict[tuple[Kind, str], Entry] = {}
_MODULES: dict[Kind, str] = {}


def provide(kind: Kind, module: str) -> None:
    """Name the module that registers the choices of a kind; it is imported on demand."""
    _MODULES[kind] = module


def register(kind: Kind, check: Callable[..., None] | None = None) -> Callable[[F], F]:
    """Decorator that makes a function a choice of that kind, under its own name.

    ``check`` is called with all options by keyword when a config is made. It raises InvalidArgument
    where they do not fit together.
    """

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
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {key: (hints[key], value) for key, value in options.items()}
        model = create_model(function.__name__, __config__=_STRICT, **fields)
        entry = Entry(kind, name, function, model, summary, check)
        _options(entry, {})
        _ENTRIES[kind, name] = entry
        return function

    return add


def names(kind: Kind) -> tuple[str, ...]:
    """Return the names of all choices of a kind, in alphabetical order."""
    import_module(_MODULES[kind])
    return tuple(sorted(name for known, name in _ENTRIES if known == kind))


def find(kind: Kind, name: str) -> Entry:
    """Return the choice of that name; the error suggests the nearest."""
    import_module(_MODULES[kind])
    # Configs come from JSON: the name may be anything.
    found = _ENTRIES.get((kind, name)) if isinstance(name, str) else None
    if found is None:
        known = names(kind)
        required = f"one of {', '.join(known)}"
        suggestion = nearest(name, known) if isinstance(name, str) else ""
        raise InvalidArgument(f"{kind}.name", repr(name), required, suggestion)
    return found


def resolve(kind: Kind, name: str, options: Mapping[str, Any]) -> dict[str, Value]:
    """Return all options of a choice: what was given, and the standard value of the rest.

    Raises:
        InvalidArgument: no such choice, no such option, a value of another type or out of bounds,
            or options that do not fit together.
    """
    entry = find(kind, name)
    whole = _options(entry, options)
    if entry.check is not None:
        entry.check(**whole)
    return whole


def _options(entry: Entry, given: Mapping[str, Any]) -> dict[str, Value]:
    plain = {key: tuple(each) if isinstance(each, list) else each for key, each in given.items()}
    try:
        return dict(entry.options.model_validate(plain))
    except ValidationError as error:
        # An unknown option first: it may be a misspelled one.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    option, *place = first["loc"]
    path = f"{entry.kind}.{option}"
    if first["type"] == "extra_forbidden":
        known = entry.defaults
        required = f"one of {', '.join(known) or 'none: it has no options'}"
        raise InvalidArgument(path, "an unknown option", required, nearest(str(option), known))
    at = "".join(f"[{each}]" for each in place)
    required = first["msg"].removeprefix("Input should be ")
    raise InvalidArgument(path + at, repr(first["input"]), required)


def nearest(word: str, known: Any) -> str:
    """Return a sentence that suggests the nearest known word, or ``""`` where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""
