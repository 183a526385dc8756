"""Masks as people write them: each makes a function ``(b, h, m, n) -> bool``."""

from __future__ import annotations

from typing import Any

import torch

from tests.plain import PairFunction
from tests.variants.making import Drawn, Maker


def causal(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: n <= m


def bottom_right(drawn: Drawn) -> PairFunction:
    shift = drawn.sizes.keys - drawn.sizes.queries
    return lambda b, h, m, n: n <= m + shift


def window(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: abs(m - n) <= 11


def causal_window(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (n <= m) & (m - n < 13)


def heads_windows(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: abs(m - n) < (1 << (h + 1))


def prefix(drawn: Drawn) -> PairFunction:
    lengths = drawn.integers(0, drawn.sizes.keys + 1, drawn.sizes.batch)
    return lambda b, h, m, n: (n <= m) | (n < lengths[b])


def lengths(drawn: Drawn) -> PairFunction:
    lengths = drawn.integers(0, drawn.sizes.keys + 1, drawn.sizes.batch)
    return lambda b, h, m, n: n < lengths[b]


def documents(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(4)
    return lambda b, h, m, n: ids[b, m] == ids[b, n]


def documents_causal(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(3)
    return lambda b, h, m, n: (ids[b, m] == ids[b, n]) & (n <= m)


def other_documents(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(3)
    return lambda b, h, m, n: ~(ids[b, m] == ids[b, n]) | (n == m)


def dilated(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (n <= m) & ((m - n) % 3 == 0)


def dilated_both_ways(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: ((m - n) % (h + 2) == 0) & ((n - m) // 5 < 2)


def neighbourhood(_: Drawn) -> PairFunction:
    width = 8
    return lambda b, h, m, n: (
        (abs(m // width - n // width) <= 1) & (abs(m % width - n % width) <= 2)
    )


def natten(drawn: Drawn) -> PairFunction:
    """A window of constant size: at the border of the picture it is moved inside."""
    width, reach = 7, 2
    height = max(-(-drawn.sizes.keys // width), 2 * reach + 1)

    def inside(b: Any, h: Any, m: Any, n: Any) -> Any:
        y = torch.clamp(m // width, reach, height - 1 - reach)
        x = torch.clamp(m % width, reach, width - 1 - reach)
        return (abs(n // width - y) <= reach) & (abs(n % width - x) <= reach)

    return inside


def checkerboard(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (m // 8 + n // 8) % 2 == 0


def blocks_below(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: m // 16 >= n // 16


def layout(drawn: Drawn) -> PairFunction:
    blocks = [-(-size // 8) for size in drawn.sizes[2:]]
    layout = drawn.integers(0, 3, drawn.sizes.heads, *blocks) > 0
    return lambda b, h, m, n: layout[h, m // 8, n // 8]


def strided(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (n <= m) & ((m - n < 8) | (n % 8 == 7))


def local_and_global(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (abs(m - n) <= 4) | (n < 3) | (m < 2)


def butterfly(_: Drawn) -> PairFunction:
    def one_bit(b: Any, h: Any, m: Any, n: Any) -> Any:
        differing = (m // 4) ^ (n // 4)
        return (differing & (differing - 1)) == 0

    return one_bit


def _hash(m: Any, n: Any, seed: Any) -> Any:
    word = (m * 73856093 ^ n * 19349663 ^ seed * 83492791) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 2654435769) & 0xFFFFFFFF
    return word ^ (word >> 13)


def random(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: (_hash(m, n, 7) % 4 != 0) | (m == n)


def random_each(_: Drawn) -> PairFunction:
    return lambda b, h, m, n: _hash(m, n, b * 31 + h) & 1 == 0


def keys_dropped(drawn: Drawn) -> PairFunction:
    kept = drawn.integers(0, 2, drawn.sizes.batch, drawn.sizes.keys) > 0
    return lambda b, h, m, n: kept[b, n]


def both(first: Maker, second: Maker) -> Maker:
    def make(drawn: Drawn) -> PairFunction:
        one, other = first(drawn), second(drawn)
        return lambda b, h, m, n: one(b, h, m, n) & other(b, h, m, n)

    return make
