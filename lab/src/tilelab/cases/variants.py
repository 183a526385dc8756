"""Masks and scores by name, with captured tensors of random numbers.

``MASKS`` and ``SCORES`` are the built-in ones. ``EVERY_MASK`` and ``EVERY_SCORE`` have those too
that are written as users write them, and larger: they are for dense problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import tilewise
from tilewise import BlockMask, masks, patterns, scores
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, as_mask


class Draw(NamedTuple):
    """The sizes of a call, and the random numbers that its mask and score capture."""

    batch: int  # these four: of the call (batch counts sequences, lengths are the longest)
    heads: int
    queries: int
    keys: int
    least_keys: int  # of the shortest sequence
    dtype: torch.dtype  # of q, k and v
    device: torch.device  # of the tensors. On "meta" they have no values
    generator: torch.Generator | None  # of the numbers, on that device; None on "meta"
    learns: bool = True  # whether what a score captures requires a gradient

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Return B, Hq, M and N."""
        return self.batch, self.heads, self.queries, self.keys

    def normal(self, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return standard normal numbers, drawn in float64 for every dtype."""
        made = torch.randn(size, generator=self.generator, device=self.device, dtype=torch.float64)
        return made.to(dtype)

    def learned(self, *size: int) -> Tensor:
        """Return standard normal numbers that may require a gradient, float32."""
        return self.normal(*size).requires_grad_(self.learns)

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


Maker: TypeAlias = Callable[[Draw], Any]  # of a mask or a score


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


def _dense(*dims: int) -> Maker:
    """A random boolean tensor that has the named dimensions of [B, Hq, M, N], 1 in the others."""

    def make(draw: Draw) -> Mask:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(draw.sizes)]
        return masks.dense(draw.uniform(*sizes) < 0.6)

    return make


_ROWS = 64  # of lists that are drawn at a time: never M x N numbers


def listed_keys(draw: Draw, many: int) -> Tensor:
    """Return so many keys of each row, int32 [M, K], drawn at random, in ascending order."""
    many = min(many, draw.keys)
    found = torch.empty(draw.queries, many, dtype=torch.int32, device=draw.device)
    for start in range(0, draw.queries, _ROWS):
        rows = found[start : start + _ROWS]
        rows.copy_(draw.uniform(len(rows), draw.keys).topk(many).indices.sort(dim=1).values)
    return found


def seen_by(lists: Tensor, keys: int) -> Tensor:
    """Return which keys lists [M, K] name, bool [M, N]."""
    seen = torch.zeros(len(lists), keys, dtype=torch.bool, device=lists.device)
    for start in range(0, len(lists), _ROWS):
        rows = slice(start, start + _ROWS)
        seen[rows].scatter_(1, lists[rows].long(), True)
    return seen


def listed(share: int) -> Maker:
    """Return a maker of masks in which each row sees one in ``share`` keys, drawn at random."""

    def make(draw: Draw) -> Mask:
        lists = listed_keys(draw, max(1, draw.keys // share))
        return masks.dense(seen_by(lists, draw.keys))

    return make


MASKS: dict[str, Maker] = {
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


def _windows_of_heads(draw: Draw) -> Any:
    widths = draw.whole(1, max(2, draw.keys // 4), draw.heads)
    return lambda b, h, m, n: (m - n < widths[h]) & (n - m < widths[h])


def _layout(draw: Draw) -> BlockMask:
    size = (draw.heads, -(-draw.queries // 64), -(-draw.keys // 64))
    return BlockMask.from_layout(draw.whole(0, 2, *size) == 0, (64, 64))


def _few_documents(draw: Draw) -> Mask:
    """Documents whose queries have ids of their own, not the first ones of the keys."""
    keys, queries = (draw.whole(0, 6, draw.batch, size) for size in (draw.keys, draw.queries))
    return masks.document(keys, queries)


def uneven(length: int) -> list[int]:
    """Return where documents end that are half of a mean and one and a half of it in turn.

    The mean is a quarter of the length, at most 1024.
    """
    mean = max(1, min(1024, length // 4))
    sizes, ends = cycle((max(1, mean // 2), 3 * mean // 2)), [0]
    while ends[-1] < length:
        ends.append(min(length, ends[-1] + next(sizes)))
    return ends


def _uneven(draw: Draw) -> Mask:
    sizes = torch.tensor(uneven(draw.keys), device=draw.device).diff()
    ids = torch.arange(len(sizes), device=draw.device)
    return masks.document(torch.repeat_interleave(ids, sizes, output_size=draw.keys))


def _fifths(draw: Draw) -> Mask:
    return masks.document(torch.arange(draw.keys, device=draw.device) // max(1, draw.keys // 5))


def _padded(draw: Draw) -> Mask:
    kept = draw.keys - draw.keys // 8
    return masks.lengths(torch.full((draw.batch,), kept, device=draw.device))


def _growing(draw: Draw) -> Any:
    wide = max(1, draw.keys // 8)
    return lambda b, h, m, n: (n <= m) & (m - n <= wide * (h + 1))


def window(left: int | None, right: int | None) -> Maker:
    """Return what makes a window; for the parameters of a model."""
    return lambda _: masks.window(left, right)


def _sparse(pattern: Callable[[int], Mask]) -> Maker:
    """A pattern that may depend on the length, with its table of tiles."""
    return lambda draw: BlockMask.of(pattern(draw.keys), draw.queries, draw.keys).to(draw.device)


def _stride(length: int) -> int:
    return max(1, round(math.sqrt(length)))


EVERY_MASK: dict[str, Maker] = {
    **MASKS,
    "window_256": window(255, 0),
    "window_1k": lambda draw: masks.window(max(1, min(1024, draw.keys // 4)) - 1, 0),
    "window_share": lambda draw: masks.window(max(1, draw.keys // 6), max(1, draw.keys // 20)),
    "window_eighth": lambda draw: masks.window(max(1, draw.keys // 8), max(1, draw.keys // 8)),
    "window_eighth_before": lambda draw: masks.window(max(1, draw.keys // 8), 0),
    "window_by_head": _growing,
    "prefix_eighth": lambda draw: masks.prefix(max(1, draw.keys // 8)),
    "padded": _padded,
    "documents_of_40": lambda draw: _many_documents(draw, 40),
    "documents_of_1k": lambda draw: _many_documents(draw, max(1, min(1024, draw.keys // 4))),
    "documents_uneven": _uneven,
    "documents_fifths": _fifths,
    "few_documents": _few_documents,
    "dilated": lambda _: lambda b, h, m, n: (m >= n) & ((m - n) % 3 == 0),
    "checkerboard": lambda _: lambda b, h, m, n: (m + n) % 2 == 0,
    "windows_of_heads": _windows_of_heads,
    "layout": _layout,
    "sparse_dilated": _sparse(lambda _: patterns.dilated(32, 4)),
    "sparse_strided": _sparse(lambda length: patterns.strided(_stride(length))),
    "sparse_fixed": _sparse(lambda length: patterns.fixed(_stride(length))),
    "sparse_butterfly": _sparse(lambda _: patterns.butterfly(64)),
    "sparse_longformer": _sparse(lambda _: patterns.local_global(64, 16)),
    "sparse_bigbird": _sparse(patterns.bigbird),
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


def _bias(*dims: int, holes: float | None = None, wide: bool = False) -> Maker:
    """A random bias with the named dimensions; ``holes`` is what a third of it is set to."""

    def make(draw: Draw) -> Any:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(draw.sizes)]
        dtype = torch.float32 if wide and draw.dtype != torch.float64 else draw.dtype
        bias = draw.normal(*sizes, dtype=dtype)
        if holes is not None:
            bias[draw.uniform(*sizes) < 1 / 3] = holes
        return scores.bias(bias.requires_grad_(draw.learns))

    return make


def _alibi(draw: Draw) -> Any:
    steps = torch.arange(1, draw.heads + 1, device=draw.device)
    return scores.alibi(2.0 ** (-8.0 * steps / draw.heads))


SCORES: dict[str, Maker] = {
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
    factors = draw.learned(draw.heads)
    table = draw.learned(draw.heads, draw.queries + draw.keys - 1)
    places = draw.whole(0, 4096, draw.queries, draw.keys).int()
    of_places, keys = draw.learned(4096, draw.heads), draw.keys
    return lambda s, b, h, m, n: (
        s * factors[h] + table[h, m - n + keys - 1] + of_places[places[m, n], h]
    )


def _few_places(draw: Draw) -> Any:
    few = draw.learned(64)
    places = draw.whole(0, 64, draw.queries, draw.keys).int()
    return lambda s, b, h, m, n: s + few[places[m, n]]


# Spellings that the recogniser does not know: what an expression costs.
def _alibi_in_python(draw: Draw) -> Any:
    slopes = 2.0 ** (-8.0 * torch.arange(1, draw.heads + 1, device=draw.device) / draw.heads)
    return lambda s, b, h, m, n: s + slopes[h] * (n - m)


def _window_as_score(draw: Draw) -> Any:
    wide = max(1, draw.keys // 2)
    return lambda s, b, h, m, n: torch.where((m - n < wide) & (n - m < wide), s, -math.inf)


def _raw(draw: Draw) -> Any:
    """A score in Triton, a weight of each head."""
    from tilelab.cases.raw import weigh, weigh_slope

    scores.register_triton("gate_weigh", weigh, weigh_slope)
    return scores.raw("gate_weigh", torch.empty(draw.heads, device=draw.device))


def softcap(cap: float) -> Maker:
    """Return what makes a soft cap; for the parameters of a model."""
    return lambda _: scores.softcap(cap)


EVERY_SCORE: dict[str, Maker] = {
    **SCORES,
    "bias_of_heads": _bias(1),
    "bias_of_pairs": _bias(2, 3),
    "relative": _relative,
    "buckets": _buckets,
    "temperature": _temperature,
    "rows_keys": _rows_keys,
    "learned": _learned,
    "few_places": _few_places,
    "gaussian": lambda draw: lambda s, b, h, m, n: s - ((m - n) / (draw.keys / 4)) ** 2,
    "alibi_in_python": _alibi_in_python,
    "softcap_in_python": lambda _: lambda s, b, h, m, n: 30.0 * torch.tanh(s * (1 / 30.0)),
    "window_as_score": _window_as_score,
    "raw": _raw,
}
