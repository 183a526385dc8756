"""Decide whether blocks are faster than the table's by more than the noise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LEAST_GAIN", "Timing", "beats"]

LEAST_GAIN = 0.01  # a smaller one is not worth other bits


class Timing(NamedTuple):
    """Some runs.

    Args:
        seconds: of one, the median.
        spread: half the range of the middle half of them, as a share of the median.
    """

    seconds: float
    spread: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Return the timing of one or more runs."""
        median = statistics.median(samples)
        if len(samples) == 1:
            return cls(median, 0.0)
        first, _, third = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, (third - first) / 2 / median)


def beats(new: Timing, table: Timing) -> bool:
    """Return whether the gain is more than both spreads together, and at least LEAST_GAIN."""
    gain = table.seconds / new.seconds - 1
    return gain > max(LEAST_GAIN, new.spread + table.spread)
