"""Performer: positive random features of the softmax's kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilelab.bench.approximate.linear import by_features

__all__ = ["directions", "features", "performer"]


def performer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    rows: Tensor | None = None,
    keys: Tensor | None = None,
) -> Tensor:
    """Linear attention with FAVOR+ features, whose products are exp(q.k / sqrt(D)) on average.

    O(N F D) for F features. It has no matrix of probabilities, so nothing is dropped.

    Source: Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, lemma 1 (positive
    features) and section 2.4 (orthogonal directions).

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        rows: random directions [F, D]; None draws D ln D of them, always the same.
        keys: bool [N], which keys there are; None for all.
    """
    width = q.shape[-1]
    if rows is None:
        rows = directions(max(1, round(width * math.log(width))), width)
    rows = rows.to(q)
    shrunk = width**-0.25  # the root of the scale, on either side
    return by_features(
        features(q * shrunk, rows, together=False),
        features(k * shrunk, rows, together=True),
        v,
        keys,
    )


def directions(count: int, width: int, seed: int = 0) -> Tensor:
    """Rows that are normal, and orthogonal within every ``width`` of them: float32 [count, width].

    Args:
        count: how many.
        width: D.
        seed: of the draw.
    """
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for _ in range(-(-count // width)):
        square = torch.randn(width, width, generator=generator)
        lengths = torch.randn(width, width, generator=generator).norm(dim=1, keepdim=True)
        q, r = torch.linalg.qr(square)
        # With these signs no direction is preferred (Mezzadri, 2007); without, the mean is off.
        blocks.append(q * r.diagonal().sign() * lengths)
    return torch.cat(blocks)[:count]


def features(x: Tensor, rows: Tensor, *, together: bool) -> Tensor:
    """``exp(rows x - |x|^2 / 2 - c) / sqrt(F)``; c keeps it finite and cancels in the division.

    Args:
        x: [B, H, N, D].
        rows: [F, D].
        together: one c for all rows (keys, whose features are summed over them) instead of each.
    """
    s = x @ rows.mT - x.square().sum(-1, keepdim=True) / 2
    c = s.detach().amax((-2, -1) if together else -1, keepdim=True)
    return (s - c).exp() / math.sqrt(rows.shape[0])
