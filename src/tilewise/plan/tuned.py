"""Blocks that ``tilewise tune`` measured on a chip: a JSON file, read once per process.

A file counts whole or not at all. A file is refused with a warning if it is malformed, of another
chip or another Triton, or if its blocks cannot be taken. The table of the backend then applies.
"""

from __future__ import annotations

import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from tilewise.errors import TunedBlocksWarning
from tilewise.folders import cache_folder
from tilewise.plan.tuned_file import Blocks, Entry, Malformed, Place, Tuned, parse, text_of

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
    path.parent.mkdir(parents=True, exist_ok=True)
    file, draft = tempfile.mkstemp(prefix=".tuned-", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as opened:
            opened.write(text_of(tuned))
            opened.flush()
            os.fsync(opened.fileno())
        Path(draft).chmod(0o644)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


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
