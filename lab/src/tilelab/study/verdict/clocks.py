"""Comparisons by the clock: the effects of arms at equal time, and the speed that a report shows.

**Effects at equal time** stand beside those at equal tokens.

In an experiment without a ladder, an arm and the baseline that end at other times are compared when
the earlier of the two has ended, seed by seed. The other one's metric is read off its evaluations,
on a straight line between two of them. Its schedule has not ended by then, and a rate that has not
decayed yet costs much: this is against the slower of the two, and the note says so. Where the last
evaluation scores all of the text, it counts by the windows of the others. Times that differ by less
than 5 %, or whose ratio has 1 in its interval, say nothing.

In a ladder, a run of a rung ends at its own time with its rate decayed: such ends compare, and
points on the way do not. So for each seed the arm's ends at its rungs are a curve of the metric
over the logarithm of x, straight between neighbours. At a rung where the arm took r times as long
as the baseline, it would have read 1/r of the tokens in the baseline's time. So x is the number of
tokens, and the arm is read off at 1/r of the rung's. The two times come from one rung: other rungs
may have run on another machine. On a ladder over the model's size x is the time itself.

There is no difference where x lies before the arm's first end or after its last: nothing is
extrapolated. An arm that is faster by less than 5 % is read at its last end, which is against it.
Loss falls ever more slowly with the logarithm of x, so the straight line lies above the curve. That
is against the arm too, the more so the further its ends are apart.

**The speed** of an arm is shown by the clock that speaks. On one thread of a CPU, a step's wall
time is its processor time plus what other work took away. So the wall clock of an arm was moved by
load

* where its timed steps' wall time over processor time is more than 5 % off the baseline's, or
* where the interval of its speed ratio by wall time is wider than x/÷1.05.

Its speed is then shown by processor time. A ratio whose interval is wider than x/÷1.05 by the clock
that speaks is withheld. With several threads, or on a GPU, wall time over processor time says
nothing about load: there the wall clock speaks always.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from tilelab.stats.paired import paired, ratio
from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run import final_name
from tilelab.study.records.events import Evaluation, RunRecord
from tilelab.study.verdict.measures import final_metric, learnt, metric_of
from tilelab.study.verdict.result import ArmMeasures, Clock, EqualTime, Ratio, Speed
from tilelab.study.verdict.text import duration, effect_text, interval_text

_APART = 1.05  # of two times that differ
_TIMES: dict[Clock, str] = {"cpu": "processor time", "wall": "wall time"}


def at_first_end(
    experiment: Experiment,
    arm: str,
    finals: Mapping[int, RunRecord],
    baseline: Mapping[int, RunRecord],
) -> tuple[EqualTime, str] | None:
    """Return an arm's effect when the faster of it and the baseline ends, and a note on it.

    ``finals`` and ``baseline`` are the records of their seeds. None where the two take as long, or
    where a seed is not known. Processor time is that of runs on one thread; wall time of others.
    """
    pairs = [(run, baseline.get(seed, RunRecord())) for seed, run in finals.items()]
    own = all(each.one_thread for pair in pairs for each in pair)
    clock: Clock = "cpu" if own else "wall"
    curves = [[_curve(each, experiment.metric, clock) for each in pair] for pair in pairs]
    if not curves or not all(all(each) for each in curves):
        return None
    apart = ratio([(mine[-1].time_s, base[-1].time_s) for mine, base in curves], 0.95)
    if apart is None or apart.interval is None or max(apart.value, 1 / apart.value) < _APART:
        return None
    if apart.interval.low <= 1 <= apart.interval.high:
        return None
    ends = [min(mine[-1].time_s, base[-1].time_s) for mine, base in curves]
    differences = [
        _read(mine, end) - _read(base, end) for (mine, base), end in zip(curves, ends, strict=True)
    ]
    found = _effect("", clock, ends, differences, experiment.confidence)
    names = (arm, experiment.baseline_name)
    first, other = names if apart.value < 1 else reversed(names)
    smallest = experiment.smallest_effect
    ends_of = "" if found.interval is None else f" {interval_text(found.interval, smallest)}"
    return found, (
        f"At equal {_TIMES[clock]}, the {duration(found.at_s)} of {first}: "
        f"{effect_text(found.effect, smallest)} {METRICS[experiment.metric].unit}{ends_of}. "
        f"The schedule of {other} had not ended by then, which is against it."
    )


def _curve(record: RunRecord, metric: str, clock: Clock) -> list[_End]:
    """Return the metric by time; empty where the run is not over, or has no such curve."""
    last = final_metric(record, metric)
    if last is None or len(record.evaluations) < 2:
        return []
    if record.start.config.get("evaluation", {}).get("final_stride"):
        last = record.evaluations[-1].on_windows.get(metric)
    values = [*(metric_of(each, metric) for each in record.evaluations[:-1]), last]
    times = [_time_s(each, clock) for each in record.evaluations]
    found = [
        _End(time_s, value)
        for time_s, value in zip(times, values, strict=True)
        if value is not None
    ]
    grows = all(one < other for one, other in pairwise(times))
    return found if grows and len(found) == len(values) else []


def _time_s(evaluation: Evaluation, clock: Clock) -> float:
    return evaluation.train_cpu_s if clock == "cpu" else evaluation.train_wall_s


def _read(curve: Sequence[_End], time_s: float) -> float:
    """Return the metric at a time between the first and the last evaluation."""
    at = min(max(bisect_right([each.time_s for each in curve], time_s), 1), len(curve) - 1)
    low, high = curve[at - 1], curve[at]
    share = (time_s - low.time_s) / (high.time_s - low.time_s)
    return low.metric + share * (high.metric - low.metric)


class _End(NamedTuple):
    time_s: float  # in optimizer steps, those of a trunk that it shares too
    metric: float
    x: float = 0.0  # where a ladder's curve has it


def _effect(
    rung: str,
    clock: Clock,
    times_s: Sequence[float],
    differences: Sequence[float],
    confidence: float,
) -> EqualTime:
    """Return the effect of some seeds, each at its own time."""
    seen = paired(differences, confidence)
    assert seen.mean is not None
    at_s = math.exp(sum(map(math.log, times_s)) / len(times_s))
    return EqualTime(rung, clock, at_s, seen.mean, seen.interval, tuple(differences))


def equal_time(
    experiment: Experiment, arm: str, records: Mapping[str, RunRecord]
) -> tuple[EqualTime, ...]:
    """Return an arm's effects at the baseline's times, where every seed has one; by CPU first."""
    ladders = (_Ladder(experiment, records, clock) for clock in _TIMES)
    return tuple(each for ladder in ladders for each in ladder.effects(arm))


class _Ladder(NamedTuple):
    experiment: Experiment
    records: Mapping[str, RunRecord]
    clock: Clock

    def effects(self, arm: str) -> Iterator[EqualTime]:
        base_arm, seeds = self.experiment.baseline_name, self.experiment.seeds
        curves = {seed: self.ends(arm, seed) for seed in seeds}
        for name, rung in self.experiment.rungs.items():
            times_s, differences = [], []
            for seed, curve in curves.items():
                end, own = self.end(rung, base_arm, seed), self.end(rung, arm, seed)
                if end is None or own is None:
                    continue
                mine = _at(curve, own.x * end.time_s / own.time_s)
                if mine is not None:
                    times_s.append(end.time_s)
                    differences.append(mine - end.metric)
            if len(differences) == len(curves):
                confidence = self.experiment.confidence
                yield _effect(name, self.clock, times_s, differences, confidence)

    def ends(self, arm: str, seed: int) -> list[_End]:
        """Return the ends of an arm's runs, the shortest first; none where x does not grow."""
        rungs = (each for each in self.experiment.rungs.values() if arm in each.arm_names)
        ends = [self.end(each, arm, seed) for each in rungs]
        there = [each for each in ends if each is not None]
        grows = all(one.x < other.x for one, other in pairwise(there))
        return there if grows and len(there) == len(ends) else []

    def end(self, rung: Experiment, arm: str, seed: int) -> _End | None:
        """Return the end of a run; None where it has none, or took no time."""
        record = self.records.get(final_name(rung, arm, seed), RunRecord())
        metric = final_metric(record, rung.metric)
        if metric is None:
            return None
        time_s = _time_s(record.evaluations[-1], self.clock)
        ladder = self.experiment.ladder
        over_text = ladder is not None and ladder.axis == "tokens"
        x = learnt(record, record.steps) if over_text else time_s
        return _End(time_s, metric, x) if time_s > 0 else None


def _at(curve: Sequence[_End], x: float) -> float | None:
    """Return the metric between two ends; None outside."""
    if len(curve) < 2 or not curve[0].x <= x <= curve[-1].x * _APART:
        return None
    x = min(x, curve[-1].x)
    at = min(bisect_right([each.x for each in curve], x), len(curve) - 1)
    low, high = curve[at - 1], curve[at]
    share = math.log(x / low.x) / math.log(high.x / low.x)
    return low.metric + share * (high.metric - low.metric)


_MOST_APART = 0.05  # of wall over processor time, against the baseline's
_WIDEST = 1.05  # an interval from the ratio divided by this to the ratio times this


def speed_of(measures: ArmMeasures, one_thread: bool) -> Speed:
    """Return the speed of an arm; ``one_thread`` as of all records of the experiment."""
    wall, processor = measures.speed_ratio, measures.cpu_ratio
    if wall is None:
        return Speed(None, "wall")
    if not one_thread or processor is None:
        return _unless_wide(Speed(wall, "wall"))
    # Wall over processor time against the baseline's: the arm's ratios say it.
    apart = abs(processor.value / wall.value - 1) > _MOST_APART
    if not apart and not _wide(wall):
        return Speed(wall, "wall")
    why = "by processor time: other work slowed the runs down"
    return _unless_wide(Speed(processor, "processor", why))


def _unless_wide(speed: Speed) -> Speed:
    if speed.ratio is None or not _wide(speed.ratio):
        return speed
    times = f"\N{MULTIPLICATION SIGN}/\N{DIVISION SIGN}{_WIDEST:g}"
    return Speed(None, speed.by, f"its interval is wider than {times}")


def _wide(ratio: Ratio) -> bool:
    """Return whether the interval of a ratio says too little; not for one seed, which has none."""
    return ratio.interval is not None and (
        ratio.interval.low <= 0 or ratio.interval.high / ratio.interval.low > _WIDEST**2
    )
