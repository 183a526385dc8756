"""Records of runs: what was found, while a run goes on and afterwards, in one JSON file.

``Finding`` and ``Record`` are bases of dataclasses. They need the standard library alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from tilelab.common.files import write_atomically
from tilewise.errors import InvalidArgument

NOT_FINISHED, COMPLETE, INTERRUPTED = "not finished", "complete", "stopped with Ctrl-C"


class Finding:
    """One finding: its fields, and properties that the file has too, for people."""

    derived: ClassVar[tuple[str, ...]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return JSON's types; a derived value that is None is left out."""
        this: Any = self
        derived = {name: getattr(self, name) for name in self.derived}
        return asdict(this) | {k: value for k, value in derived.items() if value is not None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the inverse of ``as_json``."""
        this: Any = cls
        return cls(**{each.name: values[each.name] for each in fields(this) if each.name in values})


class Record:
    """One run: its fields, and lists of findings."""

    FORMAT: ClassVar[int]
    KIND: ClassVar[str]  # what the file is, in words
    LISTS: ClassVar[Mapping[str, type[Finding]]]

    def add(self, finding: Finding) -> None:
        """Put a finding into the list of its type."""
        for name, kind in self.LISTS.items():
            if isinstance(finding, kind):
                getattr(self, name).append(finding)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, whose lists are those of the findings themselves."""
        this: Any = self
        values = {each.name: getattr(self, each.name) for each in fields(this)}
        return {"format": self.FORMAT, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the record that a file has."""
        this: Any = cls
        kept = {each.name: values[each.name] for each in fields(this)}
        for name, kind in cls.LISTS.items():
            kept[name] = [kind.from_json(each) for each in kept[name]]
        return cls(**kept)

    def write(self, path: Path) -> None:
        """Write the JSON whole or not at all, making its folder; each finding is on one line."""
        values = self.as_json()
        values |= {name: [each.as_json() for each in values[name]] for name in self.LISTS}
        lines = [f" {json.dumps(name)}: {_text(value)}" for name, value in _rounded(values).items()]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def read(cls, path: Path, argument: str = "--from") -> Self:
        """Return the record in the file that an argument of a command names.

        Raises:
            InvalidArgument: there is none, or it is not of this kind and format.
        """
        required = f"{cls.KIND}, format {cls.FORMAT}"
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument(argument, f"{path} ({error})", required) from None
        try:
            if values["format"] == cls.FORMAT:
                return cls.from_json(values)
        except (KeyError, TypeError):
            pass
        raise InvalidArgument(argument, f"{path} of another kind", required)


def _text(value: Any) -> str:
    if not (isinstance(value, list) and value and isinstance(value[0], dict)):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(each)}" for each in value) + "\n ]"


def _rounded(value: Any) -> Any:
    """Six digits, more than any clock here is worth; JSON knows no infinity and no NaN: null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
