"""Exact attention that never writes the N x N matrix, fast on the chip you have."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tilewise.loading import collecting_later, command_loads, ending_at_once

with collecting_later(), ending_at_once(command_loads()):  # torch takes its time
    import tilewise.head_rows  # noqa: F401  # exported programs may have its ops
    from tilewise import errors
    from tilewise.cross_entropy import linear_cross_entropy
    from tilewise.functional import (
        AttentionResult,
        Explanation,
        KeyBlocks,
        PagedStep,
        SoftmaxStats,
        attention,
        attention_paged,
        attention_varlen,
        explain,
        plan,
        visible_pairs,
    )
    from tilewise.indexer import TopKeys, top_keys
    from tilewise.kernels.cpu import get_float32, set_float32
    from tilewise.merging import merge
    from tilewise.plan import Plan
    from tilewise.preference import left_to_torch, prefer, preferred
    from tilewise.sparse import BlockMask
    from tilewise.variants import masks, patterns, scores
    from tilewise.variants.outside import checked
    from tilewise.variants.trace import maximum, minimum, where

if TYPE_CHECKING:
    from tilewise import nn

# Imported when they are asked for: they take as long as a quarter of the rest.
_LATER = ("distributed", "float8", "nn", "serving")

#: The version of the package.
__version__ = "0.1.0"

__all__ = [
    "AttentionResult",
    "BlockMask",
    "Explanation",
    "KeyBlocks",
    "PagedStep",
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
    "get_float32",
    "left_to_torch",
    "linear_cross_entropy",
    "masks",
    "maximum",
    "merge",
    "minimum",
    "nn",
    "patterns",
    "plan",
    "prefer",
    "preferred",
    "scores",
    "set_float32",
    "top_keys",
    "visible_pairs",
    "where",
]


def __getattr__(name: str) -> Any:
    """Import ``nn``, ``serving`` and so on, and ``sdpa`` of ``tilewise.compat.sdpa``."""
    if name in _LATER:
        return import_module(f"{__name__}.{name}")
    if name == "sdpa":
        return import_module("tilewise.compat.sdpa").sdpa
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, those that are not imported yet among them."""
    return sorted({*globals(), *__all__, *_LATER})
