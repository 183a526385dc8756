"""The forward pass: of many queries, and of few with their keys split among programs.

Here are the arguments and constants of a call, which all its kernels take.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from tilewise.kernels.gpu.config import Blocks, Config, padded, tail_of
from tilewise.kernels.gpu.expressions import Variant, captures
from tilewise.kernels.gpu.walk.float8 import stored_form
from tilewise.kernels.gpu.walk.tiles import (
    head_strides,
    knows_whole_tiles,
    meets_empty_tiles,
    seed_memory,
    wide,
    word,
)
from tilewise.problem import Operands, Problem, Result
from tilewise.reference.philox import threshold

_LEAST_FOLDED = 1e-30  # a scale that may stand in the exponent: positive, and no denormal


class Form(NamedTuple):
    """The constants of a walk over the keys: one constexpr, whose members kernels read by name.

    Functions are not among them. Triton knows those that are constexprs of their own by their
    source, and those in a tuple by their name alone.

    Args:
        D, DV: the widths of keys and values; D_PADDED and DV_PADDED are the blocks that hold them.
        TAIL: columns of keys beyond D_PADDED, which TAIL_PADDED holds; 0 for none.
        SHARED: values are the keys' columns before the tail, in place.
        BM, BN: queries and keys of a block.
        WIDE: offsets within a block take 64 bits.
        PRECISION: of products of float32.
        PAGE: keys of a page, or 0.
        FOLDED: scores are kept in units of the bare product q.k.
        BLIND: no block is known to be shown whole.
        SKIPS: blocks of which no pair attends may be met.
        FP8: how 8 bits are multiplied, see ``walk.float8``.
        STORED: what pages in 8 bits hold, see there.
        PART: columns that products are summed over at a time, or 0 for all of them.
        DROPOUT: some pairs are dropped.
        REVERSED: the last tiles come first.
        TRANSPOSED: values are transposed, see ``walk.float8``.
        NAMED: of statistics, whether the first of the largest scores is named.
    """

    D: int
    D_PADDED: int
    BM: int
    BN: int
    WIDE: bool
    PRECISION: str
    PAGE: int
    FOLDED: bool
    BLIND: bool
    SKIPS: bool
    FP8: str
    STORED: str = ""
    PART: int = 0
    DROPOUT: bool = False
    DV: int = 0
    DV_PADDED: int = 0
    REVERSED: bool = False
    TRANSPOSED: bool = False
    NAMED: bool = False
    TAIL: int = 0
    TAIL_PADDED: int = 0
    SHARED: bool = False


def functions_of(variant: Variant) -> dict[str, Any]:
    """Return the functions of the mask and score that a walk calls, as constexprs."""
    return {"SEEN": variant.seen, "SCORE": variant.score, "KEYS_OF": variant.keys_of}


def form_of(
    problem: Problem,
    operands: Operands,
    config: Config,
    variant: Variant,
    blocks: Blocks,
    fp8: str,
) -> Form:
    """Return the form of a walk that needs no values; arguments as for ``forward_launches``."""
    tail = tail_of(problem.head_dim)
    return Form(
        D=problem.head_dim,
        D_PADDED=padded(problem.head_dim - tail),
        BM=blocks.queries,
        BN=blocks.keys,
        WIDE=wide(operands[:3], problem, blocks),
        PRECISION=config.precision,
        PAGE=problem.page_size,
        FOLDED=_folds(problem, operands, variant),
        BLIND=not knows_whole_tiles(problem, variant),
        SKIPS=meets_empty_tiles(problem, variant),
        FP8=fp8,
        STORED=stored_form(problem, config.family),
        PART=config.part("forward", problem),
        TAIL=tail,
        TAIL_PADDED=padded(tail) if tail else 0,
        SHARED=_shares(problem, operands),
    )


def _shares(problem: Problem, operands: Operands) -> bool:
    """Return whether values are all columns of the keys but for the tail, as in a latent cache."""
    k, v, tail = operands.k, operands.v, tail_of(problem.head_dim)
    if not tail or problem.value_dim != problem.head_dim - tail or problem.stored is not None:
        return False
    return k.data_ptr() == v.data_ptr() and k.stride() == v.stride()


def finishing_of(problem: Problem, operands: Operands, variant: Variant) -> dict[str, Any]:
    """Return the constants of what ends a walk: ``settled``, and the rows of the output."""
    return {
        "FOLDED": _folds(problem, operands, variant),
        "DROPOUT": problem.dropout_p > 0,
        "DV": problem.value_dim,
        "DV_PADDED": padded(problem.value_dim),
    }


def _folds(problem: Problem, operands: Operands, variant: Variant) -> bool:
    """Return whether scores may be kept in units of the bare product q.k."""
    scaled = any(scale is not None for scale in head_scales(problem, operands)[:2])
    return variant.score is None and problem.scale > _LEAST_FOLDED and not scaled


def arguments_of(problem: Problem, operands: Operands, result: Result) -> dict[str, Any]:
    """Return the arguments that every walk over the keys is given.

    ``outputs`` are out, lse, row_max and row_sum; ``per_head`` sinks and the scales of q, k and v;
    ``per_row`` those of k and v in pages of 8 bits. ``sequences`` are cu_seqlens of queries and
    keys, block table and lengths of keys. Kernels clamp such a length to ``keys``, and an entry of
    the table to ``last_page``.
    """
    inputs = (operands.q, operands.k, operands.v)
    held = operands.k.shape[0] if problem.page_size else 1
    return {
        "inputs": inputs,
        "outputs": (result.out, result.lse, *result.stats[:2]),
        "per_head": (operands.sinks, *head_scales(problem, operands)),
        "per_row": rows_scales(problem, operands),
        "sequences": (
            operands.cu_seqlens_q,
            operands.cu_seqlens_k,
            operands.block_table,
            operands.key_lengths,
        ),
        "strides": tuple([head_strides(tensor, problem) for tensor in (*inputs, result.out)]),
        "captured": (*captures(operands.mask_tensors), *captures(operands.score_tensors)),
        "batch": problem.batch,
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys if held else 0,
        "last_page": held - 1 if problem.page_size else None,
    }


def head_scales(problem: Problem, operands: Operands) -> tuple[Tensor | None, ...]:
    """Return the scales of the heads of q, k and v, each None where it is 1."""
    if problem.stored is not None:
        return None, None, None
    return operands.q_scale, operands.k_scale, operands.v_scale


def rows_scales(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """Return the scales of the rows of k and v with their strides; None where they have none."""
    if problem.stored is None:
        return None, None
    k, v = operands.k_scale, operands.v_scale
    assert k is not None
    assert v is not None
    return (k, k.stride()), (v, v.stride())


def scalars_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return (scale, factor of what dropout keeps, the seed's memory), and the threshold.

    The threshold is a 32-bit word, and an argument of its own: Triton specializes integers in a
    tuple.
    """
    return {
        "scalars": (
            problem.scale,
            1.0 / (1.0 - problem.dropout_p),
            seed_memory(problem, operands),
        ),
        "drop_below": word(threshold(problem.dropout_p)),
    }
