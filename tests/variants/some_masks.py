"""Masks as people write them: each makes a function ``(b, h, m, n) -> bool``."""

from __future__ import annotations

from typing import Any

import torch

from tests.plain import PairFunction
from tests.variants.calls import Drawn, Maker, Variant


def _one_bit(b: Any, h: Any, m: Any, n: Any) -> Any:
    differing = (m // 4) ^ (n // 4)
    return (differing & (differing - 1)) == 0


def _hash(m: Any, n: Any, seed: Any) -> Any:
    word = (m * 73856093 ^ n * 19349663 ^ seed * 83492791) & 0xFFFFFFFF
    word = ((word ^ (word >> 15)) * 2654435769) & 0xFFFFFFFF
    return word ^ (word >> 13)


# Those that capture nothing.
_PLAIN: dict[str, PairFunction] = {
    "causal": lambda b, h, m, n: n <= m,
    "window": lambda b, h, m, n: abs(m - n) <= 11,
    "causal-window": lambda b, h, m, n: (n <= m) & (m - n < 13),
    "heads-windows": lambda b, h, m, n: abs(m - n) < (1 << (h + 1)),
    "dilated": lambda b, h, m, n: (n <= m) & ((m - n) % 3 == 0),
    "dilated-both-ways": lambda b, h, m, n: ((m - n) % (h + 2) == 0) & ((n - m) // 5 < 2),
    "neighbourhood": lambda b, h, m, n: (abs(m // 8 - n // 8) <= 1) & (abs(m % 8 - n % 8) <= 2),
    "checkerboard": lambda b, h, m, n: (m // 8 + n // 8) % 2 == 0,
    "blocks-below": lambda b, h, m, n: m // 16 >= n // 16,
    "strided": lambda b, h, m, n: (n <= m) & ((m - n < 8) | (n % 8 == 7)),
    "local-and-global": lambda b, h, m, n: (abs(m - n) <= 4) | (n < 3) | (m < 2),
    "butterfly": _one_bit,
    "random": lambda b, h, m, n: (_hash(m, n, 7) % 4 != 0) | (m == n),
    "random-each": lambda b, h, m, n: _hash(m, n, b * 31 + h) & 1 == 0,
}


def _bottom_right(drawn: Drawn) -> PairFunction:
    shift = drawn.sizes.keys - drawn.sizes.queries
    return lambda b, h, m, n: n <= m + shift


def _prefix(drawn: Drawn) -> PairFunction:
    lengths = drawn.integers(0, drawn.sizes.keys + 1, drawn.sizes.batch)
    return lambda b, h, m, n: (n <= m) | (n < lengths[b])


def _lengths(drawn: Drawn) -> PairFunction:
    lengths = drawn.integers(0, drawn.sizes.keys + 1, drawn.sizes.batch)
    return lambda b, h, m, n: n < lengths[b]


def documents(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(4)
    return lambda b, h, m, n: ids[b, m] == ids[b, n]


def _documents_causal(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(3)
    return lambda b, h, m, n: (ids[b, m] == ids[b, n]) & (n <= m)


def _other_documents(drawn: Drawn) -> PairFunction:
    ids = drawn.documents(3)
    return lambda b, h, m, n: ~(ids[b, m] == ids[b, n]) | (n == m)


def _natten(drawn: Drawn) -> PairFunction:
    """A window of constant size: at the border of the picture it is moved inside."""
    width, reach = 7, 2
    height = max(-(-drawn.sizes.keys // width), 2 * reach + 1)

    def inside(b: Any, h: Any, m: Any, n: Any) -> Any:
        y = torch.clamp(m // width, reach, height - 1 - reach)
        x = torch.clamp(m % width, reach, width - 1 - reach)
        return (abs(n // width - y) <= reach) & (abs(n % width - x) <= reach)

    return inside


def _layout(drawn: Drawn) -> PairFunction:
    blocks = [-(-size // 8) for size in drawn.sizes[2:]]
    layout = drawn.integers(0, 3, drawn.sizes.heads, *blocks) > 0
    return lambda b, h, m, n: layout[h, m // 8, n // 8]


def _keys_dropped(drawn: Drawn) -> PairFunction:
    kept = drawn.integers(0, 2, drawn.sizes.batch, drawn.sizes.keys) > 0
    return lambda b, h, m, n: kept[b, n]


def _of(function: PairFunction) -> Maker:
    return lambda _: function


MASKS: dict[str, Maker] = {
    **{name: _of(function) for name, function in _PLAIN.items()},
    "bottom-right": _bottom_right,
    "prefix": _prefix,
    "lengths": _lengths,
    "documents": documents,
    "documents-causal": _documents_causal,
    "other-documents": _other_documents,
    "natten": _natten,
    "layout": _layout,
    "keys-dropped": _keys_dropped,
}
VARIANTS = [Variant(name, mask) for name, mask in MASKS.items()]
causal, checkerboard = MASKS["causal"], MASKS["checkerboard"]


def both(*makers: Maker) -> Maker:
    """What all of them allow."""

    def make(drawn: Drawn) -> PairFunction:
        first, *others = (maker(drawn) for maker in makers)

        def seen(b: Any, h: Any, m: Any, n: Any) -> Any:
            found = first(b, h, m, n)
            for other in others:
                found = found & other(b, h, m, n)
            return found

        return seen

    return make
