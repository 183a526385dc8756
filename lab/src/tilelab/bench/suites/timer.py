"""Seconds of calls in turn: processor time of the one thread on a CPU, events on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilelab.bench import clock
from tilelab.common.torch_private import keep_busy

__all__ = ["interleave", "once", "repeats_for"]

Call = Callable[[], Any]
_SAMPLE_S = 0.002  # on a GPU: a shorter call is repeated within one sample
# Kept in front of a sample, so that the host is ahead of the GPU and its own time does not count.
_HEAD_START_CYCLES = 2_000_000


def once(call: Call, device: str, repeats: int = 1) -> float:
    """Return the seconds of one call, the mean of some repeats; wait for the end."""
    if device == "cpu":
        return clock.once(call, repeats)[0]
    event: Callable[..., Any] = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    keep_busy(_HEAD_START_CYCLES)
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def repeats_for(seconds: float, device: str) -> int:
    """Return how often a call of that duration is repeated within one sample."""
    if device == "cpu":
        return clock.repeats_for(seconds)
    return min(20, max(1, round(_SAMPLE_S / max(seconds, 1e-7))))


def interleave(
    calls: Sequence[Call], repeats: Sequence[int], rounds: int, device: str
) -> list[list[float]]:
    """Time calls in turn, round after round.

    Args:
        calls: warm already.
        repeats: of each within a sample.
        rounds: how many.
        device: where they run.

    Returns:
        seconds of one call, an entry per round, for each.
    """
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, count, kept in zip(calls, repeats, samples, strict=True):
            kept.append(once(call, device, count))
    return samples
