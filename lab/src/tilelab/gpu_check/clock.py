"""Times calls in turn, A B A B: by CUDA events on a GPU, by the wall clock in the self-test."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilelab.common.torch_private import keep_busy
from tilelab.gpu_check.setting import Setting

__all__ = ["Call", "Spread", "interleave", "once", "synchronize"]

Call = Callable[[], Any]
_SAMPLE_S = 0.002  # a shorter call is repeated within one sample
_MOST_REPEATS = 20
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 25  # whatever the budget
# Kept in front of a sample, so that the host is ahead of the GPU and its own time does not count.
_HEAD_START_CYCLES = 2_000_000


class Spread(NamedTuple):
    """A median and the range around it, of one or more numbers."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of values."""
        return cls(statistics.median(values), min(values), max(values))


def synchronize(setting: Setting) -> None:
    """Wait until the device has done all that it was given."""
    if not setting.self_test:
        torch.cuda.synchronize()


def once(setting: Setting, call: Call, repeats: int = 1) -> float:
    """Return the seconds of one call, the mean of some repeats; wait for the end."""
    if setting.self_test:
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - begin) / repeats
    event: Callable[..., Any] = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    keep_busy(_HEAD_START_CYCLES)
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def interleave(
    setting: Setting, calls: Mapping[str, Call], budget_s: float
) -> dict[str, list[float]]:
    """Time calls in turn, round after round.

    Args:
        setting: where.
        calls: what to time, by name, warm already.
        budget_s: about how long the rounds may take.

    Returns:
        seconds of one call by name, an entry per round.
    """
    if setting.self_test:
        return {name: [once(setting, call)] for name, call in calls.items()}
    took = {name: once(setting, call) for name, call in calls.items()}
    repeats = {
        name: min(_MOST_REPEATS, max(1, math.ceil(_SAMPLE_S / max(seconds, 1e-7))))
        for name, seconds in took.items()
    }
    round_s = sum(took[name] * count + 0.002 for name, count in repeats.items())
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(max(_LEAST_ROUNDS, min(_MOST_ROUNDS, int(budget_s / max(round_s, 1e-9))))):
        for name, call in calls.items():
            samples[name].append(once(setting, call, repeats[name]))
    return samples
