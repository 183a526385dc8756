"""The lines of a record on disk, each with a checksum that covers the line before it too.

A line is a JSON object whose last field is ``check``: the CRC-32 of the line before, then of this
line without the field. So a number that was edited, and a line that was removed, doubled or moved,
are noticed. Lines of records that older versions wrote have no checksum: they come first, or are
all there are.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["DamagedLine", "mended", "sealed", "whole_lines"]

_CHECK = re.compile(rb',"check":"([0-9a-f]{8})"\}$')


class DamagedLine(ValueError):  # noqa: N818  reads as what is wrong
    """A line is not as it was written, or does not follow the line before it."""


def sealed(line: str, before: bytes) -> bytes:
    """Return a line of JSON, newline included, with its checksum.

    Args:
        line: an object with at least one field, newline included.
        before: the line before it in the file; empty for the first.
    """
    body = line.rstrip("\n").encode()
    return body[:-1] + b',"check":"%08x"}\n' % zlib.crc32(body, zlib.crc32(before))


def whole_lines(path: Path) -> Iterator[tuple[int, bytes, DamagedLine | None]]:
    """Yield number and text of every whole line, and what is wrong with it.

    A last line that does not end is left out: it was in flight when the writer died.
    """
    *whole, _torn = path.read_bytes().split(b"\n")
    before, seals = b"", False
    for number, line in enumerate(whole, 1):
        found = _CHECK.search(line)
        wrong = None
        if found:
            seals = True
            body = line[: found.start()] + b"}"
            if int(found[1], 16) != zlib.crc32(body, zlib.crc32(before)):
                wrong = DamagedLine("its checksum is of another line, or of another line before")
        elif seals:
            wrong = DamagedLine("it has no checksum, and a line before it has one")
        yield number, line, wrong
        before = line + b"\n"


def mended(path: Path) -> bytes:
    """Cut off a torn last line; return the last whole line, empty where there is none."""
    if not path.exists():
        return b""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        with path.open("r+b") as file:
            file.truncate(whole)
    return data[data.rfind(b"\n", 0, max(0, whole - 1)) + 1 : whole]
