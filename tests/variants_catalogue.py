"""Masks and scores as people write them, for the tests of every backend."""

from __future__ import annotations

from tests.variants import some_masks, some_scores
from tests.variants.calls import Call, Made, Sizes, Variant, assert_all_close, check_exact

__all__ = [
    "CATALOGUE",
    "Call",
    "Made",
    "Sizes",
    "Variant",
    "assert_all_close",
    "check_exact",
]

CATALOGUE: tuple[Variant, ...] = (*some_masks.VARIANTS, *some_scores.VARIANTS)
