"""The cost of reaching the target: tokens and time to the first evaluation there."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tilelab.study.ask.config import Experiment
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.measures import Reach, reach, tokens_per_step
from tilelab.study.verdict.quantities import Ratio, TargetResult
from tilelab.study.verdict.stats import ratio

__all__ = ["target_result", "without_time"]

Finals = Mapping[int, RunRecord]  # seed -> record


def target_result(
    experiment: Experiment, finals: Finals, baseline: Finals | None = None
) -> TargetResult | None:
    """Return the cost of reaching the target in the finished runs of an arm.

    Args:
        experiment: its target, metric and seeds.
        finals: of the arm.
        baseline: those of the baseline, for the ratios.

    Returns:
        None where the experiment has no target.
    """
    target = experiment.target
    if target is None:
        return None
    mine = _reaches(experiment, target, finals)
    theirs = {} if baseline is None else _reaches(experiment, target, baseline)
    taken = list(mine.values())

    def compared(value: Callable[[Reach], float]) -> Ratio | None:
        pairs = []
        for seed in finals:
            ours, other = mine.get(seed), theirs.get(seed)
            if ours is None or other is None:
                return None
            pairs.append((value(ours), value(other)))
        return ratio(pairs, experiment.confidence)

    return TargetResult(
        target=target,
        tokens=tuple(None if each is None else each.tokens for each in taken),
        wall_s=tuple(None if each is None else each.wall_s for each in taken),
        cpu_s=tuple(None if each is None else each.cpu_s for each in taken),
        reached=sum(each is not None for each in taken),
        median_tokens=_median([math.inf if each is None else each.tokens for each in taken]),
        median_wall_s=_median([math.inf if each is None else each.wall_s for each in taken]),
        median_cpu_s=_median([math.inf if each is None else each.cpu_s for each in taken]),
        tokens_ratio=compared(lambda each: each.tokens),
        wall_ratio=compared(lambda each: each.wall_s),
        censored=tuple(_budget(finals[seed]) for seed, each in mine.items() if each is None),
    )


def without_time(target: TargetResult) -> TargetResult:
    """Return the same with everything withheld that is a time."""
    return replace(
        target, wall_s=(), cpu_s=(), median_wall_s=None, median_cpu_s=None, wall_ratio=None
    )


def _reaches(experiment: Experiment, target: float, finals: Finals) -> dict[int, Reach | None]:
    """Seed -> what it took, of the runs that are over; None for a miss."""
    return {
        seed: reach(record, experiment.metric, target)
        for seed, record in finals.items()
        if record.done
    }


def _budget(record: RunRecord) -> float:
    """Return tokens at the end of a run; of one that diverged, those that it should have had.

    Censoring a run where it diverged would make an unstable arm look as if it had only run less.
    """
    if not record.diverged and record.evaluations:
        return float(record.evaluations[-1].tokens)
    budget, step = record.start.config["budget"], tokens_per_step(record)
    return float(budget["steps"] * step if budget["steps"] else budget["tokens"])


def _median(values: Sequence[float]) -> float | None:
    """Return the median with every miss as infinite; None where that is not a number."""
    middle = statistics.median(values) if values else math.inf
    return middle if math.isfinite(middle) else None
