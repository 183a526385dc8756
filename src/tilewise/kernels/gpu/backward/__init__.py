"""The backward pass: gradients of q, k and v, and of what a score captures.

Here is what all walks over the pairs share: their arguments and constants.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Config, Pass
from tilewise.kernels.gpu.expressions import Variant, captures
from tilewise.kernels.gpu.replay import scratch
from tilewise.kernels.gpu.walk.forms import Form, form_of
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.tiles import (
    head_strides,
    lists_of,
    number_strides,
    seed_memory,
    word,
)
from tilewise.problem import Needs, Operands, Problem, Result
from tilewise.reference.philox import threshold

_ANY_PAGE = 2**31 - 1  # the engine makes these tables itself: no entry is to be clamped


class Upstream(NamedTuple):
    """The gradients that come in.

    Args:
        out: shaped as ``result.out``, any strides.
        lse, entropy: shaped as ``result.lse``, any strides, or None for zero.
    """

    out: Tensor
    lse: Tensor | None = None
    entropy: Tensor | None = None


class Call(NamedTuple):
    """What all walks of the backward are given: one argument, whose members kernels read by name.

    Counts are not among them: Triton would specialize those in a tuple.

    Args:
        inputs: q, k, v, grad_out, and the values of rows (``row_values``).
        strides: of each.
        starts: the cu_seqlens of queries and keys, and the lengths of keys in pages; each may be
            None.
        captured: tensors and shape numbers of the mask, and of the score.
        numbers: (scale, 1 / (1 - dropout_p), the seed's memory).
        pages: (block table, its entries for an item, the last page), or None.
    """

    inputs: tuple[Tensor, ...]
    strides: tuple[tuple[int, ...], ...]
    starts: tuple[Tensor | None, ...]
    captured: tuple[Any, ...]
    numbers: tuple[Any, ...]
    pages: tuple[Any, ...] | None


class Backward(NamedTuple):
    """One backward pass: what its walks over the pairs share.

    Args:
        problem: what was computed.
        operands: with what.
        result: what the forward pass gave for them.
        upstream: the gradients that come in.
        needs: which gradients are wanted.
        config: of the chip.
        variant: the functions of the problem's mask and score.
        rows: float32 [planes, *lse.shape], the numbers per row that ``row_launches`` makes; one
            more than ``due_plane`` if captured tensors have gradients.
    """

    problem: Problem
    operands: Operands
    result: Result
    upstream: Upstream
    needs: Needs
    config: Config
    variant: Variant
    rows: Tensor

    @property
    def due_plane(self) -> int:
        """Which of the numbers is what the gradients of a row's scores add up to."""
        return _due_plane(self.upstream)

    def captured(self) -> tuple[Any, ...]:
        """Tensors and shape numbers of the mask, and of the score."""
        operands = self.operands
        return (*captures(operands.mask_tensors), *captures(operands.score_tensors))

    def starts(self) -> tuple[Tensor | None, ...]:
        """Return where sequences lie, as ``Call`` has it."""
        operands = self.operands
        return operands.cu_seqlens_q, operands.cu_seqlens_k, operands.key_lengths

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of all walks."""
        problem, operands = self.problem, self.operands
        table = operands.block_table
        tensors = (*operands[:3], self.upstream.out)
        strides = [head_strides(tensor, problem) for tensor in tensors]
        return {
            "call": Call(
                (*tensors, self.rows),
                (*strides, number_strides(self.rows[0], problem)),
                self.starts(),
                self.captured(),
                (problem.scale, 1 / (1 - problem.dropout_p), seed_memory(problem, operands)),
                None if table is None else (table, table.shape[1], _ANY_PAGE),
            ),
            "batch": problem.batch,
            "heads": problem.heads,
            "group": problem.heads // problem.kv_heads,
            "queries": problem.queries,
            "keys": problem.keys,
            "plane": self.rows[0].numel(),
            "threshold": word(threshold(problem.dropout_p)),
        }

    def form(self, name: Pass, blocks: Blocks) -> Form:
        """Return the form of a walk that multiplies as a pass does, in blocks."""
        problem, tensors = self.problem, (*self.operands[:3], self.upstream.out)
        form = form_of(problem, tensors, self.config, self.variant, blocks, name)
        return form._replace(FOLD=folds(problem), ENTROPY=self.upstream.entropy is not None)

    def walk(self, name: Pass, **arguments: Any) -> tuple[dict[str, Any], dict[str, Any], Blocks]:
        """(arguments, constants, blocks) of a walk in the blocks of a pass."""
        problem, variant = self.problem, self.variant
        blocks = self.config.blocks(name, problem)
        sides = blocks.queries, blocks.keys
        lists = tile_lists(problem, self.operands, variant.tables, *sides, name == "dkdv")
        constants = {
            "SCORE": variant.score,
            "GAIN": variant.gain,
            "SEEN": variant.seen,
            "FORM": self.form(name, blocks),
        }
        return self.arguments() | {"lists": lists_of(lists)} | arguments, constants, blocks


def backward_of(
    problem: Problem,
    operands: Operands,
    result: Result,
    upstream: Upstream,
    needs: Needs,
    config: Config,
    variant: Variant,
) -> Backward:
    """Return a backward pass, with memory for the numbers per row; arguments are its fields."""
    planes = _due_plane(upstream) + any(needs.score_tensors)
    rows = scratch(result.lse, (planes, *result.lse.shape))
    return Backward(problem, operands, result, upstream, needs, config, variant, rows)


def _due_plane(upstream: Upstream) -> int:
    return 3 if upstream.entropy is None else 5


def folds(problem: Problem) -> bool:
    """Return whether the row sum goes into the exponent: its rounding is negligible for 16 bits."""
    return problem.dtype is not torch.float32
