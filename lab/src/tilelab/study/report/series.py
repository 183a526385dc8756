"""Numbers of many runs as lines with bands: what the curves of the report show."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

from tilelab.study.records.events import Evaluation, RunRecord
from tilelab.study.verdict.measures import metric_of

__all__ = ["Abscissa", "Series", "curve", "difference"]

Abscissa = Literal["tokens", "time"]
Records = Mapping[int, RunRecord]  # seed -> record


class Series(NamedTuple):
    """The mean over seeds, and how far the seeds reach.

    Args:
        arm: whose.
        place: in its experiment, 0 for the baseline; it decides the colour.
        x, mean, low, high: equally many numbers; low and high are the outermost seeds.
        seeds: how many went into every point.
        broken: whether a run of the arm ended because a number was not finite.
    """

    arm: str
    place: int
    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    seeds: int
    broken: bool


def _finite(record: RunRecord, metric: str) -> dict[int, Evaluation]:
    """Step -> evaluation with a number."""
    return {each.step: each for each in record.evaluations if metric_of(each, metric) is not None}


def _furthest(records: Records, metric: str) -> list[int]:
    """Return the seeds of the runs that have come furthest, and of those that diverged on the way.

    In a study that is not finished, the others would cut the lines off where they are.
    """
    last = {seed: max(found) for seed, run in records.items() if (found := _finite(run, metric))}
    furthest = max(last.values(), default=0)
    return [seed for seed, step in last.items() if step == furthest or records[seed].diverged]


def _common(found: Sequence[Mapping[int, Evaluation]]) -> list[int]:
    """Return the steps that every run has reached, in order."""
    return sorted(set.intersection(*(set(each) for each in found))) if found else []


def _number(evaluation: Evaluation, metric: str) -> float:
    number = metric_of(evaluation, metric)
    assert number is not None  # _finite has left the others out
    return number


def curve(arm: str, place: int, records: Records, metric: str, along: Abscissa) -> Series:
    """Return the held-out metric of an arm along its runs, those that have come furthest.

    Args:
        arm: its name.
        place: in its experiment.
        records: of the arm, by seed.
        metric: what is shown.
        along: ``"tokens"`` trained on, or ``"time"``: seconds in optimizer steps, mean over seeds.
    """
    found = [_finite(records[seed], metric) for seed in _furthest(records, metric)]
    x, rows = [], []
    for step in _common(found):
        here = [each[step] for each in found]
        x.append(
            float(here[0].tokens)
            if along == "tokens"
            else statistics.fmean(each.train_wall_s for each in here)
        )
        rows.append([_number(each, metric) for each in here])
    broken = any(record.diverged for record in records.values())
    return _series(arm, place, x, rows, len(found), broken)


def difference(arm: str, place: int, records: Records, baseline: Records, metric: str) -> Series:
    """Return the arm minus the baseline, seed by seed, by tokens; for a loss, below 0 is ahead.

    Both are taken after equally many tokens. Where they share no evaluation by tokens except the
    start (as where one of them pads), both are taken after equally many steps, and the tokens are
    the arm's.

    Args:
        arm: its name.
        place: in its experiment.
        records: of the arm, by seed.
        baseline: of the baseline, by seed.
        metric: what is subtracted.
    """
    both = sorted(set(_furthest(records, metric)) & set(_furthest(baseline, metric)))
    pairs = [
        (list(_finite(records[seed], metric).values()), _finite(baseline[seed], metric).values())
        for seed in both
    ]
    broken = any(record.diverged for record in records.values())
    x: list[float] = []
    rows: list[list[float]] = []
    for key in (attrgetter("tokens"), attrgetter("step")):
        theirs = [{key(each): each for each in base} for _, base in pairs]
        ours = [{key(each): each for each in evaluations} for evaluations, _ in pairs]
        both_have = [set(mine) & set(other) for mine, other in zip(ours, theirs, strict=True)]
        common = sorted(set.intersection(*both_have)) if pairs else []
        x = [statistics.fmean(mine[at].tokens for mine in ours) for at in common]
        rows = [
            [
                _number(mine[at], metric) - _number(other[at], metric)
                for mine, other in zip(ours, theirs, strict=True)
            ]
            for at in common
        ]
        if len(common) > 1:
            break
    return _series(arm, place, x, rows, len(pairs), broken)


def _series(
    arm: str,
    place: int,
    x: Sequence[float],
    rows: Sequence[Sequence[float]],
    seeds: int,
    broken: bool,
) -> Series:
    mean = tuple(statistics.fmean(row) for row in rows)
    low, high = tuple(min(row) for row in rows), tuple(max(row) for row in rows)
    return Series(arm, place, tuple(x), mean, low, high, seeds, broken)
