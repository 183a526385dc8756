"""Exact attention that never writes the N x N matrix, fast on the chip you have."""

from tilewise import errors, nn
from tilewise.functional import (
    AttentionResult,
    Explanation,
    SoftmaxStats,
    attention,
    attention_paged,
    attention_varlen,
    explain,
    plan,
    visible_pairs,
)
from tilewise.merging import merge
from tilewise.plan.plan import Plan
from tilewise.sparse.block_mask import BlockMask
from tilewise.variants import masks, patterns, scores
from tilewise.variants.checked import checked
from tilewise.variants.vocabulary import maximum, minimum, where

__all__ = [
    "AttentionResult",
    "BlockMask",
    "Explanation",
    "Plan",
    "SoftmaxStats",
    "attention",
    "attention_paged",
    "attention_varlen",
    "checked",
    "errors",
    "explain",
    "masks",
    "maximum",
    "merge",
    "minimum",
    "nn",
    "patterns",
    "plan",
    "scores",
    "visible_pairs",
    "where",
]
