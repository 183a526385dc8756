"""Exact attention that never writes the N x N matrix, fast on the chip you have."""

from importlib import import_module
from typing import Any

from tilewise.loading import collecting_later, command_loads, ending_at_once

with collecting_later(), ending_at_once(command_loads()):  # torch takes its time
    from tilewise import errors, nn
    from tilewise.cross_entropy import linear_cross_entropy
    from tilewise.functional import (
        AttentionResult,
        Explanation,
        KeyBlocks,
        SoftmaxStats,
        attention,
        attention_paged,
        attention_varlen,
        explain,
        plan,
        visible_pairs,
    )
    from tilewise.indexer import TopKeys, top_keys
    from tilewise.merging import merge
    from tilewise.plan.plan import Plan
    from tilewise.sparse.block_mask import BlockMask
    from tilewise.variants import masks, patterns, scores
    from tilewise.variants.checked import checked
    from tilewise.variants.vocabulary import maximum, minimum, where

#: The version of the package.
__version__ = "0.1.0"

__all__ = [
    "AttentionResult",
    "BlockMask",
    "Explanation",
    "KeyBlocks",
    "Plan",
    "SoftmaxStats",
    "TopKeys",
    "__version__",
    "attention",
    "attention_paged",
    "attention_varlen",
    "checked",
    "errors",
    "explain",
    "linear_cross_entropy",
    "masks",
    "maximum",
    "merge",
    "minimum",
    "nn",
    "patterns",
    "plan",
    "scores",
    "top_keys",
    "visible_pairs",
    "where",
]


def __getattr__(name: str) -> Any:
    """``tilewise.sdpa`` of ``tilewise.compat.sdpa``, which is imported when it is asked for."""
    if name == "sdpa":
        return import_module("tilewise.compat.sdpa").sdpa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
