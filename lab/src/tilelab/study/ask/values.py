"""Frozen values and what can be done with them: parse, change by dotted paths, hash.

A hash must not change because a later version has one more setting. A field that is declared with
``added`` is therefore left out of the hash while it has its default value, which means what was
done before the field existed. One that is declared with ``changed`` says what was done before, and
is left out while it has that value. A field that is declared with ``unhashed`` changes no result
and is always left out. All are written out in files like every other.

A choice is one function with a name; its keywords are its options. Adding one is writing one
function::

    @register("schedule")
    def cosine(progress: Progress, *, warmup: Share = 0.05, floor: Share = 0.1) -> float:
        ...

Its keyword-only parameters, with their types and defaults, are what a config may set and what a
report shows; nothing else has to be touched. A type may carry pydantic's bounds, and ``ADDED`` for
an option that came later: it is hashed as a field that is declared with ``added``.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import inspect
import json
import reprlib
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from tilewise.errors import InvalidArgument

Kind = Literal["optimizer", "schedule", "variant", "task"]
Value = bool | int | float | str | tuple[float, ...]
Share = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
F = TypeVar("F", bound=Callable[..., Any])
_ADDED, _UNHASHED, _BEFORE = {"added": True}, {"unhashed": True}, "before"
ADDED = Field(json_schema_extra=dict(_ADDED))  # ``Annotated[Share, ADDED]``: see the top


class Entry(NamedTuple):
    """A registered choice."""

    kind: Kind
    name: str  # the function's, with dashes
    function: Callable[..., Any]
    options: type[BaseModel]  # with their types, bounds and standard values
    summary: str  # the first line of its docstring
    check: Callable[..., object] | None  # raises where options do not fit together

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


def register(kind: Kind, check: Callable[..., object] | None = None) -> Callable[[F], F]:
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
    if first["type"] in ("missing", "too_long"):  # of a tuple
        standard = entry.defaults[str(option)]
        assert isinstance(standard, tuple)
        required = f"{len(standard)} values, as in {standard}"
        raise InvalidArgument(path, repr(first["input"]), required)
    at = "".join(f"[{each}]" for each in place)
    required = first["msg"].removeprefix("Input should be ")
    raise InvalidArgument(path + at, repr(first["input"]), required)


def nearest(word: str, known: Any) -> str:
    """Return a sentence that suggests the nearest known word, or ``""`` where none is near."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


class Frozen(BaseModel):
    """A value: no field can be added, changed or given the wrong type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


def added(default: Any, **bounds: Any) -> Any:
    """Return a field that configs of earlier versions lack: they did what ``default`` says."""
    return Field(default, json_schema_extra=dict(_ADDED), **bounds)


def changed(default: Any, *, before: Any) -> Any:
    """Return a field that configs of earlier versions lack: they did what ``before`` says."""
    return Field(default, json_schema_extra={**_ADDED, _BEFORE: before})


def earlier(kind: type[Frozen]) -> dict[str, Any]:
    """Return the values of fields that configs of earlier versions lack, and that have changed."""
    return {
        name: each.json_schema_extra[_BEFORE]
        for name, each in kind.model_fields.items()
        if isinstance(each.json_schema_extra, dict) and _BEFORE in each.json_schema_extra
    }


def unhashed(default: Any) -> Any:
    """Return a field that changes no result; see the top of this file."""
    return Field(default, json_schema_extra=dict(_UNHASHED))


def in_json(argument: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return values in JSON's types; InvalidArgument where one has none there."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(argument, repr(values), f"values of JSON ({error})") from None
    return plain


class Choice(Frozen):
    """A registered choice and all its options, e.g. ``{"name": "adamw", "lr": 0.003, ...}``.

    A name alone stands for the choice with its standard values, and options that are not given get
    them too.
    """

    model_config = ConfigDict(frozen=True, extra="allow")
    kind: ClassVar[Kind]
    name: str

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        if isinstance(values, str):
            values = {"name": values}
        if not isinstance(values, Mapping):
            return values
        name = values.get("name", cls.model_fields["name"].default)
        options = {key: value for key, value in values.items() if key != "name"}
        return {"name": name, **resolve(cls.kind, name, options)}

    @property
    def options(self) -> dict[str, Any]:
        """The options by name, each with its value."""
        return dict(self.model_extra or {})


M = TypeVar("M", bound=Frozen)


def parse(kind: type[M], values: Mapping[str, Any]) -> M:
    """Return a value of that type from plain JSON values.

    Raises:
        InvalidArgument: an unknown key (the nearest is suggested), a wrong type or a wrong value.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise as_invalid_argument(error) from None


def as_invalid_argument(error: ValidationError) -> InvalidArgument:
    """Return the first complaint of pydantic about a frozen value, in the words of tilewise."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, InvalidArgument):
        return inner
    path = ".".join(map(str, first["loc"])) or error.title
    if first["type"] == "extra_forbidden":
        *parents, last = first["loc"]
        known = _keys(error.title, parents)
        return InvalidArgument(
            path, "an unknown key", f"one of {', '.join(known)}", nearest(str(last), known)
        )
    if first["type"] == "missing":
        return InvalidArgument(path, "nothing", "a value: it has no standard one")
    came = reprlib.repr(first["input"])
    required = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return InvalidArgument(path, came, required)


def change(config: M, changes: Mapping[str, Any]) -> M:
    """Return the config with the values at some dotted paths replaced.

    A path may name a single value (``optimizer.lr``) or a whole part (``optimizer``, then the value
    is a mapping). Setting the ``name`` of a choice keeps those options that the new one has too.
    Setting the steps of a budget clears its tokens, and the other way round.

    The order of ``changes`` does not matter: a part is set before what is in it, and the name of a
    choice before its options.

    Raises:
        InvalidArgument: an unknown path (the nearest is suggested), or a value that does not fit.
    """
    values = config.model_dump(mode="json")
    changes = copy.deepcopy({**_cleared(changes), **changes})  # parts of it go into the values
    for path in sorted(changes, key=_whole_first):
        _set(values, path, changes[path])
    return parse(type(config), values)


def overlap(path: str, other: str) -> bool:
    """Return whether two dotted paths name the same value, or one a part of what the other does."""
    return f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.")


def value_at(config: Frozen, path: str) -> Any:
    """Return the value at a dotted path in JSON's types; None where there is no such path."""
    at: Any = config.model_dump(mode="json")
    for part in path.split("."):
        if not isinstance(at, dict) or part not in at:
            return None
        at = at[part]
    return at


def config_hash(config: Frozen) -> str:
    """Twelve hexadecimal digits of the SHA-256 of the config's canonical JSON."""
    return hash_of(_canonical(config))


def hash_of(values: Mapping[str, Any]) -> str:
    """Hash values of JSON's types, such as a config as it was written."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _canonical(config: Frozen) -> dict[str, Any]:
    """Return the config in JSON's types, without the fields that are not hashed."""
    values = config.model_dump(mode="json")
    fields = dict(type(config).model_fields)
    if isinstance(config, Choice):
        fields |= find(config.kind, config.name).options.model_fields
    for name, field in fields.items():
        value, extra = getattr(config, name), field.json_schema_extra
        marks = extra if isinstance(extra, dict) else {}
        before = marks.get(_BEFORE, field.get_default())  # what configs did without the field
        if marks == _UNHASHED or ("added" in marks and value == before):
            del values[name]
        elif isinstance(value, Frozen):
            values[name] = _canonical(value)
        elif isinstance(value, tuple) and value and isinstance(value[0], Frozen):
            values[name] = [_canonical(each) for each in value]
    return values


_CHOICES: Mapping[str, Kind] = {kind: kind for kind in get_args(Kind)}


def _whole_first(path: str) -> tuple[int, bool, str]:
    """Sorts a part before what is in it, and the name of a choice before its options."""
    parts = path.split(".")
    return len(parts), parts[-1] != "name", path


def _cleared(changes: Mapping[str, Any]) -> dict[str, None]:
    """Return the fields of budgets that get another one."""
    fields = ("steps", "tokens", "epochs")
    paths = [path.rpartition(".") for path, value in changes.items() if value is not None]
    return {
        f"{part}.{other}": None
        for part, _, last in paths
        if last in fields and part.rpartition(".")[2] == "budget"
        for other in fields
        if other != last
    }


def _set(values: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    at: Any = values
    for depth, part in enumerate((*parents, last)):
        known = list(at) if isinstance(at, dict) else []
        # An option of a choice may be unknown here: its own check names the nearest.
        of_choice = isinstance(at, dict) and parents[-1:] and parents[-1] in _CHOICES
        if part not in known and not (of_choice and depth == len(parents)):
            where = ".".join((*parents, last)[:depth]) or "the config"
            required = f"a key of {where}: {', '.join(known) or 'none, it is a value'}"
            raise InvalidArgument(path, "an unknown key", required, nearest(part, known))
        if depth < len(parents):
            at = at[part]
    if parents[:1] == ["choice"]:  # of a script: they may be called like a choice of ours
        at[last] = value
        return
    if last == "name" and parents and parents[-1] in _CHOICES:
        known_options = resolve(_CHOICES[parents[-1]], value, {})
        kept = {key: each for key, each in at.items() if key in known_options}
        at.clear()
        at.update({"name": value, **kept})
        return
    at[last] = {"name": value} if last in _CHOICES and isinstance(value, str) else value


def _keys(kind: str, path: list[str | int]) -> list[str]:
    """Return the fields of the part that a path leads to in the type of that name."""
    at: Any = next(each for each in _kinds(Frozen) if each.__name__ == kind)
    for part in path:
        at = at.model_fields[part].annotation if isinstance(part, str) else get_args(at)[0]
        if type(None) in get_args(at):  # ``X | None``
            at = get_args(at)[0]
    return list(at.model_fields)


def _kinds(kind: type[Frozen]) -> Iterator[type[Frozen]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)
