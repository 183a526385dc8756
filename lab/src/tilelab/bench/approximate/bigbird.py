"""BigBird: a window, global blocks and random blocks."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from tilelab.bench.approximate.gathered import gathered, with_global_rows
from tilewise import patterns

__all__ = ["bigbird"]


def bigbird(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int = 64,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Let each block of rows see 3 blocks around it, 2 global and 3 random ones: O(8 N block).

    The mask is ``patterns.bigbird(N, block=block)``, whose global blocks see everything.

    Source: Zaheer et al., "Big Bird: Transformers for Longer Sequences", NeurIPS 2020, section 2
    and appendix D (blocks are gathered, as there).

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        block: rows and keys of a block.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.
    """
    length = q.shape[2]
    blocks = _blocks(length, block).to(q.device)
    out = gathered(q, k, v, blocks, block, keys=keys, dropout_p=dropout_p)
    return with_global_rows(q, k, v, out, min(_GLOBALS * block, length), keys, dropout_p)


_GLOBALS = 2


@lru_cache(maxsize=8)
def _blocks(length: int, block: int) -> Tensor:
    """Return the blocks that each block of rows sees, -1 behind the last of them."""
    (tiles,) = patterns.bigbird(length, block=block, globals=_GLOBALS).captured
    seen = tiles[0, 0].clone()
    seen[:_GLOBALS] = False  # they are done apart
    listed = int(seen.sum(-1).max().item())
    # Those that are seen sort first, in order.
    number = torch.arange(seen.shape[1]).expand_as(seen)
    ordered = number.masked_fill(~seen, seen.shape[1]).sort(-1).values[:, : max(1, listed)]
    return ordered.masked_fill(ordered == seen.shape[1], -1)
