"""One call of a variant, by the public interface, the references and plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.asked import asked
from tests.contract import assert_exact
from tests.plain import attend
from tests.variants.making import Sizes, Variant
from tilelab.cases.dense import dense
from tilewise.problem import Operands, Problem
from tilewise.variants.values import as_mask, as_score

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
