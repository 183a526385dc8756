"""Numbers and lists in the sentences of a verdict."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilelab.study.ask.metrics import METRICS
from tilelab.study.verdict.quantities import Interval

__all__ = ["UNITS", "effect_text", "interval_text", "layers_text", "listing", "p_text"]
__all__ += ["seeds_text"]

UNITS = {name: metric.unit for name, metric in METRICS.items()}


def effect_text(value: float, smallest: float) -> str:
    """Return an effect with its sign, as exact as the smallest effect that matters needs it.

    Args:
        value: the effect.
        smallest: that effect, which is shown with two figures.
    """
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


def layers_text(layers: Sequence[int], count: int) -> str:
    """``Layer 2``, ``Layers 0 to 3 and 6``, ``All layers``; at the head of a sentence.

    Args:
        layers: in ascending order.
        count: of all layers.
    """
    if len(layers) == count > 1:
        return "All layers"
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return f"{'Layer' if len(layers) == 1 else 'Layers'} {listing(parts)}"


def listing(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"
