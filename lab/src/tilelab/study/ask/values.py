"""Frozen values and what can be done with them: parse, change by dotted paths, hash.

A hash must not change because a later version has one more setting. A field that is declared with
``added`` is therefore left out of the hash while it has its default value, which means what was
done before the field existed. A field that is declared with ``unhashed`` changes no result and is
always left out. Both are written out in files like every other.
"""

from __future__ import annotations

import copy
import hashlib
import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tilelab.study.ask.registry import Kind, nearest, resolve
from tilewise.errors import InvalidArgument

_ADDED, _UNHASHED = {"added": True}, {"unhashed": True}


class Frozen(BaseModel):
    """A value: no field can be added, changed or given the wrong type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, allow_inf_nan=False)


def added(default: Any, **bounds: Any) -> Any:
    """Return a field that configs of earlier versions lack: they did what ``default`` says."""
    return Field(default, json_schema_extra=dict(_ADDED), **bounds)


def unhashed(default: Any) -> Any:
    """Return a field that changes no result; see the top of this file."""
    return Field(default, json_schema_extra=dict(_UNHASHED))


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

    Args:
        config: what to start from; it is not changed.
        changes: dotted path -> new value. Their order does not matter: a part is set before what is
            in it, and the name of a choice before its options.

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
    for name, field in type(config).model_fields.items():
        value = getattr(config, name)
        extra = field.json_schema_extra
        if extra == _UNHASHED or (extra == _ADDED and value == field.get_default()):
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
    """Return the steps of budgets that get tokens, and the tokens of those that get steps."""
    other = {"steps": "tokens", "tokens": "steps"}
    paths = [path.rpartition(".") for path, value in changes.items() if value is not None]
    return {
        f"{part}.{other[last]}": None
        for part, _, last in paths
        if last in other and part.rpartition(".")[2] == "budget"
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
