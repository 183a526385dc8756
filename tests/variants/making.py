"""Masks and scores as people write them, for the tests of every backend.

A ``Variant`` makes Python functions of a pair that close over captured tensors. The same functions
run twice: traced, inside the kernels; and by ``plain_attention`` on broadcast index tensors, in
plain torch, whose autograd says what every gradient should be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

PairFunction: TypeAlias = Callable[..., Any]


class Sizes(NamedTuple):
    """Of the problem that a variant is made for."""

    batch: int = 2
    heads: int = 4
    queries: int = 37
    keys: int = 53


class Made(NamedTuple):
    """A variant for one problem.

    Args:
        mask: ``(b, h, m, n) -> bool``, or None.
        score: ``(s, b, h, m, n) -> s``, or None.
        captured: what the score closes over and learns; each a leaf that requires grad.
    """

    mask: PairFunction | None
    score: PairFunction | None
    captured: dict[str, Tensor]


class Drawn:
    """Captured tensors for one problem: floats that require grad, by name, and integers."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, seed: int) -> None:
        self.sizes = sizes
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)
        self.captured: dict[str, Tensor] = {}

    def learned(self, name: str, *shape: int, low: float = -1.0, high: float = 1.0) -> Tensor:
        """Uniform between the two."""
        draw = torch.rand(shape, generator=self.generator, dtype=torch.float64)
        tensor = (low + (high - low) * draw).to(self.dtype).requires_grad_()
        self.captured[name] = tensor
        return tensor

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Uniform in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def documents(self, count: int) -> Tensor:
        """Sorted ids, [B, longest of M and N]."""
        longest = max(self.sizes.queries, self.sizes.keys)
        return self.integers(0, count, self.sizes.batch, longest).sort(dim=1).values


Maker: TypeAlias = Callable[[Drawn], PairFunction]


class Variant(NamedTuple):
    """A named mask, score or both; ``sinks`` asks for sinks beside them."""

    name: str
    mask: Maker | None = None
    score: Maker | None = None
    sinks: bool = False

    def make(self, sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> Made:
        """Its functions and captured tensors for one problem, the same ones every time."""
        drawn = Drawn(sizes, dtype, seed)
        mask = None if self.mask is None else self.mask(drawn)
        score = None if self.score is None else self.score(drawn)
        return Made(mask, score, drawn.captured)

    def __str__(self) -> str:
        return self.name


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    made: Made,
    *,
    scale: float,
    sinks: Tensor | None = None,
    first_batch: int = 0,
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, M, Dv] and lse [B, Hq, M] by the plain formula, every function called once.

    ``first_batch`` is the index of q's first batch item: a sequence of a variable-length call.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    s = (q @ k.transpose(-1, -2)) * scale
    b = first_batch + torch.arange(s.shape[0])[:, None, None, None]
    h, m = torch.arange(s.shape[1])[:, None, None], torch.arange(s.shape[2])[:, None]
    n = torch.arange(s.shape[3])
    if made.score is not None:
        s = made.score(s, b, h, m, n)
    if made.mask is not None:
        s = s.masked_fill(~made.mask(b, h, m, n), -math.inf)
    logits = s
    if sinks is not None:
        logits = torch.cat([s, sinks[:, None, None].expand(*s.shape[:3], 1)], dim=-1)
    dead = (logits == -math.inf).all(-1, keepdim=True)
    lse = torch.logsumexp(logits.masked_fill(dead, 0.0), -1, keepdim=True)
    p = torch.exp(s - lse).masked_fill(dead, 0.0)
    return p @ v, lse.masked_fill(dead, -math.inf)[..., 0]
