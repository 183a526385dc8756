"""Arguments and constants of a call for the kernels of the forward pass."""

from __future__ import annotations

from typing import Any

from tilewise.kernels.gpu.config import Blocks, Config, padded
from tilewise.kernels.gpu.expressions.variant import Variant
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

__all__ = ["constants_of", "dropout_of", "finishing_of", "paging_of", "tensors_of"]

_LEAST_FOLDED = 1e-30  # a scale that may stand in the exponent: positive, and no denormal


def constants_of(
    problem: Problem,
    operands: Operands,
    config: Config,
    variant: Variant,
    blocks: Blocks,
) -> dict[str, Any]:
    """Return the constants of every walk over the keys; arguments as for ``forward_launches``."""
    return {
        "SEEN": variant.seen,
        "SCORE": variant.score,
        "KEYS_OF": variant.keys_of,
        "BLIND": not knows_whole_tiles(problem, variant),
        "SKIPS": meets_empty_tiles(problem, variant),
        "FOLDED": _folds(problem, operands, variant),
        "D": problem.head_dim,
        "D_PADDED": padded(problem.head_dim),
        "BM": blocks.queries,
        "BN": blocks.keys,
        "WIDE": wide(operands[:3], problem, blocks),
        "PRECISION": config.precision,
        "PAGE": problem.page_size,
    }


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
    scaled = operands.q_scale is not None or operands.k_scale is not None
    return variant.score is None and problem.scale > _LEAST_FOLDED and not scaled


def tensors_of(problem: Problem, operands: Operands, result: Result) -> dict[str, Any]:
    """Return the tensors of a call, but for cu_seqlens, and their strides."""
    stats = result.stats
    return {
        "q": operands.q,
        "k": operands.k,
        "v": operands.v,
        "out": result.out,
        "lse": result.lse,
        "row_max": stats[0],
        "row_sum": stats[1],
        "sinks": operands.sinks,
        "q_strides": head_strides(operands.q, problem),
        "k_strides": head_strides(operands.k, problem),
        "v_strides": head_strides(operands.v, problem),
        "out_strides": head_strides(result.out, problem),
    }


def paging_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the block table, the lengths, and the bounds that kernels clamp both to."""
    held = operands.k.shape[0] if problem.page_size else 1
    return {
        "block_table": operands.block_table,
        "key_lengths": operands.key_lengths,
        "keys": problem.keys if held else 0,
        "last_page": held - 1 if problem.page_size else None,
    }


def dropout_of(problem: Problem, operands: Operands) -> dict[str, Any]:
    """Return the seed's memory, the threshold as a 32-bit word, and the factor of what is kept."""
    return {
        "seed": seed_memory(problem, operands),
        "drop_below": word(threshold(problem.dropout_p)),
        "keep_factor": 1.0 / (1.0 - problem.dropout_p),
    }
