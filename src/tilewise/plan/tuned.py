"""Blocks that ``tilewise tune`` measured on a chip: a JSON file, read once per process.

A file counts whole or not at all, and its form is strict, since blocks decide how sums are split. A
file is refused with a warning if it is malformed, of another chip or another Triton, or if its
blocks cannot be taken. The table of the backend then applies.
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Callable, Mapping
from datetime import date
from importlib import metadata
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch

from tilewise.errors import TunedBlocksWarning
from tilewise.folders import cache_folder, write_whole

__all__ = [
    "NOTHING",
    "STORE",
    "VARIABLE",
    "Blocks",
    "Entry",
    "Found",
    "Malformed",
    "Place",
    "Store",
    "Tuned",
    "file_name",
    "installed_triton",
    "path_for",
    "read",
    "refusal",
    "shown",
    "write",
]

_FORMAT = 1
_KIND = "measured blocks of tilewise"
_LEAST, _MOST = 16, 1024  # of a block's sides
_MOST_WARPS, _MOST_STAGES = 32, 8
_TOLERANCE = 1e-3  # numbers are written with six digits
_Value = TypeVar("_Value")


class Malformed(ValueError):  # noqa: N818  reads as what is wrong
    """A file is not as ``tilewise tune`` writes it; says where and why."""


class Blocks(NamedTuple):
    """Launch of a kernel: queries and keys of a block, warps, and stages of its pipeline."""

    queries: int
    keys: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.queries}x{self.keys}/{self.warps}/{self.stages}"


class Place(NamedTuple):
    """Everything that blocks may depend on, on a family of chips.

    Args:
        pass_name: "forward" and so on.
        dtype: of q, k and v.
        width: the class of the widths: the greatest that it holds.
        kind: of mask and score: "plain", or "+" and "*" as the table of the backend has them.
    """

    pass_name: str
    dtype: torch.dtype
    width: int
    kind: str


class Entry(NamedTuple):
    """Blocks that were faster than the table's.

    Args:
        place: for what.
        blocks: the measured ones.
        seconds: of one run, the median.
        spread: half the range of the middle half of the runs, as a share of the median.
        table_blocks, table_seconds, table_spread: the same of the table's blocks.
    """

    place: Place
    blocks: Blocks
    seconds: float
    spread: float
    table_blocks: Blocks
    table_seconds: float
    table_spread: float

    @property
    def ratio(self) -> float:
        """Return how many times faster than the table's."""
        return self.table_seconds / self.seconds


class Tuned(NamedTuple):
    """A file.

    Args:
        chip: that it was measured on, by its maker's name.
        family: whose machine code it runs.
        torch, triton: the versions.
        date: of the last entry, ISO 8601.
        entries: no two of one place.
    """

    chip: str
    family: str
    torch: str
    triton: str
    date: str
    entries: tuple[Entry, ...]


def text_of(tuned: Tuned) -> str:
    """Return the JSON of a file, with a line's end."""
    values = {"format": _FORMAT, "kind": _KIND} | tuned._asdict()
    values["entries"] = [_values_of(entry) for entry in tuned.entries]
    return json.dumps(values, indent=1) + "\n"


def _values_of(entry: Entry) -> dict[str, Any]:
    place = entry.place
    return {
        "pass": place.pass_name,
        "dtype": str(place.dtype).removeprefix("torch."),
        "width": place.width,
        "kind": place.kind,
        "blocks": str(entry.blocks),
        "seconds": _six_digits(entry.seconds),
        "spread": _six_digits(entry.spread),
        "table_blocks": str(entry.table_blocks),
        "table_seconds": _six_digits(entry.table_seconds),
        "table_spread": _six_digits(entry.table_spread),
        "ratio": _six_digits(entry.ratio),
    }


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


def parse(text: str) -> Tuned:
    """Return the file that a text is.

    Raises:
        Malformed: anything in it is not as ``text_of`` writes it.
    """
    try:
        values = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except Malformed:
        raise
    except ValueError as error:
        raise Malformed(f"it is no JSON ({error})") from None
    if not isinstance(values, dict):
        raise Malformed("it is no JSON object")
    form = values.get("format")
    if type(form) is not int or form != _FORMAT:
        raise Malformed(f"its format is {form!r}, this version reads {_FORMAT}")
    if values.get("kind") != _KIND:
        raise Malformed(f"its kind is {values.get('kind')!r}, not {_KIND!r}")
    _keys_are(values, {"format", "kind", *Tuned._fields}, "it")
    said = {name: _text(values, name, "it") for name in ("chip", "family", "torch", "triton")}
    entries = _typed(values, "entries", list, "it")
    return Tuned(
        **said,
        date=_date(values),
        entries=_no_place_twice(
            [_entry(each, f"entry {number}") for number, each in enumerate(entries)]
        ),
    )


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; a name that comes twice would hide its first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Malformed(f"a name comes twice among {sorted(name for name, _ in pairs)}")
    return found


def _no_number(name: str) -> float:
    raise Malformed(f"it has {name}, which is no number")


def _no_place_twice(entries: list[Entry]) -> tuple[Entry, ...]:
    places = [entry.place for entry in entries]
    for number, place in enumerate(places):
        if place in places[:number]:
            raise Malformed(f"entry {number} is of the same place as entry {places.index(place)}")
    return tuple(entries)


def _entry(values: object, where: str) -> Entry:
    if not isinstance(values, dict):
        raise Malformed(f"{where} is no object")
    numbers = ("seconds", "spread", "table_seconds", "table_spread", "ratio")
    texts = ("pass", "dtype", "kind", "blocks", "table_blocks")
    _keys_are(values, {*numbers, *texts, "width"}, where)
    place = Place(
        _text(values, "pass", where),
        _dtype(values, where),
        _typed(values, "width", int, where),
        _text(values, "kind", where),
    )
    seconds, spread, table_seconds, table_spread, ratio = (
        _number(values, name, where, least_allowed="spread" in name) for name in numbers
    )
    entry = Entry(
        place,
        _blocks(values, "blocks", where),
        seconds,
        spread,
        _blocks(values, "table_blocks", where),
        table_seconds,
        table_spread,
    )
    if abs(entry.ratio / ratio - 1) > _TOLERANCE:
        raise Malformed(f"{where}: ratio {ratio} is not that of its seconds, {entry.ratio:.6g}")
    return entry


def _keys_are(values: Mapping[str, Any], names: set[str], where: str) -> None:
    if missing := sorted(names - values.keys()):
        raise Malformed(f"{where} has no {', '.join(missing)}")
    if unknown := sorted(values.keys() - names):
        raise Malformed(f"{where} has {', '.join(unknown)}, which nobody knows")


def _typed(values: Mapping[str, Any], name: str, kind: type[_Value], where: str) -> _Value:
    value = values[name]
    if type(value) is not kind:  # True is an int to isinstance
        raise Malformed(f"{where}: {name} is {value!r}, not of type {kind.__name__}")
    found: _Value = value
    return found


def _text(values: Mapping[str, Any], name: str, where: str) -> str:
    text = _typed(values, name, str, where)
    if not text:
        raise Malformed(f"{where}: {name} is empty")
    return text


def _number(values: Mapping[str, Any], name: str, where: str, *, least_allowed: bool) -> float:
    """A finite number above 0; 0 itself too where it is allowed."""
    value = values[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Malformed(f"{where}: {name} is {value!r}, no finite number")
    if value < 0 or (value == 0 and not least_allowed):
        raise Malformed(f"{where}: {name} is {value!r}, too little")
    return float(value)


def _date(values: Mapping[str, Any]) -> str:
    text = _text(values, "date", "it")
    try:
        return date.fromisoformat(text).isoformat()
    except ValueError:
        raise Malformed(f"it: date is {text!r}, not like 2026-11-20") from None


def _dtype(values: Mapping[str, Any], where: str) -> torch.dtype:
    name = _text(values, "dtype", where)
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise Malformed(f"{where}: dtype is {name!r}, no floating dtype of torch")
    return found


def _blocks(values: Mapping[str, Any], name: str, where: str) -> Blocks:
    text = _text(values, name, where)
    numbers = re.fullmatch(r"(\d{1,4})x(\d{1,4})/(\d{1,2})/(\d)", text, re.ASCII)
    if numbers is None:
        raise Malformed(f"{where}: {name} is {text!r}, not like 128x64/8/2")
    blocks = Blocks(*(int(number) for number in numbers.groups()))
    for side in blocks[:2]:
        if side & (side - 1) or not _LEAST <= side <= _MOST:
            said = f"a side of {side}, not a power of two from {_LEAST} to {_MOST}"
            raise Malformed(f"{where}: {name} {text} have {said}")
    if blocks.warps & (blocks.warps - 1) or not 1 <= blocks.warps <= _MOST_WARPS:
        said = f"{blocks.warps} warps, not a power of two from 1 to {_MOST_WARPS}"
        raise Malformed(f"{where}: {name} {text} have {said}")
    if not 1 <= blocks.stages <= _MOST_STAGES:
        raise Malformed(f"{where}: {name} {text} have {blocks.stages} stages, not 1 to 8")
    return blocks


VARIABLE = "TILEWISE_TUNED"
_OFF = "off"
# Of the packages that bring the module triton; torch for AMD has its own.
_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm")

# Why an entry cannot be taken on a family of chips; "" if it can.
Check: TypeAlias = Callable[[str, Entry], str]


class Found(NamedTuple):
    """Measured blocks found for a chip.

    Args:
        entries: measured blocks by place; none where there is no file or it is refused.
        date: when they were measured.
        path: the file; None where there is none.
        refusal: why it is not used; "" if it is.
    """

    entries: Mapping[Place, Entry]
    date: str = ""
    path: Path | None = None
    refusal: str = ""


NOTHING = Found(MappingProxyType({}))


class Store:
    """Files of measured blocks, each looked for once: what was found stands for the process."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Found] = {}
        self._lock = Lock()

    def find(self, chip: str, family: str, check: Check) -> Found:
        """Return the measured blocks of a chip; ``NOTHING`` where none are there or wanted.

        Args:
            chip: its maker's name.
            family: the chips whose machine code it runs.
            check: says of an entry why it cannot be taken.
        """
        key = chip, family
        found = self._found.get(key)
        if found is not None:
            return found
        with self._lock:
            found = self._found.get(key)
            if found is not None:
                return found
            found = self._found[key] = _look(chip, family, check)
        if found.refusal:
            warnings.warn(
                f"the measured blocks in {found.path} are not used: {found.refusal}. The blocks of "
                f"the table are. `tilewise tune` measures anew; {VARIABLE}={_OFF} ignores the file",
                TunedBlocksWarning,
                stacklevel=3,
            )
        return found


STORE = Store()


def path_for(chip: str) -> Path | None:
    """Return where the file of a chip is looked for; None where measured blocks are not wanted.

    ``$TILEWISE_TUNED`` names the file, a folder of such files, or says "off"; else it is in
    ``tuned`` of the user's cache folder.
    """
    named = os.environ.get(VARIABLE, "")
    if named.lower() == _OFF:
        return None
    if not named:
        return cache_folder() / "tuned" / file_name(chip)
    path = Path(named).expanduser()
    return path / file_name(chip) if path.is_dir() else path


def file_name(chip: str) -> str:
    """Return a chip's file name: "nvidia-h200.json" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", chip.lower()).strip("-") + ".json"


def installed_triton() -> str:
    """Return the version of Triton, which is not imported for it; "" where none is known."""
    for package in _PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return ""


def read(path: Path) -> Tuned:
    """Read a tuned file, whichever chip it is for.

    Raises:
        OSError: it cannot be read.
        Malformed: it is no such file.
    """
    try:
        return parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise Malformed("it is no text") from None


def write(path: Path, tuned: Tuned) -> None:
    """Write a file in one step: whoever reads meanwhile sees the one before.

    Raises:
        OSError: it cannot be written.
    """
    write_whole(path, text_of(tuned))


def shown(path: Path) -> str:
    """Return a path as people write it: from "~" where it is below the home folder."""
    try:
        return str("~" / path.absolute().relative_to(Path.home()))
    except (RuntimeError, ValueError):
        return str(path)


def _look(chip: str, family: str, check: Check) -> Found:
    """Return the entries of a chip's file, or why there are none."""
    try:
        path = path_for(chip)
    except RuntimeError:  # the user has no home folder, and so no file in it
        return NOTHING
    if path is None:
        return NOTHING
    try:
        tuned = read(path)
    except FileNotFoundError:
        named = os.environ.get(VARIABLE)
        if named and path == Path(named).expanduser():
            return NOTHING._replace(path=path, refusal=f"{VARIABLE} names it and it is not there")
        return NOTHING
    except OSError as error:
        why = f"it cannot be read ({error.strerror or error})"
        return NOTHING._replace(path=path, refusal=why)
    except Malformed as error:
        return NOTHING._replace(path=path, refusal=str(error))
    if why := refusal(tuned, chip, family, check):
        return NOTHING._replace(path=path, refusal=why)
    entries = MappingProxyType({entry.place: entry for entry in tuned.entries})
    return Found(entries, tuned.date, path)


def refusal(tuned: Tuned, chip: str, family: str, check: Check) -> str:
    """Return why a file is not used on a chip; "" if it is.

    Args:
        tuned: what it says.
        chip: the maker's name of this one.
        family: its own.
        check: says of an entry why it cannot be taken.
    """
    if (tuned.chip, tuned.family) != (chip, family):
        return f"it is of {tuned.chip} ({tuned.family}), this is {chip} ({family})"
    triton = installed_triton()
    if not triton:
        return f"it is of Triton {tuned.triton}, and which is here is not known"
    if _minor(tuned.triton) != _minor(triton):
        return f"it is of Triton {tuned.triton}, here is {triton}"
    for number, entry in enumerate(tuned.entries):
        if reason := check(family, entry):
            return f"entry {number}: {reason}"
    return ""


def _minor(version: str) -> list[str]:
    """Return the parts of a version that decide the generated code: 3 and 6 of "3.6.0+git"."""
    return re.split(r"[.+]", version)[:2]
