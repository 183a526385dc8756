"""Exact attention that never writes the N x N matrix, fast on the chip you have."""

from tilewise import errors, nn
from tilewise.functional import (
    AttentionResult,
    Explanation,
    SoftmaxStats,
    attention,
    attention_varlen,
    explain,
    plan,
)
from tilewise.plan.plan import Plan
from tilewise.sparse.block_mask import BlockMask
from tilewise.variants import masks, patterns, scores

__all__ = [
    "AttentionResult",
    "BlockMask",
    "Explanation",
    "Plan",
    "SoftmaxStats",
    "attention",
    "attention_varlen",
    "errors",
    "explain",
    "masks",
    "nn",
    "patterns",
    "plan",
    "scores",
]
