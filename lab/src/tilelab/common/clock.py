"""Times calls in turn, A B A B, so that whatever disturbs the machine disturbs all of them.

A timer is ``"cpu"``, the processor time of the calling thread, or ``"cuda"``, events on a GPU.
Bench, GPU checks and tuning all time by this module. It needs torch alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from tilelab.common.torch_private import keep_busy

Call = Callable[[], Any]
_Sample = TypeVar("_Sample")
# A shorter call is repeated within one sample.
_SAMPLE_S = {"cpu": 0.01, "cuda": 0.002}
_MOST_REPEATS = {"cpu": 10**6, "cuda": 20}
# Kept in front of a sample, so that the host is ahead of the GPU and its own time does not count.
_HEAD_START_CYCLES = 2_000_000
_HEAD_START_S = {"cpu": 0.0, "cuda": 0.002}


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

    @property
    def noise(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.quartile_high - self.quartile_low) / 2 / self.median


class Times(NamedTuple):
    """Seconds of one call: processor time of the calling thread, and by the wall clock."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True)
class Samples:
    """Times of one call, one entry per round."""

    cpu_s: list[float]  # processor time of the calling thread
    wall_s: list[float]  # by the wall clock

    @classmethod
    def of(cls, times: Sequence[Times] = ()) -> Samples:
        """Return the samples of some rounds."""
        return cls([each.cpu_s for each in times], [each.wall_s for each in times])


def once(call: Call, repeats: int = 1) -> Times:
    """Return the processor and wall seconds of one call, the mean of some repeats."""
    wall, cpu = time.perf_counter(), time.thread_time()
    for _ in range(repeats):
        call()
    spent_cpu, spent_wall = time.thread_time() - cpu, time.perf_counter() - wall
    return Times(spent_cpu / repeats, spent_wall / repeats)


def elsewhere(call: Call) -> float:
    """Return the share of a warm call's processor time that other threads spend."""
    repeats = repeats_for(once(call).wall_s)  # short calls: reading the clocks takes time too
    process, thread = time.process_time(), time.thread_time()
    for _ in range(repeats):
        call()
    spent, own = time.process_time() - process, time.thread_time() - thread
    return max(0.0, 1 - own / spent) if spent else 0.0


def seconds_of(call: Call, timer: str = "cpu", repeats: int = 1) -> float:
    """Return the seconds of one call by a timer; wait for the end."""
    if timer == "cpu":
        return once(call, repeats).cpu_s
    event: Callable[..., Any] = torch.cuda.Event
    first, last = (event(enable_timing=True) for _ in range(2))
    keep_busy(_HEAD_START_CYCLES)
    first.record()
    for _ in range(repeats):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / repeats


def repeats_for(call_s: float, timer: str = "cpu") -> int:
    """Return how often a call of that duration is repeated within one sample."""
    repeats = math.ceil(_SAMPLE_S[timer] / max(call_s, 1e-7))
    return max(1, min(_MOST_REPEATS[timer], repeats))


def plan(
    call_s: Mapping[str, float], budget_s: float, rounds: tuple[int, int], timer: str = "cpu"
) -> tuple[dict[str, int], int]:
    """Return the repeats of each call within a sample, and how many rounds fit in a budget.

    ``call_s`` are seconds of one call, by name. ``rounds`` are the fewest and the most, whatever
    the budget.
    """
    repeats = {name: repeats_for(seconds, timer) for name, seconds in call_s.items()}
    round_s = sum(call_s[name] * count + _HEAD_START_S[timer] for name, count in repeats.items())
    least, most = rounds
    return repeats, max(least, min(most, int(budget_s / max(round_s, 1e-9))))


def interleave(
    calls: Mapping[str, Call],
    repeats: Mapping[str, int],
    rounds: int,
    sample: Callable[[Call, int], _Sample],
    between: Callable[[], None] | None = None,
) -> dict[str, list[_Sample]]:
    """Time calls, warm already, in turn, round after round: a sample of each in every round.

    ``sample`` times a call with its repeats. ``between`` is called once in every round and not
    timed: it measures the peak. No call may be the one that always finds cold caches. So every
    second round goes backwards, and the first call after ``between`` makes its repeats once untimed
    before it is timed. A call without repeats is too long for that to matter.
    """
    samples: dict[str, list[_Sample]] = {name: [] for name in calls}
    for turn in range(rounds):
        names = list(calls)[:: -1 if turn % 2 else 1]
        if between is not None:
            between()
            if repeats[names[0]] > 1:
                once(calls[names[0]], repeats[names[0]])
        for name in names:
            samples[name].append(sample(calls[name], repeats[name]))
    return samples


def race(
    calls: Mapping[str, Call],
    budget_s: float,
    rounds: tuple[int, int],
    timer: str = "cpu",
    call_s: Mapping[str, float] | None = None,
) -> dict[str, list[float]]:
    """Time calls in turn for as many rounds as a budget has room for.

    Returns:
        seconds of one call by name, an entry per round.
    """
    if call_s is None:
        call_s = {name: seconds_of(call, timer) for name, call in calls.items()}
    repeats, count = plan(call_s, budget_s, rounds, timer)
    return interleave(calls, repeats, count, lambda call, n: seconds_of(call, timer, n))
