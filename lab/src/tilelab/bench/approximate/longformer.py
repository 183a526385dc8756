"""Longformer: a sliding window, and global tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelab.bench.approximate.gathered import gathered, with_global_rows
from tilelab.bench.approximate.local import neighbours

__all__ = ["longformer"]


def longformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 256,
    tokens: int = 64,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Rows see a window and the global tokens, which see everything: O(N (window + tokens)).

    The mask is ``patterns.local_global(window, tokens)``.

    Source: Beltagy, Peters and Cohan, "Longformer: The Long-Document Transformer", 2020, section
    3.1 (its window of width w is ``window = w / 2``; one set of projections serves both parts).

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        window: keys on either side.
        tokens: how many tokens at the start are global.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.
    """
    length = q.shape[2]
    tokens = min(tokens, length)
    size = max(1, min(window, length))
    near = neighbours(-(-length // size), 1, q.device)
    first = -(-tokens // size)  # blocks in which the global tokens lie
    everywhere = torch.arange(first, device=q.device).expand(near.shape[0], first)

    def visible(m: Tensor, n: Tensor, slot: Tensor) -> Tensor:
        # A global key is seen where its own block is listed, and not again in the window.
        is_global = n < tokens
        return torch.where(slot < first, is_global, ~is_global & ((m - n).abs() <= window))

    blocks = torch.cat([everywhere, near], dim=1)
    out = gathered(q, k, v, blocks, size, visible=visible, keys=keys, dropout_p=dropout_p)
    return with_global_rows(q, k, v, out, tokens, keys, dropout_p)
