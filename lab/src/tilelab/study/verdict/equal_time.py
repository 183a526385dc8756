"""The effects of a ladder's arms at equal time, beside those at equal tokens.

A run of a rung ends at its own time with its rate decayed: such ends compare, and points on the way
do not. So for each seed the arm's ends at its rungs are a curve of the metric over the logarithm of
time, straight between neighbours. Its value at the time at which the baseline ended a rung, less
the baseline's, is the seed's difference. There is none at a time that lies before the arm's first
end or after its last: nothing is extrapolated.

Loss falls ever more slowly with the logarithm of time, so the straight line lies above the curve.
That is against the arm, the more so the further its ends are apart.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tilelab.stats.paired import paired
from tilelab.study.ask.config import Experiment
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.measures import final_metric
from tilelab.study.verdict.result import Clock, EqualTime

_CLOCKS: tuple[Clock, ...] = ("cpu", "wall")


class _End(NamedTuple):
    """The end of a run."""

    time_s: float  # in optimizer steps, those of a trunk that it shares too
    metric: float


def equal_time(
    experiment: Experiment, arm: str, records: Mapping[str, RunRecord]
) -> tuple[EqualTime, ...]:
    """Return an arm's effects at the baseline's times, where every seed has one; by CPU first."""
    return tuple(each for clock in _CLOCKS for each in _by(clock, experiment, arm, records))


def _by(
    clock: Clock, experiment: Experiment, arm: str, records: Mapping[str, RunRecord]
) -> Iterator[EqualTime]:
    rungs = experiment.rungs
    curves = {seed: _ends(clock, experiment, arm, seed, records) for seed in experiment.seeds}
    for name, planned in rungs.items():
        base, differences = [], []
        for seed, curve in curves.items():
            end = _end(clock, planned, experiment.baseline_name, seed, records)
            mine = None if end is None else _at(curve, end.time_s)
            if end is not None and mine is not None:
                base.append(end.time_s)
                differences.append(mine - end.metric)
        if len(differences) < len(curves):
            continue
        seen = paired(differences, experiment.confidence)
        assert seen.mean is not None
        at_s = math.exp(sum(map(math.log, base)) / len(base))
        yield EqualTime(name, clock, at_s, seen.mean, seen.interval, tuple(differences))


def _ends(
    clock: Clock, experiment: Experiment, arm: str, seed: int, records: Mapping[str, RunRecord]
) -> list[_End]:
    """Return the ends of an arm's runs, the shortest first; none where time does not grow."""
    rungs = (each for each in experiment.rungs.values() if arm in each.arm_names)
    ends = [_end(clock, each, arm, seed, records) for each in rungs]
    there = [each for each in ends if each is not None]
    grows = all(one.time_s < other.time_s for one, other in pairwise(there))
    return there if grows and len(there) == len(ends) else []


def _end(
    clock: Clock, planned: Experiment, arm: str, seed: int, records: Mapping[str, RunRecord]
) -> _End | None:
    record = records.get(f"{planned.name}/{arm}/seed-{seed}")
    metric = None if record is None else final_metric(record, planned.metric)
    if record is None or metric is None:
        return None
    last = record.evaluations[-1]
    time_s = last.train_cpu_s if clock == "cpu" else last.train_wall_s
    return _End(time_s, metric) if time_s > 0 else None


def _at(curve: Sequence[_End], time_s: float) -> float | None:
    """Return the metric at a time between two ends; None outside."""
    if len(curve) < 2 or not curve[0].time_s <= time_s <= curve[-1].time_s:
        return None
    at = min(bisect_right([each.time_s for each in curve], time_s), len(curve) - 1)
    (low, before), (high, after) = curve[at - 1], curve[at]
    share = math.log(time_s / low) / math.log(high / low)
    return before + share * (after - before)
