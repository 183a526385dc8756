"""Masks and scores as people write them, for the tests of every backend.

A ``Variant`` makes Python functions of a pair that close over captured tensors. The same functions
run twice: traced, inside the kernels; and by ``tests/plain.py`` on broadcast index tensors, in
plain torch, whose autograd says what every gradient should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tests.plain import PairFunction


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
