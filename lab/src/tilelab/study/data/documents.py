"""The borders of a text's documents: files of a folder, articles of WikiText.

A text from a single file is one document. Borders are kept beside the tokens, in
``documents-KEY.json``; they are only made where they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Documents", "begins", "mean_piece", "read", "segments", "written"]

_AT_ONCE = 1 << 22  # tokens


@dataclass(frozen=True)
class Documents:
    """The documents of the two parts of a text.

    Args:
        train: the first token of each document, int64, ascending from 0.
        held_out: the same of the held-out text.
    """

    train: NDArray[np.int64]
    held_out: NDArray[np.int64]


def begins(
    sizes: Sequence[int], tokens: NDArray[Any], token_bytes: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the first token of each document.

    A token that reaches over a border belongs to the document that it begins in; a document in
    which no token begins is none.

    Args:
        sizes: bytes of each document, in order; their sum is the text's.
        tokens: of the text.
        token_bytes: bytes of text that each token of the vocabulary stands for.
    """
    borders = np.concatenate([[0], np.cumsum(np.asarray(sizes, np.int64))[:-1]])
    found = np.zeros(len(borders), np.int64)
    done = before = 0
    for at in range(0, len(tokens), _AT_ONCE):
        bytes_of = token_bytes[tokens[at : at + _AT_ONCE]]
        starts = before + np.cumsum(bytes_of) - bytes_of
        before += int(bytes_of.sum())
        count = int(np.searchsorted(borders, starts[-1], side="right"))
        found[done:count] = at + np.searchsorted(starts, borders[done:count])
        done = count
    return np.unique(found[:done])


def segments(
    starts: NDArray[np.int64], first: int, length: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the documents of tokens in a row, and whether the next token is of the same one.

    Args:
        starts: the first token of each document.
        first: the first of the tokens.
        length: how many tokens, without the one that follows the last.

    Returns:
        int64 [length], the number of each token's document; bool [length].
    """
    numbers = np.searchsorted(starts, np.arange(first, first + length + 1), side="right") - 1
    return numbers[:-1], numbers[:-1] == numbers[1:]


def mean_piece(starts: NDArray[np.int64], size: int, window: int, *, cut_at_starts: bool) -> float:
    """Return the mean length, over all tokens, of the document piece that a token is in.

    Args:
        starts: the first token of each document.
        size: tokens of the text.
        window: the longest piece.
        cut_at_starts: documents are cut into pieces from their own beginning; else all of the text
            is cut into windows, and these at the borders of documents.
    """
    cuts = [starts, np.array([size], np.int64)]
    if cut_at_starts:
        ends = np.append(starts[1:], size)
        cuts += [np.arange(a, b, window) for a, b in zip(starts, ends, strict=True)]
    else:
        cuts.append(np.arange(0, size, window))
    pieces = np.diff(np.unique(np.concatenate(cuts))).astype(np.float64)
    return float((pieces**2).sum() / pieces.sum())


def written(documents: Documents) -> str:
    """Return the text of a file with these borders."""
    return json.dumps({"train": documents.train.tolist(), "held_out": documents.held_out.tolist()})


def read(path: Path, train_tokens: int, held_out_tokens: int) -> Documents:
    """Return the borders in a file.

    Raises:
        ValueError, KeyError, OSError: they are not borders of a text of that many tokens.
    """
    said = json.loads(path.read_text(encoding="utf-8"))
    parts = [np.asarray(said[name], np.int64) for name in ("train", "held_out")]
    for part, size in zip(parts, (train_tokens, held_out_tokens), strict=True):
        inside = len(part) > 0 and part[0] == 0 and part[-1] < size
        if not inside or not (np.diff(part) > 0).all():
            raise ValueError("these are no borders of its documents")
    return Documents(*parts)
