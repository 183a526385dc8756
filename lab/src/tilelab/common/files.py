"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tilewise.errors import TilewiseError

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

    Args:
        path: what there is no room for; None for what the system names.

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
    """A temporary file beside ``path`` that takes its place when the block ends well.

    A crash, an error or a full disk leaves the older file as it was.

    Args:
        path: of the file to replace or to make; its folder exists.

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
