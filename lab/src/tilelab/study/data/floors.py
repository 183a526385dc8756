"""Floors: what count tables and compressors score on the held-out text, in bits per byte.

A model that does not beat them has learnt no more than counts. All of them score all of the
held-out text, whatever windows of it the models are evaluated on.

Count tables of order k predict a symbol (a byte, or a token of the run) from the k before it,
interpolated by Witten and Bell's rule:

    p_k(x | h) = (c(h, x) + T(h) p_(k-1)(x | h')) / (n(h) + T(h))

c(h, x) counts the symbol x after the context h of k symbols, n(h) is the sum of c(h, x) over x, and
T(h) is the number of different x with c(h, x) > 0. h' is h without its oldest symbol. A context
that was never seen takes p_(k-1). p_(-1) is 1 / V for V symbols. The first symbols of the held-out
text have shorter contexts.

Sources: Witten and Bell, The Zero-Frequency Problem, IEEE Transactions on Information Theory 37,
1991; the interpolated form: Chen and Goodman, An Empirical Study of Smoothing Techniques for
Language Modeling, 1998, section 2.4.

``gzip -9`` and ``xz -9e`` compress the held-out text alone. ``xz`` after a text is the size of both
together less that of the text alone, with a dictionary that holds all of it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilelab.common.files import write_atomically
from tilelab.study.ask.metrics import BYTE_TABLE, TOKEN_TABLE, Floor
from tilelab.study.data.tokens import Tokens, reading

FORMAT = 1
BYTE_ORDERS, TOKEN_ORDERS = 4, 2
# A longer text is not compressed, and not counted beyond what a run saw: minutes, and gigabytes.
MOST_BYTES = 64 * 1024 * 1024
_AT_ONCE = 1 << 23  # symbols that are counted together: bounds memory, not the result

Symbols = NDArray[Any]  # [n] of any whole type
Pieces = NDArray[np.int64]  # int64 [P, 2]: first place and one beyond the last, as ``RunRows.seen``


class Table(NamedTuple):
    """The counts of one order."""

    keys: NDArray[np.int64]  # int64 [U], ascending: context and symbol in one number
    counts: NDArray[np.int64]  # int64 [U]: c(h, x)
    contexts: NDArray[np.int64]  # int64 [H], ascending
    totals: NDArray[np.int64]  # int64 [H]: n(h)
    types: NDArray[np.int64]  # int64 [H]: T(h)


def count(text: Symbols, pieces: Pieces, most: int, vocabulary: int) -> list[Table]:
    """Count the symbols of a text after their contexts of 0 to ``most`` symbols.

    A context does not reach beyond its piece of the text. ``(most + 1) * log2(vocabulary)`` is at
    most 63 bits.
    """
    bits = _bits(vocabulary)
    assert (most + 1) * bits <= 63, "a context and its symbol do not fit into an int64"
    parts = [text[first:end] for first, end in pieces.tolist()]
    chosen = parts[0] if len(parts) == 1 else np.concatenate(parts)
    lengths = pieces[:, 1] - pieces[:, 0]
    depth = None if len(parts) == 1 else _depths(lengths, most)
    return [_table(chosen, depth, order, bits) for order in range(most + 1)]


def bits_of(tables: Sequence[Table], text: Symbols, vocabulary: int) -> list[float]:
    """Return the bits of a text, ``-log2`` of its probability, by the tables of orders 0, 1, ..."""
    shift, symbols = _bits(vocabulary), text.astype(np.int64)
    before = np.full(len(symbols), 1.0 / vocabulary)
    found = []
    for order, table in enumerate(tables):
        keys = _keys(symbols, order, shift)
        at, known = _find(table.contexts, keys >> shift)
        total, types = (np.where(known, each[at], 0) for each in (table.totals, table.types))
        at, met = _find(table.keys, keys)
        times = np.where(met, table.counts[at], 0)
        shorter = before[order:]
        mixed = (times + types * shorter) / np.maximum(total + types, 1)
        before[order:] = np.where(known, mixed, shorter)
        found.append(float(-np.log2(before).sum()))
    return found


def xz_bytes(text: bytes) -> int:
    """Return the size of a text that ``xz -9e`` has compressed, with a dictionary that holds it."""
    size = max(1 << 16, 1 << (len(text) - 1).bit_length()) if text else 1 << 16
    preset = 9 | lzma.PRESET_EXTREME
    filters = [{"id": lzma.FILTER_LZMA2, "preset": preset, "dict_size": size}]
    return len(lzma.compress(text, format=lzma.FORMAT_XZ, filters=filters))


def floors(tokens: Tokens, seen: Pieces, cache: Path) -> tuple[Floor, ...]:
    """Return the floors of a text and of a run that saw these pieces of it.

    They are computed once and kept in ``floors-KEY.json`` in the folder of token caches. The key is
    of the text, the tokenizer and the pieces.

    Raises:
        CorruptCacheError: that file is damaged; the message says what to delete.
        InvalidArgument: the text of the tokens is not there any more.
    """
    digest = hashlib.sha256(f"{FORMAT} {tokens.sha256} {tokens.tokenizer}\n".encode())
    digest.update(np.ascontiguousarray(tokens.token_bytes).data)
    path = cache / f"floors-{digest.hexdigest()[:16]}.json"
    whole = np.array([[0, len(tokens.train)]], np.int64)
    texts: list[tuple[bytes, bytes]] = []

    def text() -> tuple[bytes, bytes]:
        if not texts:
            texts.append(tokens.text())
        return texts[0]

    def kept(name: str, make: Callable[[], list[Floor]]) -> list[Floor]:
        found = _read(path)
        if name not in found:
            made = make()
            found = {**_read(path), name: made}  # another study may have added to it
            write_atomically(path, json.dumps(found, indent=1, default=astuple) + "\n")
        return found[name]

    def after(pieces: Pieces, which: Literal["seen", "all"]) -> list[Floor]:
        # What is kept does not depend on whether a run happened to see all.
        name = hashlib.sha256(np.ascontiguousarray(pieces, np.int64).data).hexdigest()[:16]
        made = kept(name, lambda: _after(tokens, text(), pieces))
        return [replace(each, text=which) for each in made]

    found = [*kept("alone", lambda: _alone(text()[1])), *after(seen, "seen")]
    if tokens.train_bytes <= MOST_BYTES:
        found += after(whole, "all")
    return tuple(found)


def _alone(held_out: bytes) -> list[Floor]:
    packed = len(gzip.compress(held_out, 9, mtime=0))
    sizes = {"gzip -9": packed, "xz -9e": xz_bytes(held_out)}
    return [Floor(name, "none", 0, 8 * size / len(held_out)) for name, size in sizes.items()]


def _after(tokens: Tokens, text: tuple[bytes, bytes], pieces: Pieces) -> list[Floor]:
    """Return the floors that learn from pieces of the training text."""
    train, held_out = text
    offsets = pieces if tokens.tokenizer == "bytes" else _in_bytes(tokens, pieces)
    size = int((offsets[:, 1] - offsets[:, 0]).sum())
    found: list[Floor] = []

    def add(name: str, bits: float) -> None:
        found.append(Floor(name, "seen", size, bits / len(held_out)))

    learnt, asked = (np.frombuffer(each, np.uint8) for each in (train, held_out))
    for order, value in enumerate(_tables(learnt, offsets, asked, BYTE_ORDERS, 256), 1):
        add(f"{BYTE_TABLE} {order}", value)
    if tokens.tokenizer != "bytes":
        parts = tokens.train, pieces, tokens.held_out
        for order, value in enumerate(_tables(*parts, TOKEN_ORDERS, tokens.vocabulary), 1):
            add(f"{TOKEN_TABLE} {order}", value)
    if size <= MOST_BYTES:
        before = b"".join(train[first:end] for first, end in offsets.tolist())
        with ThreadPoolExecutor(2) as pool:  # most of the time of a floor, without Python's lock
            both, alone = pool.map(xz_bytes, (before + held_out, before))
        add("xz -9e", 8.0 * (both - alone))
    return found


def _tables(
    learnt: Symbols, pieces: Pieces, asked: Symbols, most: int, vocabulary: int
) -> list[float]:
    """Return the bits of a text by the tables of orders 1 to ``most`` of another."""
    return bits_of(count(learnt, pieces, most, vocabulary), asked, vocabulary)[1:]


def _in_bytes(tokens: Tokens, pieces: Pieces) -> Pieces:
    """Return pieces of the training tokens as pieces of its bytes."""
    wanted = np.unique(pieces)
    found = np.zeros(len(wanted), np.int64)
    done = before = 0
    for at in range(0, len(tokens.train), _AT_ONCE):
        ends = before + np.cumsum(tokens.token_bytes[tokens.train[at : at + _AT_ONCE]])
        upto = int(np.searchsorted(wanted, at + len(ends), side="right"))
        places = wanted[done:upto] - at
        found[done:upto] = np.where(places > 0, ends[places - 1], before)
        done, before = upto, int(ends[-1])
    return found[np.searchsorted(wanted, pieces)]


def _bits(vocabulary: int) -> int:
    return max(1, (vocabulary - 1).bit_length())


def _depths(lengths: NDArray[np.int64], most: int) -> NDArray[np.uint8]:
    """Return how many symbols of its piece are before each one, at most ``most``."""
    depth = np.full(int(lengths.sum()), most, np.uint8)
    starts = np.cumsum(lengths) - lengths
    for back in range(most):
        depth[starts[lengths > back] + back] = back
    return depth


def _table(text: Symbols, depth: NDArray[np.uint8] | None, order: int, bits: int) -> Table:
    keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
    for at in range(order, len(text), _AT_ONCE):
        end = min(at + _AT_ONCE, len(text))
        found = _keys(text[at - order : end].astype(np.int64), order, bits)
        if depth is not None:
            found = found[depth[at:end] >= order]
        keys, counts = _merged(keys, counts, *np.unique(found, return_counts=True))
    contexts = keys >> bits
    firsts = np.flatnonzero(np.append(True, contexts[1:] != contexts[:-1])[: len(keys)])
    totals = np.add.reduceat(counts, firsts) if len(keys) else counts
    types = np.diff(np.append(firsts, len(keys)))
    return Table(keys, counts, contexts[firsts], totals, types)


def _keys(symbols: NDArray[np.int64], order: int, bits: int) -> NDArray[np.int64]:
    """Return each symbol but the first ``order`` with the ones before it, in one number."""
    size = max(len(symbols) - order, 0)
    keys = np.zeros(size, np.int64)
    for at in range(order + 1):
        keys = (keys << bits) | symbols[at : at + size]
    return keys


def _merged(
    keys: NDArray[np.int64],
    counts: NDArray[np.int64],
    more: NDArray[np.int64],
    more_counts: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if not len(keys):
        return more, more_counts
    every, at = np.unique(np.concatenate([keys, more]), return_inverse=True)
    added = np.bincount(at, weights=np.concatenate([counts, more_counts]))  # exact below 2**53
    return every, added.astype(np.int64)


def _find(
    known: NDArray[np.int64], asked: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the place of each number among sorted ones, and whether it is there."""
    at = np.minimum(np.searchsorted(known, asked), max(len(known) - 1, 0))
    return at, known[at] == asked


def _read(path: Path) -> dict[str, list[Floor]]:
    if not path.exists():
        return {}
    with reading("the file of floors", path):
        found = json.loads(path.read_text(encoding="utf-8"))
        return {name: [Floor(*each) for each in floors] for name, floors in found.items()}
