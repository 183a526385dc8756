"""The blocks of keys that an indexer scores highest, without queries x keys.

``tilewise.top_keys`` sums over heads and chooses keys. Here each head chooses for itself, and a
block has the largest score of its keys. So a tile of scores shrinks to one number a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.indexer import largest

_ROWS = 32
_TILE_BYTES = 2 * 1024 * 1024  # stays in the cache of a core, as tiles of ``top_keys``
_WHOLE = 128  # keys of a tile are a multiple: libraries round what remains of one in another way


@torch.no_grad()
def best_blocks(
    queries: Tensor,
    keys: Tensor,
    places: Tensor,
    limits: Tensor,
    block: int,
    k: int,
    local: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k best blocks of each query and head: the largest score first.

        score[h, m, i] = max of q[h, m] . k[n] over the keys n of block i with places[n] < limits[m]

    Of equal scores the lowest block comes first. A NaN score counts as the largest, as for
    ``torch.topk``.

    Args:
        queries: [B, Hi, M, D].
        keys: [B, 1, N, D], for all heads.
        places: [B or 1, N], positions of the keys.
        limits: [B or 1, M], what the place of a visible key is below.
        block: keys of a block; the last one may have fewer.
        k: how many, at most the number of blocks.
        local: [B, Hi, M, L], blocks whose score is inf; None for none.

    Returns:
        Scores [B, Hi, M, k], -inf for a block without a visible key, and int64 blocks.
    """
    batch, heads, rows, _ = queries.shape
    limits, places = limits.expand(batch, rows), places.expand(batch, -1)
    whole = math.lcm(block, _WHOLE)
    fit = _TILE_BYTES // (_ROWS * heads * queries.element_size())
    tile = max(1, fit // whole) * whole
    scores = queries.new_empty(batch, heads, rows, k)
    blocks = torch.empty(scores.shape, dtype=torch.int64, device=queries.device)
    for b in range(batch):
        for first in range(0, rows, _ROWS):
            span = slice(first, first + _ROWS)
            some = queries[b, :, span], keys[b, 0], places[b], limits[b, span]
            with torch.autocast(queries.device.type, enabled=False):  # 16 bits would make ties
                found = _of_rows(*some, block, tile)
            if local is not None:
                found.scatter_(-1, local[b, :, span], math.inf)
            for h in range(heads):
                scores[b, h, span], blocks[b, h, span] = largest(found[h], k)
    return scores, blocks


def _of_rows(
    queries: Tensor, keys: Tensor, places: Tensor, limits: Tensor, block: int, tile: int
) -> Tensor:
    """Return the scores of all blocks [Hi, m, blocks] for queries [Hi, m, D]."""
    heads, rows, _ = queries.shape
    total = len(keys)
    found = queries.new_full((heads, rows, -(-total // block)), -math.inf)
    whole = math.lcm(block, _WHOLE)
    for first in range(0, total, tile):
        count = min(tile, total - first)
        hidden = places[first : first + count] >= limits[:, None]
        if hidden.is_cpu and hidden.all():
            continue
        missing = -count % whole
        some = functional.pad(keys[first : first + count], (0, 0, 0, missing))
        hidden = functional.pad(hidden, (0, missing), value=True)
        products = (queries.flatten(0, 1) @ some.T).view(heads, rows, -1)
        best = products.masked_fill_(hidden, -math.inf).view(heads, rows, -1, block).amax(-1)
        part = found[..., first // block : (first + tile) // block]
        part.copy_(best[..., : part.shape[-1]])
    return found
