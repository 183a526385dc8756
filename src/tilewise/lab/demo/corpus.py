"""The text that the demo trains on: bytes, from a file or from Python's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.lab.study.data import corpus as library

SIZE_CAP = 16 * 1024 * 1024
HELD_OUT_FRACTION = 0.05


class Corpus(NamedTuple):
    """A text and where it came from.

    Args:
        name: the source in words.
        data: the bytes.
        sha256: of ``data``, in hexadecimal.
        files: how many files went in.
    """

    name: str
    data: bytes
    sha256: str
    files: int


def load(text: Path | None, needed: int) -> Corpus:
    """The corpus of a run.

    Args:
        text: a file, read as bytes up to ``SIZE_CAP``; None for the standard library.
        needed: the fewest bytes that do.

    Raises:
        InvalidArgument: no such file, a folder, unreadable, or fewer bytes than needed.
    """
    corpus = standard_library() if text is None else _from_file(text)
    if len(corpus.data) < needed:
        fix = "Give a longer file, or a smaller --context."
        came = f"{len(corpus.data):,} bytes ({corpus.name})"
        raise InvalidArgument("--text", came, f"at least {needed:,} bytes for this context", fix)
    return corpus


def standard_library(folder: Path | None = None) -> Corpus:
    """The ``*.py`` of the Python that runs this, sorted by path, up to ``SIZE_CAP`` bytes."""
    pieces = library.standard_library(SIZE_CAP, folder)
    name = f"the standard library of Python {sysconfig.get_python_version()}"
    return _corpus(name, b"".join(piece.data for piece in pieces), len(pieces))


def _from_file(path: Path) -> Corpus:
    if path.is_dir():
        raise InvalidArgument("--text", f"the folder {path}", "one file of text")
    try:
        with path.open("rb") as file:
            data = file.read(SIZE_CAP)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InvalidArgument("--text", f"{path} ({reason})", "a file that can be read") from None
    if not data:
        raise InvalidArgument("--text", f"{path}, which is empty", "a file with text in it")
    return _corpus(path.name, data, 1)


def _corpus(name: str, data: bytes, files: int) -> Corpus:
    return Corpus(name, data, hashlib.sha256(data).hexdigest(), files)


def bytes_needed(context: int) -> int:
    """The fewest bytes for a window in both the training text and the held-out text."""
    return int((context + 2) / HELD_OUT_FRACTION) + 1


class Windows:
    """Draws training windows: the same ones in the same order for the same seed.

    Args:
        data: the whole text; its last ``HELD_OUT_FRACTION`` is never drawn by ``draw``.
        context: bytes in one window.
        seed: of the order.
    """

    def __init__(self, data: bytes, context: int, seed: int) -> None:
        text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        border = len(text) - int(len(text) * HELD_OUT_FRACTION)
        self.training, self.held_out = text[:border], text[border:]
        self.context = context
        self._order = torch.Generator().manual_seed(seed)

    def draw(self, batch: int) -> tuple[Tensor, Tensor]:
        """The next batch: inputs, and targets (moved on by one), int64 [batch, context] each."""
        last = len(self.training) - self.context - 1
        starts = torch.randint(last + 1, (batch,), generator=self._order).tolist()
        return _pairs(self.training, starts, self.context)

    def evaluation(self, count: int) -> tuple[Tensor, Tensor]:
        """Evenly spread windows of the held-out text, int64 [count, context] each."""
        last = len(self.held_out) - self.context - 1
        starts = [last * index // max(count - 1, 1) for index in range(count)]
        return _pairs(self.held_out, starts, self.context)


def _pairs(text: Tensor, starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]
