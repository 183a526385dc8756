"""Masks and scores by name, with random captured tensors, for the case table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.variants.values import Mask, Score


class Shape(NamedTuple):
    """What captured tensors are built for: B, Hq, M, N (the longest sequence's), least keys."""

    batch: int
    heads: int
    queries: int
    keys: int
    least_keys: int


MaskMaker = Callable[[Shape, torch.Generator], Mask]
ScoreMaker = Callable[[Shape, torch.Generator, torch.dtype], Score]


def _ints(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(low, high + 1, shape, generator=generator)


def _lengths(shape: Shape, generator: torch.Generator) -> Tensor:
    """Lengths in [0, N] that include 0 (where there is room for it) and an odd one."""
    lengths = _ints(0, shape.least_keys, (shape.batch,), generator)
    if shape.batch > 1:
        lengths[-1] = 0
    return lengths


def _documents(shape: Shape, generator: torch.Generator, each: bool) -> Mask:
    count = shape.batch if each else 1
    size = max(shape.queries, shape.keys)
    ids = _ints(0, 5, (count, size), generator).sort(dim=1).values
    queries, keys = ids[:, : shape.queries], ids[:, : shape.keys]
    return masks.document(keys if each else keys[0], queries if each else queries[0])


def _dense(*dims: int) -> MaskMaker:
    """A random boolean tensor that has the named dimensions of [B, Hq, M, N], 1 in the others."""

    def make(shape: Shape, generator: torch.Generator) -> Mask:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(shape[:4])]
        return masks.dense(torch.rand(sizes, generator=generator) < 0.6)

    return make


MASKS: dict[str, MaskMaker] = {
    "causal": lambda _s, _g: masks.causal(),
    "causal_top": lambda _s, _g: masks.causal(align="top_left"),
    "window": lambda _s, _g: masks.window(20, 7),
    "window_left": lambda _s, _g: masks.window(16, None),
    "window_right": lambda _s, _g: masks.window(None, 3, align="top_left"),
    "diagonal": lambda _s, _g: masks.window(0, 0, align="top_left"),
    "prefix": lambda s, _g: masks.prefix(s.keys // 3),
    "prefix_each": lambda s, g: masks.prefix(_lengths(s, g)),
    "lengths": lambda s, g: masks.lengths(_lengths(s, g)),
    "document": lambda s, g: _documents(s, g, each=False),
    "document_each": lambda s, g: _documents(s, g, each=True),
    "bool": _dense(0, 1, 2, 3),
    "bool_pairs": _dense(2, 3),
    "bool_keys": _dense(0, 3),
    "bool_rows": _dense(1, 2),
    "nothing": lambda _s, _g: masks.dense(torch.zeros(1, dtype=torch.bool)),
}


def _bias(*dims: int, holes: float | None = None, wide: bool = False) -> ScoreMaker:
    """A random bias with the named dimensions; ``holes`` is what a third of it is set to."""

    def make(shape: Shape, generator: torch.Generator, dtype: torch.dtype) -> Score:
        sizes = [size if dim in dims else 1 for dim, size in enumerate(shape[:4])]
        bias = torch.randn(sizes, generator=generator, dtype=torch.float64)
        bias = bias.to(torch.float32 if wide and dtype != torch.float64 else dtype)
        if holes is not None:
            bias[torch.rand(sizes, generator=generator) < 1 / 3] = holes
        return scores.bias(bias.requires_grad_())

    return make


def _slopes(heads: int) -> Tensor:
    return 2.0 ** (-8.0 * torch.arange(1, heads + 1) / heads)


SCORES: dict[str, ScoreMaker] = {
    "alibi": lambda s, _g, _d: scores.alibi(_slopes(s.heads)),
    "alibi_each": lambda s, g, _d: scores.alibi(torch.rand(s.batch, s.heads, generator=g)),
    "softcap": lambda _s, _g, _d: scores.softcap(30.0),
    "softcap_tight": lambda _s, _g, _d: scores.softcap(0.7),
    "bias": _bias(0, 1, 2, 3),
    "bias_heads": _bias(1, 2, 3),
    "bias_keys": _bias(0, 3),
    "bias_rows": _bias(2),
    "bias_one": _bias(),
    "bias_wide": _bias(1, 2, 3, wide=True),
    "bias_inf": _bias(1, 2, 3, holes=-math.inf),
}
