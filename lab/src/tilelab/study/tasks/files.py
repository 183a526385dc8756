"""Files of data sets: where they are, and their lines, packed by gzip or not."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

from tilelab.study.data.corpus import data_folder
from tilewise.errors import InvalidArgument, Unsupported

__all__ = ["HUB", "ended", "folder_of", "lines", "objects", "table", "unpacked_bytes"]

_SIZE_BYTES = 4  # of the field ISIZE that a file of gzip ends with (RFC 1952, section 2.3.1)


def folder_of(source: str, name: str, inside: str) -> Path:
    """Return the folder of ``data.source``: a path, or ``inside`` the data folder for the ``name``.

    Raises:
        InvalidArgument: its name, where no ``TILEWISE_DATA`` says where it is.
    """
    if source != name:
        return Path(source).expanduser()
    named = data_folder()
    if named is None:
        fix = f"Name the folder that has {inside}, or set data.source to its path."
        raise InvalidArgument("data.source", f"{name!r} and no TILEWISE_DATA", "both", fix)
    return named / inside


def ended(path: Path) -> Path | None:
    """Return the file of that name, or with ``.gz`` behind it; None where neither is there."""
    candidates = (path, path.with_name(f"{path.name}.gz"))
    return next((each for each in candidates if each.is_file()), None)


def unpacked_bytes(path: Path) -> int:
    """Size of a file, unpacked; of one that gzip packed as it says itself, modulo 4 GiB.

    Raises:
        OSError: it cannot be read.
    """
    size = path.stat().st_size
    if path.suffix != ".gz" or size < _SIZE_BYTES:
        return size
    with path.open("rb") as file:
        file.seek(-_SIZE_BYTES, os.SEEK_END)
        return max(size, int.from_bytes(file.read(), "little"))


def lines(path: Path) -> list[str]:
    """Return the lines of a file in UTF-8: only a newline ends one, whatever else is in the text.

    Raises:
        InvalidArgument: it cannot be read or unpacked, or is not UTF-8.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        came = f"{path} ({' '.join(str(error).split())[:200]})"
        required = "a file of text in UTF-8, whole, packed by gzip if its name ends in .gz"
        fix = "It is damaged or something else: get it again."
        raise InvalidArgument("data.source", came, required, fix) from None
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of JSON lines.

    Raises:
        InvalidArgument: a line that is none.
    """
    found = []
    for number, line in enumerate(lines(path), 1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            came = f"{path}, line {number}: {line[:40]!r}"
            raise InvalidArgument("data.source", came, "an object in JSON on every line")
        found.append(value)
    return found


HUB = "hub:"  # of a ``data.source``


def table(source: str, configuration: str | None, split: str | None, files: str) -> Any:
    """A split of a data set (None: all), by a name of the Hub or the path of a folder laid out so.

    ``files`` says in words what ``data.source`` may be instead.

    Raises:
        InvalidArgument: it is not there.
        Unsupported: the package datasets is not.
    """
    try:
        import datasets
    except ImportError:
        fix = f"pip install 'tilewise[hub]', or set data.source to {files}"
        raise Unsupported("a data set of the Hub without the package datasets", fix=fix) from None
    try:
        return datasets.load_dataset(source.removeprefix(HUB), configuration, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        came = f"{source} ({' '.join(str(error).split())[:200]})"
        of = "" if configuration is None else f"the configuration {configuration} and "
        of += "a split" if split is None else f"the split {split}"
        raise InvalidArgument("data.source", came, f"a data set with {of}") from None
