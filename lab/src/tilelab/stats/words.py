"""Effects, intervals and seeds in sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilelab.stats.values import Interval


def effect_text(value: float, smallest: float) -> str:
    """Return an effect with its sign; the smallest that matters has two figures."""
    digits = max(0, 1 - math.floor(math.log10(smallest)))
    if value and abs(value) < 0.5 * 10.0**-digits:
        return f"{value:+.1g}"  # a difference of rounding: its size is what is of interest
    return f"{value:+.{digits}f}" if value else "0"


def interval_text(interval: Interval, smallest: float) -> str:
    """``[-0.14, -0.08]``."""
    return f"[{effect_text(interval.low, smallest)}, {effect_text(interval.high, smallest)}]"


def p_text(p_value: float) -> str:
    """``0.034``, ``below 0.0001``."""
    return "below 0.0001" if p_value < 1e-4 else f"{p_value:.2g}"


def seeds_text(seeds: Sequence[int]) -> str:
    """``seed 3``, ``seeds 0, 2 and 3``."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{noun} {listing([str(seed) for seed in seeds])}"


def listing(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
