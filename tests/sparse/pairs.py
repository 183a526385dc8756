"""What a mask shows of every pair, from the dense reference, and tables made of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tests.cases import Inputs
from tilewise import BlockMask, masks, patterns
from tilewise.variants.values import Mask


class Sizes(NamedTuple):
    """B, Hq, M, N."""

    batch: int = 2
    heads: int = 3
    queries: int = 333
    keys: int = 517


SIZES = Sizes()


def shown(mask: Any, sizes: Sizes = SIZES) -> Tensor:
    """Every pair, bool [B, Hq, M, N]."""
    batch, heads, queries, keys = sizes
    return tilewise.visible_pairs(mask, queries, keys, batch=batch, heads=heads)


def table_of(pairs: Tensor, block: tuple[int, int]) -> Tensor:
    """The table of pairs, tile by tile."""
    rows, columns = (
        math.ceil(size / one) for size, one in zip(pairs.shape[2:], block, strict=True)
    )
    beyond = (0, columns * block[1] - pairs.shape[3], 0, rows * block[0] - pairs.shape[2])

    def tiles(outside: bool) -> Tensor:  # [B, Hq, rows, M of a tile, columns, N of a tile]
        padded = torch.nn.functional.pad(pairs, beyond, value=outside)
        return padded.unflatten(3, (columns, block[1])).unflatten(2, (rows, block[0]))

    some, every = tiles(False).any(5).any(3), tiles(True).all(5).all(3)
    return some.to(torch.uint8) + every


def tabled(inputs: Inputs, block: tuple[int, int] = (64, 128)) -> Inputs:
    """The inputs with a table for their mask."""
    keywords: dict[str, Any] = {"heads": inputs.q.shape[1], "block": block, "dtype": inputs.q.dtype}
    if inputs.cu_seqlens is not None:
        cu_q, cu_k = inputs.cu_seqlens
        mask = BlockMask.of(inputs.mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **keywords)
    else:
        rows, columns = inputs.q.shape[2], inputs.k.shape[2]
        mask = BlockMask.of(inputs.mask, rows, columns, batch=inputs.q.shape[0], **keywords)
    return inputs._replace(mask=mask)


def _neighbours(width: int, near: int) -> Callable[..., Any]:
    def close(b: Any, h: Any, m: Any, n: Any) -> Any:
        return ((m // width - n // width).abs() < near) & ((m % width - n % width).abs() < near)

    return close


def catalogue(sizes: Sizes = SIZES) -> dict[str, Any]:
    """Masks of every kind by name, with random captured tensors."""
    generator = torch.Generator().manual_seed(5)
    longest = max(sizes.queries, sizes.keys)
    documents = torch.randint(0, 6, (longest,), generator=generator).sort().values
    mixed = torch.randint(0, 3, (sizes.batch, longest), generator=generator)
    lengths = torch.randint(0, sizes.keys + 1, (sizes.batch,), generator=generator)
    lengths[0] = 0
    each = (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    tiles = (sizes.heads, -(-sizes.queries // 37), -(-sizes.keys // 75))
    crowded = torch.rand(each, generator=generator) < 0.999
    sorted_documents = masks.document(documents[: sizes.keys], documents[: sizes.queries])
    mixed_documents = masks.document(mixed[:, : sizes.keys], mixed[:, : sizes.queries])
    wave: Callable[..., Any] = lambda b, h, m, n: torch.sin((m - n) * 0.02 + h) > 0  # noqa: E731
    table: Callable[..., Any] = lambda b, h, m, n: crowded[b, h, m // 7, n // 9]  # noqa: E731
    return {
        "nothing": ~Mask(()),
        "everything": Mask(()),
        "causal": masks.causal(),
        "causal-top": masks.causal("top_left"),
        "window": masks.window(100, 20),
        "diagonal": masks.window(0, 0, "top_left"),
        "prefix": masks.prefix(min(130, sizes.keys)),
        "prefix-each": masks.prefix(lengths),
        "lengths": masks.lengths(lengths),
        "documents": sorted_documents,
        "documents-causal": sorted_documents & masks.causal(),
        "documents-window": sorted_documents & masks.window(90, 90),
        "mixed": mixed_documents,
        "mixed-or-band": mixed_documents | masks.window(30, 30),
        "not-band": ~masks.window(30, 30) & sorted_documents,
        "dense": masks.dense(crowded),
        "dense-strided": masks.dense(crowded.mT.contiguous().mT),
        "dense-rows": masks.dense(crowded[:1, :, :, :1]),
        "dense-sparse": masks.dense(~crowded),
        "butterfly": patterns.butterfly(64),
        "butterfly-wide": patterns.butterfly(128, reach=2, low_rank=1),
        "local-global": patterns.local_global(40, 10),
        "dilated": patterns.dilated(9, 7),
        "strided": patterns.strided(33),
        "fixed": patterns.fixed(64, 5),
        "bigbird": patterns.bigbird(sizes.queries, sizes.keys, heads=sizes.heads),
        "layout": patterns.layout(torch.rand(tiles, generator=generator) < 0.5, (37, 75)),
        "checkers": lambda b, h, m, n: (m // 16 + n // 16 + h) % 2 == 0,
        "heads": lambda b, h, m, n: (m * (h + 1) + n + b) % 5 == 0,
        "neighbours": _neighbours(20, 4),
        "wave": wave,
        "looked-up": table,
        "lengths-and-own": lambda b, h, m, n: (n < lengths[b]) & (n <= m + 3),
    }
