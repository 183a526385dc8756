"""One call of a variant, by the public interface, the references and plain torch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import tilewise
from tests.variants.making import Sizes, Variant, plain_attention
from tilelab.oracles.dense import dense
from tilewise.problem import Operands, Problem
from tilewise.validation import dense_problem, lower_sinks, varlen_problem
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.values import Mask, Score, as_mask, as_score

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

    def plain(self) -> dict[str, Tensor]:
        """By the Python functions on broadcast indices."""
        return self.results(
            *plain_attention(*self.qkv, self.made, scale=SCALE, sinks=self.leaves.get("sinks"))
        )

    def keywords(self, backend: str | None) -> dict[str, Any]:
        """Of the public call."""
        return {
            "mask": self.made.mask,
            "score": self.made.score,
            "scale": SCALE,
            "sinks": self.leaves.get("sinks"),
            "return_lse": True,
            "backend": backend,
        }

    def run(self, backend: str | None) -> dict[str, Tensor]:
        """By the public call."""
        out, lse, _ = tilewise.attention(*self.qkv, **self.keywords(backend))
        return self.results(out, lse)

    def asked(self) -> tuple[Problem, Operands]:
        """The problem that the public call makes of it."""
        q, k, v = self.qkv
        extent = Extent(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        programs, lowered = self._lowered(extent)
        problem = dense_problem(
            q, k, v, **programs, scale=SCALE, dropout_p=0.0, sinks=self.leaves.get("sinks")
        )
        return problem, Operands(q, k, v, *lowered)

    def asked_packed(
        self, packed: tuple[Tensor, Tensor, Tensor], starts: tuple[Tensor, Tensor]
    ) -> tuple[Problem, Operands]:
        """The problem of a variable-length call with these q, k and v."""
        longest = [int(each.diff().max()) for each in starts]
        heads = packed[0].shape[1]
        extent = Extent(starts[0].shape[0] - 1, heads, longest[0], longest[1], ragged=True)
        programs, lowered = self._lowered(extent)
        problem = varlen_problem(
            *packed,
            *starts,
            **programs,
            scale=SCALE,
            dropout_p=0.0,
            sinks=self.leaves.get("sinks"),
        )
        return problem, Operands(*packed, *lowered, *(each.long() for each in starts))

    def _lowered(self, extent: Extent) -> tuple[dict[str, Any], tuple[Any, ...]]:
        q, device = self.leaves["q"], torch.device("cpu")
        mask = Mask(()) if self.made.mask is None else as_mask(self.made.mask)
        score = Score(()) if self.made.score is None else as_score(self.made.score)
        return {"mask": mask.program, "score": score.program}, (
            lower_mask(mask.program, mask.captured, extent, device, q.dtype),
            lower_score(score.program, score.captured, extent, q.dtype, device),
            lower_sinks(self.leaves.get("sinks"), q.dtype),
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
