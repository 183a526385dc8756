"""The asymptotic forms of the FlashAttention paper, and lower bounds, in numbers and not bytes.

For one head with N queries and keys of width d, and fast memory of M numbers. ``docs/io-model.md``
derives them. Theorem and proposition numbers are those of the paper (Dao et al., 2022).
"""

from __future__ import annotations

import math

from tilewise.errors import InvalidArgument


def plain_form(length: int, width: int) -> float:
    """N d + N^2: standard attention is in Theta of this (theorem 2)."""
    return length * width + length * length


def tiled_form(length: int, width: int, fast: int) -> float:
    """N^2 d^2 / M: FlashAttention is in Theta of this for d <= M <= N d (theorem 2)."""
    _check(length, width, fast)
    return length * length * width * width / fast


def sparse_form(length: int, width: int, fast: int, density: float) -> float:
    """N d + N^2 d^2 s / M: with a share s of the tiles that is not empty (proposition 4)."""
    if not 0.0 <= density <= 1.0:
        raise InvalidArgument("density", str(density), "a share of the tiles, from 0 to 1")
    return length * width + density * tiled_form(length, width, fast)


def lower_bound(length: int, width: int, fast: int) -> float:
    """Return a lower bound on what exact attention moves: max(4 N d, N^2 d^2 / M - M).

    The first term is its inputs and its output. The second assumes that each score is made of a
    whole row of Q and a whole row of K, both in fast memory at once. Between M transfers, at most 2
    M numbers are ever there. They are a rows of Q and b rows of K with (a + b) d <= 2 M, hence at
    most (M / d)^2 scores.

    Proposition 3 of the paper says that no algorithm is in o(N^2 d^2 / M) for every M. Saha and Ye,
    "The I/O complexity of attention", 2024, show that for M >= d^2 no algorithm does better for any
    M.
    """
    _check(length, width, fast)
    return max(4.0 * length * width, tiled_form(length, width, fast) - fast)


def paper_tiles(width: int, fast: int) -> tuple[int, int]:
    """The tiles of algorithm 1, line 1: B_c = ceil(M / 4 d) keys, B_r = min(B_c, d) queries."""
    _check(1, width, fast)
    keys = math.ceil(fast / (4 * width))
    return min(keys, width), keys


def tiles_for(width: int, fast: int) -> tuple[int, int]:
    """Tiles with queries outside that fill fast memory: m queries by n keys.

    m rows of Q and O, n of K and V and the m x n scores fit into M. The keys are few, at most the
    16 that matrix instructions take, because only queries that stay save anything.
    """
    _check(1, width, fast)
    keys = max(1, min(16, fast // (8 * width)))
    queries = (fast - 2 * keys * width) // (2 * width + keys)
    return max(1, queries), keys


def _check(length: int, width: int, fast: int) -> None:
    for name, size in (("length", length), ("width", width)):
        if size < 1:
            raise InvalidArgument(name, str(size), "at least 1")
    if fast < width:
        raise InvalidArgument(
            "fast", f"{fast} numbers", f"at least one row, {width}", "The forms hold from there on."
        )
