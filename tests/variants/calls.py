"""Masks and scores as people write them, for the tests of every backend.

A ``Variant`` makes Python functions of a pair that close over captured tensors. The same functions
run twice: traced, inside the kernels; and by ``tests/plain.py`` on broadcast index tensors, in
plain torch, whose autograd says what every gradient should be.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact
from tests.oracle import asked
from tests.plain import PairFunction, attend
from tilelab.cases.dense import dense
from tilewise.problem import Operands, Problem
from tilewise.variants.values import as_mask, as_score


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


# ---- One call of a variant, by the public interface, the references and plain torch.


SIZES = Sizes()
WIDTH = 8
SCALE = 0.4


class Call:
    """The tensors of one call of a variant, and what it gives in several ways.

    ``leaves`` are all that a gradient is defined for, by name: q, k, v, what is captured, sinks.
    The query heads share two key heads.
    """

    def __init__(self, variant: Variant, dtype: torch.dtype, sizes: Sizes = SIZES) -> None:
        generator = torch.Generator().manual_seed(3)

        def leaf(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            return drawn.to(dtype).requires_grad_()

        self.made = variant.make(sizes, dtype)
        self.leaves = {
            "q": leaf(sizes.batch, sizes.heads, sizes.queries, WIDTH),
            "k": leaf(sizes.batch, 2, sizes.keys, WIDTH),
            "v": leaf(sizes.batch, 2, sizes.keys, WIDTH),
            **self.made.captured,
        }
        if variant.sinks:
            self.leaves["sinks"] = leaf(sizes.heads)
        self.grad_out = leaf(sizes.batch, sizes.heads, sizes.queries, WIDTH).detach()
        self.grad_lse = leaf(sizes.batch, sizes.heads, sizes.queries).detach()

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.leaves["q"], self.leaves["k"], self.leaves["v"]

    def results(self, out: Tensor, lse: Tensor) -> dict[str, Tensor]:
        """out, lse and the gradient of every leaf, by name."""
        grads = torch.autograd.grad(
            [out, lse],
            list(self.leaves.values()),
            [self.grad_out.to(out.dtype), self.grad_lse.to(lse.dtype)],
            materialize_grads=True,  # an empty captured tensor may not be in the graph
        )
        found = {"out": out.detach(), "lse": lse.detach()}
        return found | dict(zip(self.leaves, grads, strict=True))

    @property
    def formula(self) -> dict[str, Any]:
        """The keywords of ``tests/plain.py``: the Python functions themselves."""
        sinks = self.leaves.get("sinks")
        return {"scale": SCALE, "score": self.made.score, "mask": self.made.mask, "sinks": sinks}

    def plain(self) -> dict[str, Tensor]:
        """By the Python functions on broadcast indices."""
        return self.results(*attend(*self.qkv, **self.formula)[:2])

    def keywords(self, backend: str | None) -> dict[str, Any]:
        """Of the public call."""
        return {**self.formula, "return_lse": True, "backend": backend}

    def run(self, backend: str | None) -> dict[str, Tensor]:
        """By the public call."""
        out, lse, _ = tilewise.attention(*self.qkv, **self.keywords(backend))
        return self.results(out, lse)

    def asked(
        self,
        packed: tuple[Tensor, Tensor, Tensor] | None = None,
        starts: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Problem, Operands]:
        """The problem that the public call makes of it, or a packed call with these q, k and v."""
        mask, score = self.made.mask, self.made.score
        return asked(
            *(self.qkv if packed is None else packed),
            starts,
            mask=None if mask is None else as_mask(mask),
            score=None if score is None else as_score(score),
            scale=SCALE,
            sinks=self.leaves.get("sinks"),
        )

    def dense(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """By the dense reference."""
        result = dense(*self.asked(), dtype=dtype)
        return self.results(result.out, result.lse)


def assert_all_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Two results in float64 agree, in every name."""
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        message = f"{name}: {got[name]} and {tensor}"
        torch.testing.assert_close(got[name], tensor, rtol=1e-9, atol=1e-9, msg=message)


def check_exact(variant: Variant, dtype: torch.dtype, backend: str) -> None:
    """Assert the contract for a call, with the gradients of what is captured in it."""
    call, wide = Call(variant, dtype), Call(variant, torch.float64)
    for name, leaf in wide.leaves.items():
        leaf.data.copy_(call.leaves[name].data)
    wide.grad_out, wide.grad_lse = call.grad_out.double(), call.grad_lse.double()
    got, plain, oracle = call.run(backend), call.dense(dtype), wide.dense(torch.float64)
    for name, tensor in got.items():
        assert_exact(tensor, plain[name], oracle[name], f"{variant}: {name}")
