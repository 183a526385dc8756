"""Times calls in turn, A B A B, so that whatever disturbs the machine disturbs all of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Samples", "Spread", "interleave", "once", "repeats_for", "rounds_for"]

_MIN_SAMPLE_S = 0.01  # a shorter call is repeated within one sample


class Samples(NamedTuple):
    """Times of one call, one entry per round.

    Args:
        cpu_s: processor time of the calling thread.
        wall_s: by the wall clock.
    """

    cpu_s: list[float]
    wall_s: list[float]

    @classmethod
    def empty(cls) -> Samples:
        """No samples yet."""
        return cls([], [])


class Spread(NamedTuple):
    """A median and how far the samples lie around it."""

    median: float
    low: float
    high: float
    quartile_low: float
    quartile_high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one or more values."""
        if len(values) > 1:
            quartiles = statistics.quantiles(values, n=4, method="inclusive")
        else:
            quartiles = [values[0]] * 3
        return cls(quartiles[1], min(values), max(values), quartiles[0], quartiles[2])


def once(call: Callable[[], Any], repeats: int = 1) -> tuple[float, float]:
    """Processor and wall seconds of one call, the mean of some repeats."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(repeats):
        call()
    spent_cpu, spent_wall = time.thread_time() - cpu, time.perf_counter() - wall
    return spent_cpu / repeats, spent_wall / repeats


def interleave(
    calls: Sequence[Callable[[], Any]],
    repeats: Sequence[int],
    rounds: int,
    between: Callable[[], None] | None = None,
) -> list[Samples]:
    """Time the calls in turn, round after round.

    Args:
        calls: what to time, warm already.
        repeats: of each call within a sample.
        rounds: how many samples of each.
        between: called once in every round, not timed (it measures the peak).

    Returns:
        the samples of each call.
    """
    samples = [Samples.empty() for _ in calls]
    for _ in range(rounds):
        for call, count, kept in zip(calls, repeats, samples, strict=True):
            cpu, wall = once(call, count)
            kept.cpu_s.append(cpu)
            kept.wall_s.append(wall)
        if between is not None:
            between()
    return samples


def repeats_for(call_s: float) -> int:
    """Return how often a call of that duration is repeated within one sample."""
    return max(1, math.ceil(_MIN_SAMPLE_S / max(call_s, 1e-7)))


def rounds_for(round_s: float, budget_s: float, least: int, most: int) -> int:
    """Return how many rounds of that duration fit in a budget, within limits."""
    return max(least, min(most, int(budget_s / max(round_s, 1e-9))))
