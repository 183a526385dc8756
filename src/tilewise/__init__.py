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
from tilewise.variants import masks, scores
from tilewise.variants.vocabulary import maximum, minimum, where

__all__ = [
    "AttentionResult",
    "Explanation",
    "Plan",
    "SoftmaxStats",
    "attention",
    "attention_varlen",
    "errors",
    "explain",
    "masks",
    "maximum",
    "minimum",
    "nn",
    "plan",
    "scores",
    "where",
]
