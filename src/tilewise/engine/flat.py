"""The tensors of a call as the flat lists that autograd Functions take and give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.plan.plan import Plan
from tilewise.problem import Grads, Needs, Operands

__all__ = ["Call", "Tensors", "flat", "needs_of", "split", "wanted"]

# Tensors as a flat list, None where there is none; differentiable ones first and last.
Tensors = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class Call:
    """A call without its tensors; no pytree, so torch.func leaves it as it is.

    The tensors ``x`` of a call are q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, mask tensors, score
    tensors. Its *leaves* are those that have derivatives: q, k, v, sinks, score tensors.
    """

    plan: Plan
    seed: int | Tensor
    masks: int

    def operands(self, x: Sequence[Any]) -> Operands:
        """Return the operands of flat tensors."""
        q, k, v, sinks, cu_q, cu_k, *captured = x
        mask_tensors, score_tensors = captured[: self.masks], captured[self.masks :]
        return Operands(
            q, k, v, tuple(mask_tensors), tuple(score_tensors), sinks, cu_q, cu_k, self.seed
        )

    def leaves(self, per_tensor: Sequence[Any]) -> tuple[Any, ...]:
        """Return what belongs to the leaves, of something for each tensor."""
        return (*per_tensor[:4], *per_tensor[6 + self.masks :])

    def spread(self, per_leaf: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inverse of ``leaves``, with None for the other tensors."""
        return (*per_leaf[:4], *(None,) * (2 + self.masks), *per_leaf[4:])


def flat(operands: Operands) -> tuple[Tensor | None, ...]:
    """Return the tensors of operands in the order of ``Call``."""
    q, k, v, mask_tensors, score_tensors, sinks, cu_q, cu_k, *_ = operands
    return (q, k, v, sinks, cu_q, cu_k, *mask_tensors, *score_tensors)


def split(call: Call, rest: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(per leaf, per tensor) of one list; there are 2 + masks more tensors than leaves."""
    count = (len(rest) - 2 - call.masks) // 2
    return rest[:count], rest[count:]


def needs_of(flags: Sequence[bool]) -> Needs:
    """Return the needs of leaves, from a flag for each."""
    return Needs(flags[0], flags[1], flags[2], tuple(flags[4:]), flags[3])


def wanted(call: Call, grads: Grads, needs: Sequence[bool], x: Tensors) -> tuple[Tensor, ...]:
    """Return the gradients that are needed, each in its leaf's dtype."""
    found = (grads.q, grads.k, grads.v, grads.sinks, *grads.score_tensors)
    return tuple(
        torch.zeros_like(leaf) if grad is None else grad.to(leaf.dtype)
        for grad, need, leaf in zip(found, needs, call.leaves(x), strict=True)
        if need
    )
