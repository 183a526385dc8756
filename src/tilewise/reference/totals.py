"""The accumulators of the gradients that backward passes share."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Grads, Needs, Operands, Problem
from tilewise.reference.blocks import Part, cut
from tilewise.reference.tiles import part_view
from tilewise.variants.program import EXPR


class Totals(NamedTuple):
    """Accumulators of the gradients in the compute dtype; None where not wanted."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    score_tensors: tuple[Tensor | None, ...]
    sinks: Tensor | None

    def of(self, part: Part, problem: Problem) -> Totals:
        """Views of the accumulators for one part."""
        if problem.layout == "dense":
            return self
        b, m, n = part.first_batch, part.problem.queries, part.problem.keys
        q, k, v = (
            None if total is None else part_view(total, rows, problem)
            for total, rows in zip(self[:3], (part.queries, part.keys, part.keys), strict=True)
        )
        # A gradient that is not wanted has no accumulator: any tensor keeps the slots aligned.
        filled = [torch.empty(1, 1, 1, 1) if t is None else t for t in self.score_tensors]
        scores = tuple(
            None if total is None else view
            for total, view in zip(
                self.score_tensors, cut(problem.score, filled, b, m, n), strict=True
            )
        )
        return Totals(q, k, v, scores, self.sinks)

    def grads(self, operands: Operands) -> Grads:
        """Return the gradients in the dtypes of their operands."""
        q, k, v = (
            None if total is None else total.to(t.dtype)
            for total, t in zip(self[:3], operands[:3], strict=True)
        )
        scores = tuple(
            None if total is None else total.to(t.dtype)
            for total, t in zip(self.score_tensors, operands.score_tensors, strict=True)
        )
        sinks = None
        if self.sinks is not None and operands.sinks is not None:
            sinks = self.sinks.to(operands.sinks.dtype)
        return Grads(q, k, v, scores, sinks)


def accumulators(problem: Problem, operands: Operands, needs: Needs, dtype: torch.dtype) -> Totals:
    """Zeros in the operands' shapes; in double precision for what expressions load.

    An element of that may sum over all pairs.
    """

    def zeros(tensor: Tensor | None, wanted: bool, of: torch.dtype = dtype) -> Tensor | None:
        if tensor is None or not wanted:
            return None
        return torch.zeros(tensor.shape, dtype=of, device=tensor.device)

    loaded = {slot for instr in problem.score if instr.op == EXPR for slot in instr.slots}
    pairs = zip(operands.score_tensors, needs.score_tensors, strict=True)
    return Totals(
        zeros(operands.q, needs.q),
        zeros(operands.k, needs.k),
        zeros(operands.v, needs.v),
        tuple(
            zeros(tensor, need, torch.float64 if slot in loaded else dtype)
            for slot, (tensor, need) in enumerate(pairs)
        ),
        zeros(operands.sinks, needs.sinks),
    )


def sum_group(grad: Tensor, group: int) -> Tensor:
    """``[B, Hk, n, D]`` from ``[B, Hq, n, D]``: each key head serves ``group`` query heads."""
    batch, heads, length, width = grad.shape
    return grad.view(batch, heads // group, group, length, width).sum(2)
