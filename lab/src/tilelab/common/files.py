"""Files that are there whole or not at all, and records of runs: each is one such file of JSON.

A record has what was found, while a run goes on and afterwards. ``Finding`` and ``Record`` are
bases of dataclasses. Everything here needs the standard library alone.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, ClassVar, Self

from tilewise.errors import InvalidArgument, TilewiseError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def first_of(folder: Path, *names: str) -> Path | None:
    """Return the first of these files that is there, each by its name or with ``.gz`` behind it."""
    candidates = [folder / (name + end) for name in names for end in ("", ".gz")]
    return next((path for path in candidates if path.is_file()), None)


def unpacked(path: Path) -> bytes:
    """Return the bytes of a file, unpacked where its name ends in ``.gz``."""
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


class DiskFullError(TilewiseError):
    """There was no room for a file; what was there before is still there."""


@contextmanager
def telling_full_disk(path: Path | None = None) -> Iterator[None]:
    """Within the block a full disk is a ``DiskFullError``, which says what to do.

    It names ``path`` as what there is no room for; None for what the system names.

    Raises:
        DiskFullError: there is no room.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        message = (
            f"no room to write {path or error.filename or 'the record'} ({error.strerror}): free "
            "some space and run the same command again; nothing that was written before is lost"
        )
        raise DiskFullError(message) from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, whose folder exists; it takes its place when all ends well.

    A crash, an error or a full disk leaves the older file as it was.

    Raises:
        DiskFullError: there is no room.
    """
    with telling_full_disk(path):
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's is for the owner alone
            os.replace(temporary, path)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file that readers see whole, the old one or the new one.

    Raises:
        DiskFullError: there is no room.
    """
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


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
