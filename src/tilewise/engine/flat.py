"""The tensors of a call as the flat lists that autograd Functions take and give."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewise.plan import Plan
from tilewise.problem import START, Grads, Needs, Operands

# Tensors as a flat list, None where there is none; differentiable ones first and last.
Tensors = Sequence[Tensor | None]


@dataclass(eq=False, slots=True)  # frozen takes 0.4 us more to make
class Call:
    """A call without its tensors, never changed; no pytree, so torch.func leaves it as it is.

    The tensors ``x`` of a call are q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, mask tensors, score
    tensors. Its *leaves* are those that have derivatives: q, k, v, sinks, score tensors.
    """

    plan: Plan
    seed: int | Tensor
    masks: int
    origin: tuple[int, int, int, int] = START

    def operands(self, x: Sequence[Any]) -> Operands:
        """Return the operands of flat tensors."""
        q, k, v, sinks, cu_q, cu_k = x[:6]
        last = 6 + self.masks
        captured = tuple(x[6:last]), tuple(x[last:])
        return Operands(q, k, v, *captured, sinks, cu_q, cu_k, self.seed, self.origin)

    def leaves(self, per_tensor: Sequence[Any]) -> tuple[Any, ...]:
        """Return what belongs to the leaves, of something for each tensor."""
        return (*per_tensor[:4], *per_tensor[6 + self.masks :])

    def spread(self, per_leaf: Sequence[Any]) -> tuple[Any, ...]:
        """Return the inverse of ``leaves``, with None for the other tensors."""
        return (*per_leaf[:4], None, None, *(None,) * self.masks, *per_leaf[4:])


def flat(operands: Operands) -> tuple[Tensor | None, ...]:
    """Return the tensors of operands in the order of ``Call``."""
    q, k, v, mask_tensors, score_tensors, sinks, cu_q, cu_k = operands[:8]
    return (q, k, v, sinks, cu_q, cu_k, *mask_tensors, *score_tensors)


def split(call: Call, rest: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(per leaf, per tensor) of one list; there are 2 + masks more tensors than leaves."""
    count = (len(rest) - 2 - call.masks) // 2
    return rest[:count], rest[count:]


def needs_of(flags: Sequence[bool]) -> Needs:
    """Return the needs of leaves, from a flag for each."""
    return Needs(flags[0], flags[1], flags[2], tuple(flags[4:]), flags[3])


def leaves_of(grads: Grads) -> tuple[Tensor | None, ...]:
    """Return gradients in the order of the leaves."""
    return (grads.q, grads.k, grads.v, grads.sinks, *grads.score_tensors)


def wanted(call: Call, grads: Grads, needs: Sequence[bool], x: Tensors) -> tuple[Tensor, ...]:
    """Return the gradients that are needed, each in its leaf's dtype."""
    return tuple(
        torch.zeros_like(leaf) if grad is None else grad.to(leaf.dtype)
        for grad, need, leaf in zip(leaves_of(grads), needs, call.leaves(x), strict=True)
        if need
    )
