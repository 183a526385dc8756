"""Masks and scores by name, with captured tensors of random numbers.

``MASKS`` and ``SCORES`` are the built-in ones. ``MASK_FUNCTIONS`` and ``SCORE_FUNCTIONS`` are
written as users write them, and larger: they are for dense problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import tilewise
from tilewise import BlockMask, masks, scores
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, as_mask


class Draw(NamedTuple):
    """The sizes of a call, and the random numbers that its mask and score capture.

    Args:
        batch, heads, queries, keys: of the call (batch counts sequences, lengths are the longest).
        least_keys: of the shortest sequence.
        dtype: of q, k and v.
        device: of the tensors. On "meta" they have no values.
        generator: of the numbers, on that device; None on "meta".
    """

    batch: int
    heads: int
    queries: int
    keys: int
    least_keys: int
    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator | None

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return B, Hq, M and N."""
        return self.batch, self.heads, self.queries, self.keys

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return standard normal numbers, drawn in float64 for every dtype."""
        made = torch.randn(size, generator=self.generator, device=self.device, dtype=torch.float64)
        return made.to(dtype)

    def learned(self, *size: int) -> Tensor:
        """Return standard normal numbers that require a gradient, float32."""
        return self.normal(*size).requires_grad_()

    def uniform(self, *size: int) -> Tensor:
        """Return numbers in [0, 1), float32."""
        return torch.rand(size, generator=self.generator, device=self.device)

    def whole(self, low: int, high: int, *size: int) -> Tensor:
        """Return whole numbers in [low, high), int64."""
        return torch.randint(low, high, size, generator=self.generator, device=self.device)

    def lengths(self) -> Tensor:
        """Return lengths [B] of 0 to the fewest keys; 0 among them where there is room for it."""
        found = self.whole(0, self.least_keys + 1, self.batch)
        if self.batch > 1:
            found[-1] = 0
        return found


MaskMaker: TypeAlias = Callable[[Draw], Any]
ScoreMaker: TypeAlias = Callable[[Draw], Any]


def _documents(draw: Draw, each: bool) -> Mask:
    """Six documents or fewer: the same ones for all batch items, or each item its own."""
    size = max(draw.queries, draw.keys)
    ids = draw.whole(0, 6, draw.batch if each else 1, size).sort(dim=1).values
    queries, keys = ids[:, : draw.queries], ids[:, : draw.keys]
    return masks.document(keys if each else keys[0], queries if each else queries[0])


def _many_documents(draw: Draw, mean: int) -> Mask:
    """Documents of so many keys in the mean; the queries are the last ones."""
    size = max(draw.queries, draw.keys)
    ids = (draw.whole(0, mean, draw.batch, size) == 0).long().cumsum(1)
    return masks.document(ids[:, : draw.keys], ids[:, -draw.queries :])


def _dense(*dims: int) -> MaskMaker:
    """A random boolean tensor that has the named dimensions of [B, Hq, M, N], 1 in the others."""

    def make(draw: Draw) -> Mask:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(draw.sizes)]
        return masks.dense(draw.uniform(*sizes) < 0.6)

    return make


MASKS: dict[str, MaskMaker] = {
    "causal": lambda _: masks.causal(),
    "causal_top": lambda _: masks.causal(align="top_left"),
    "window": lambda _: masks.window(20, 7),
    "window_left": lambda _: masks.window(16, None),
    "window_right": lambda _: masks.window(None, 3, align="top_left"),
    "diagonal": lambda _: masks.window(0, 0, align="top_left"),
    "prefix": lambda draw: masks.prefix(draw.keys // 3),
    "prefix_each": lambda draw: masks.prefix(draw.lengths()),
    "lengths": lambda draw: masks.lengths(draw.lengths()),
    "document": lambda draw: _documents(draw, each=False),
    "document_each": lambda draw: _documents(draw, each=True),
    "bool": _dense(0, 1, 2, 3),
    "bool_pairs": _dense(2, 3),
    "bool_keys": _dense(0, 3),
    "bool_rows": _dense(1, 2),
    "nothing": lambda draw: masks.dense(torch.zeros(1, dtype=torch.bool, device=draw.device)),
}


def _dilated(draw: Draw) -> Any:
    return lambda b, h, m, n: (m >= n) & ((m - n) % 3 == 0)


def _windows_of_heads(draw: Draw) -> Any:
    widths = draw.whole(1, max(2, draw.keys // 4), draw.heads)
    return lambda b, h, m, n: (m - n < widths[h]) & (n - m < widths[h])


def _layout(draw: Draw) -> BlockMask:
    size = (draw.heads, -(-draw.queries // 64), -(-draw.keys // 64))
    return BlockMask.from_layout(draw.whole(0, 2, *size) == 0, (64, 64))


MASK_FUNCTIONS: dict[str, MaskMaker] = {
    "window_256": lambda _: masks.window(255, 0),
    "window_1k": lambda _: masks.window(1023, 0),
    "window_share": lambda draw: masks.window(max(1, draw.keys // 6), max(1, draw.keys // 20)),
    "documents_of_40": lambda draw: _many_documents(draw, 40),
    "documents_of_1k": lambda draw: _many_documents(draw, max(1, min(1024, draw.keys // 4))),
    "dilated": _dilated,
    "windows_of_heads": _windows_of_heads,
    "layout": _layout,
}


def tabled(mask: Mask, draw: Draw) -> Mask:
    """Return a mask with its table of tiles; on "meta" with one of 128 by 128 pairs."""
    if draw.device.type != "meta":
        batch, heads, queries, keys = draw.sizes
        return as_mask(BlockMask.of(mask, queries, keys, batch=batch, heads=heads))
    side = 128
    sides = (side, side, 0, 0, draw.queries, draw.keys, 0)
    covers = torch.empty(
        1, 1, -(-draw.queries // side), draw.keys // side, dtype=torch.uint8, device=draw.device
    )
    table = Instr("tiles", sides, (len(mask.captured),))
    return Mask((*mask.program, table), (*mask.captured, covers))


def _bias(*dims: int, holes: float | None = None, wide: bool = False) -> ScoreMaker:
    """A random bias with the named dimensions; ``holes`` is what a third of it is set to."""

    def make(draw: Draw) -> Any:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(draw.sizes)]
        dtype = torch.float32 if wide and draw.dtype != torch.float64 else draw.dtype
        bias = draw.normal(*sizes, dtype=dtype)
        if holes is not None:
            bias[draw.uniform(*sizes) < 1 / 3] = holes
        return scores.bias(bias.requires_grad_())

    return make


def _alibi(draw: Draw) -> Any:
    steps = torch.arange(1, draw.heads + 1, device=draw.device)
    return scores.alibi(2.0 ** (-8.0 * steps / draw.heads))


SCORES: dict[str, ScoreMaker] = {
    "alibi": _alibi,
    "alibi_each": lambda draw: scores.alibi(draw.uniform(draw.batch, draw.heads)),
    "softcap": lambda _: scores.softcap(30.0),
    "softcap_tight": lambda _: scores.softcap(0.7),
    "bias": _bias(0, 1, 2, 3),
    "bias_heads": _bias(1, 2, 3),
    "bias_keys": _bias(0, 3),
    "bias_rows": _bias(2),
    "bias_one": _bias(),
    "bias_wide": _bias(1, 2, 3, wide=True),
    "bias_inf": _bias(1, 2, 3, holes=-math.inf),
}


def _relative(draw: Draw) -> Any:
    table, last = draw.learned(draw.heads, draw.queries + draw.keys), draw.keys
    return lambda s, b, h, m, n: s + table[h, m - n + last]


def _buckets(draw: Draw) -> Any:
    table = draw.learned(draw.heads, 17)
    return lambda s, b, h, m, n: s + table[h, tilewise.minimum(abs(m - n) // 8, 16)]


def _temperature(draw: Draw) -> Any:
    heat = draw.learned(draw.heads)
    return lambda s, b, h, m, n: s * (1 + 0.1 * heat[h])


def _rows_keys(draw: Draw) -> Any:
    rows, keys = draw.learned(draw.batch, draw.queries), draw.learned(draw.heads, draw.keys)
    return lambda s, b, h, m, n: tilewise.where(m >= n, s + rows[b, m] * keys[h, n], s * 0.5)


def _learned(draw: Draw) -> Any:
    """A factor, a table by distance, and one in which every pair looks up its place."""
    factors, table = (
        draw.learned(draw.heads),
        draw.learned(draw.heads, draw.queries + draw.keys - 1),
    )
    places = draw.whole(0, 4096, draw.queries, draw.keys).int()
    of_places, keys = draw.learned(4096, draw.heads), draw.keys
    return lambda s, b, h, m, n: (
        s * factors[h] + table[h, m - n + keys - 1] + of_places[places[m, n], h]
    )


def _few_places(draw: Draw) -> Any:
    few = draw.learned(64)
    places = draw.whole(0, 64, draw.queries, draw.keys).int()
    return lambda s, b, h, m, n: s + few[places[m, n]]


SCORE_FUNCTIONS: dict[str, ScoreMaker] = {
    "bias_of_heads": _bias(1),
    "bias_of_pairs": _bias(2, 3),
    "relative": _relative,
    "buckets": _buckets,
    "temperature": _temperature,
    "rows_keys": _rows_keys,
    "learned": _learned,
    "few_places": _few_places,
}
