"""The forward pass: of many queries, and of few with their keys split among programs.

Here are the arguments and constants of a call, which all its kernels take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Config, Pass, tail_of
from tilewise.kernels.gpu.expressions import Variant, captures
from tilewise.kernels.gpu.walk.float8 import stored_form
from tilewise.kernels.gpu.walk.forms import Form, form_of
from tilewise.kernels.gpu.walk.tiles import head_strides, seed_memory, word
from tilewise.problem import Operands, Problem, Result
from tilewise.reference.philox import threshold

_LEAST_FOLDED = 1e-30  # a scale that may stand in the exponent: positive, and no denormal


class Call(NamedTuple):
    """What all walks of the forward are given: one argument, whose members kernels read by name.

    Counts are not among them: Triton would specialize those in a tuple, and compile anew for a
    batch of 1 or 16.

    Args:
        inputs: q, k and v.
        outputs: out, lse, row_max and row_sum.
        per_head: sinks, and the scales of q, k and v; each may be None.
        per_row: the scales of the rows of k and v in pages of 8 bits with their strides, or None.
        sequences: cu_seqlens of queries and keys, block table and lengths of keys; each may be
            None. Kernels clamp such a length to ``keys``, and an entry of the table to
            ``last_page``.
        strides: of q, k, v and out.
        captured: tensors and shape numbers of the mask, and of the score.
        numbers: (scale, factor of what dropout keeps, the seed's memory).
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    per_head: tuple[Tensor | None, ...]
    per_row: tuple[Any, Any]
    sequences: tuple[Tensor | None, ...]
    strides: tuple[tuple[int, ...], ...]
    captured: tuple[Any, ...]
    numbers: tuple[Any, ...]


class Forward(NamedTuple):
    """One forward pass: what its launches share.

    Args:
        problem: what to compute.
        operands: with what; cu_seqlens on the same device.
        result: with memory for everything that is wanted; statistics are asked for by theirs.
        config: of the chip.
        variant: the functions of the problem's mask and score.
    """

    problem: Problem
    operands: Operands
    result: Result
    config: Config
    variant: Variant

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of every walk over the keys."""
        problem, operands, result = self.problem, self.operands, self.result
        inputs = (operands.q, operands.k, operands.v)
        held = operands.k.shape[0] if problem.page_size else 1
        call = Call(
            inputs,
            (result.out, result.lse, *result.stats[:2]),
            (operands.sinks, *self.head_scales()),
            self._row_scales(),
            (
                operands.cu_seqlens_q,
                operands.cu_seqlens_k,
                operands.block_table,
                operands.key_lengths,
            ),
            tuple([head_strides(tensor, problem) for tensor in (*inputs, result.out)]),
            (*captures(operands.mask_tensors), *captures(operands.score_tensors)),
            (problem.scale, 1.0 / (1.0 - problem.dropout_p), seed_memory(problem, operands)),
        )
        return {
            "call": call,
            "batch": problem.batch,
            "heads": problem.heads,
            "group": problem.heads // problem.kv_heads,
            "queries": problem.queries,
            "keys": problem.keys if held else 0,
            "last_page": held - 1 if problem.page_size else None,
            # An argument of its own: a 32-bit word that is not to be specialized.
            "drop_below": word(threshold(problem.dropout_p)),
        }

    def functions(self) -> dict[str, Any]:
        """Return the functions of the mask and score that a walk calls, as constexprs."""
        variant = self.variant
        return {"SEEN": variant.seen, "SCORE": variant.score, "KEYS_OF": variant.keys_of}

    def form(self, name: Pass, blocks: Blocks, fp8: str) -> Form:
        """Return the form of a walk in the blocks of a pass; ``fp8`` of ``fp8_products``."""
        operands, variant = self.operands, self.variant
        form = form_of(self.problem, operands[:3], self.config, variant, blocks, name)
        return form._replace(
            FOLDED=self.folds(),
            SHARED=self._shares(),
            FP8=fp8,
            STORED=stored_form(self.problem, self.config.family),
        )

    def folds(self) -> bool:
        """Return whether scores may be kept in units of the bare product q.k."""
        positive = self.problem.scale > _LEAST_FOLDED and not self.is_scaled()
        return self.variant.score is None and positive

    def is_scaled(self) -> bool:
        """Return whether heads of q or k have scales, which may have any sign."""
        return any(scale is not None for scale in self.head_scales()[:2])

    def _shares(self) -> bool:
        """Return whether values are all columns of the keys but the tail, as in a latent cache."""
        problem, k, v = self.problem, self.operands.k, self.operands.v
        tail = tail_of(problem.head_dim)
        if not tail or problem.value_dim != problem.head_dim - tail or problem.stored is not None:
            return False
        return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()

    def head_scales(self) -> tuple[Tensor | None, ...]:
        """Return the scales of the heads of q, k and v, each None where it is 1."""
        if self.problem.stored is not None:
            return None, None, None
        return self.operands.q_scale, self.operands.k_scale, self.operands.v_scale

    def _row_scales(self) -> tuple[Any, Any]:
        if self.problem.stored is None:
            return None, None
        k, v = self.operands.k_scale, self.operands.v_scale
        assert k is not None
        assert v is not None
        return (k, k.stride()), (v, v.stride())
