"""Linformer: keys and values projected to a fixed number of rows."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import dropout

__all__ = ["linformer", "projection"]


def linformer(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    project: Tensor | None = None,
    keys: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """``out = softmax(q (E k)^T / sqrt(D)) (E v)`` with E of few rows: O(N rows).

    Source: Wang, Li, Khabsa, Fang and Ma, "Linformer: Self-Attention with Linear Complexity", 2020,
    equation 7, with one projection for keys and values and all heads (its section 4). E is learnt
    there; here it is drawn as theorem 2's proof draws it.

    Args:
        q: [B, H, N, D].
        k: [B, H, N, D].
        v: [B, H, N, Dv].
        project: E, [rows, N]; None draws 256 rows, always the same.
        keys: bool [N], which keys there are: the others are not in the sums; None for all.
        dropout_p: the probability of dropping a pair.
    """
    made = projection(q.shape[2]) if project is None else project
    made = made.to(q)
    if keys is not None:
        made = made * keys.to(made.dtype)
    s = (q @ (made @ k).mT) * q.shape[-1] ** -0.5
    out: Tensor = dropout(s.softmax(-1), dropout_p) @ (made @ v)
    return out


@lru_cache(maxsize=8)
def projection(length: int, rows: int = 256) -> Tensor:
    """Normal numbers of variance 1 / rows: float32 [rows, N], always the same.

    Args:
        length: N.
        rows: k of the paper.
    """
    generator = torch.Generator().manual_seed(0)
    drawn: Tensor = torch.randn(rows, length, generator=generator) * rows**-0.5
    return drawn
