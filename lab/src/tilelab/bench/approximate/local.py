"""Local attention: a window around each row."""

from __future__ import annotations

import torch
from torch import Tensor

from tilelab.bench.approximate.gathered import gathered

__all__ = ["local", "neighbours"]


def local(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int = 128,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """Row m sees the keys with ``|m - n| <= window``: O(N window).

    Source: Parmar et al., "Image Transformer", ICML 2018, section 3.2 (local self-attention in
    blocks of queries with their neighbourhood of keys).

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        window: keys on either side.
        keys: bool [N], which keys there are; None for all.
        dropout_p: the probability of dropping a pair.
    """
    size = max(1, min(window, q.shape[2]))
    blocks = neighbours(-(-q.shape[2] // size), 1, q.device)

    def near(m: Tensor, n: Tensor, _: Tensor) -> Tensor:
        return (m - n).abs() <= window

    return gathered(q, k, v, blocks, size, visible=near, keys=keys, dropout_p=dropout_p)


def neighbours(count: int, reach: int, device: torch.device) -> Tensor:
    """Return the blocks up to ``reach`` away from each, itself included: [count, 2 reach + 1]."""
    own = torch.arange(count, device=device)[:, None]
    found = own + torch.arange(-reach, reach + 1, device=device)
    return found.masked_fill((found < 0) | (found >= count), -1)
