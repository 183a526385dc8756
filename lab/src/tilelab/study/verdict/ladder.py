"""Ladders: the value that each arm has at each rung, and effects as a function of length or size.

With x a rung's place on the axis (text read, or parameters), the losses of the baseline are fitted
by

    L(x) = E + A x^-c,     E, A >= 0, 0 < c <= 2

and the effect of an arm, over all its paired seeds, by least squares with the same c:

    e(x) = a + b x^-c.

Two runs that learn by the same law with other constants differ by just that. Where all of it holds,
a is what is left of the effect on an endless text. The interval of the line is that of linear
regression, with c taken as known. The fit that leaves the last rung out predicts it: the prediction
interval is for a mean over as many seeds as the rung has.

Sources: Kaplan et al., "Scaling Laws for Neural Language Models" (2020), for the law; Draper and
Smith, "Applied Regression Analysis", chapter 1, for the intervals.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tilelab.study.ask.config import Experiment, size_of
from tilelab.study.ask.metrics import rank
from tilelab.study.ask.run import final_name
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.verdict.clocks import equal_time
from tilelab.study.verdict.measures import final_metric, learnt
from tilelab.study.verdict.result import (
    ArmVerdict,
    ExperimentVerdict,
    Interval,
    LadderArm,
    LadderPoint,
    LadderVerdict,
    SweepResult,
)
from tilelab.study.verdict.sweeps import known_trials, sweep_results

Records = Mapping[str, RunRecord]
_FEWEST = 3  # rungs that a fit needs: the law has three constants
_CURVE_POINTS = 25  # of a line that is drawn


def rates(experiment: Experiment, records: Records) -> dict[str, dict[str, float | None]] | None:
    """Return rung -> arm -> its value of the sweep; None while trials are missing.

    An arm all of whose candidates diverged at a tuned rung has None at every rung. Without a sweep
    every arm has the value of its config: the dictionaries are empty.
    """
    ladder = experiment.ladder
    assert ladder is not None
    optima: dict[str, list[float | None]] = {}
    for name in ladder.tuned:
        planned = experiment.rungs[name]
        if not all(is_over(run.name, records) for run in known_trials(planned, records)):
            return None
        for sweep in sweep_results(planned, records):
            optima.setdefault(sweep.arm, []).append(optimum(sweep, experiment.metric))
    tuned = [size_of(experiment.rungs[name].baseline, ladder) for name in ladder.tuned]
    found: dict[str, dict[str, float | None]] = {}
    for name, planned in experiment.rungs.items():
        arms = planned.arm_names if optima else ()
        of_arm = {arm: optima[ladder.last.get(arm, arm)] for arm in arms}
        place = size_of(planned.baseline, ladder)
        found[name] = {
            arm: _on_line(tuned, values, None if arm in ladder.shared else place)
            for arm, values in of_arm.items()
        }
    return found


def optimum(sweep: SweepResult, metric: str) -> float | None:
    """Return the lowest point of the parabola through the best candidate and its neighbours.

    On the logarithm of the value. A best candidate that lacks a neighbour, at an edge or beside one
    that diverged, is the optimum itself; None where every candidate diverged.
    """
    if sweep.chosen is None:
        return None
    at = [each.value for each in sweep.candidates].index(sweep.chosen)
    three = sweep.candidates[max(at - 1, 0) : at + 2]
    heights = [rank(metric, each.metric) for each in three if each.metric is not None]
    if len(heights) < 3:
        return sweep.chosen
    x = np.log([each.value for each in three])
    bend, slope, _ = np.polyfit(x, heights, 2)
    lowest = -slope / (2 * bend) if bend > 0 else x[1]
    return float(np.exp(np.clip(lowest, x[0], x[2])))


def _on_line(sizes: Sequence[int], values: Sequence[float | None], at: int | None) -> float | None:
    """Return the value at a size on the line through the optima; at None their geometric mean."""
    logs = [math.log(each) for each in values if each is not None]
    if len(logs) < len(values):
        return None
    found = statistics.fmean(logs)
    if at is not None and len(logs) > 1:
        x = [math.log(each) for each in sizes]
        found = logs[0] + (logs[1] - logs[0]) * (math.log(at) - x[0]) / (x[1] - x[0])
    return float(f"{math.exp(found):.3g}")  # more digits would say nothing, and name the value


def climb(
    experiment: Experiment, verdicts: Sequence[ExperimentVerdict], records: Records
) -> LadderVerdict:
    """Return the effects of a ladder's arms as functions of its axis, from its rungs' verdicts."""
    ladder, metric = experiment.ladder, experiment.metric
    assert ladder is not None
    names = list(experiment.rungs)
    places = [_place(experiment, name, records) for name in names]
    losses = [_loss(each, metric, records) for each in experiment.rungs.values()]
    there = [
        (at, rank(metric, loss))
        for at, loss in zip(places, losses, strict=True)
        if at is not None and loss is not None
    ]
    exponent = _exponent(there)
    before = _exponent(there[:-1]) if len(there) == len(names) else None
    arms = []
    for arm in experiment.arms:
        points = [
            LadderPoint(name, at, found.effect, found.interval, _differences(found))
            for name, at, verdict in zip(names, places, verdicts, strict=True)
            for found in verdict.arms
            if found.arm == arm.name and at is not None and found.effect is not None
        ]
        found_arm = _arm(arm.name, points, exponent, before, names[-1], experiment.confidence)
        if arm.kind == "training":  # the speed of a systems arm may be withheld
            timed = equal_time(experiment, arm.name, records)
            found_arm = replace(found_arm, equal_time=timed)
        arms.append(found_arm)
    return LadderVerdict(
        experiment=experiment.name,
        question=experiment.question,
        metric=metric,
        axis=_axis(experiment),
        rungs=tuple(names),
        places=tuple(places),
        baseline=experiment.baseline_name,
        losses=tuple(losses),
        exponent=exponent,
        arms=tuple(arms),
        rates={name: each for name, each in (rates(experiment, records) or {}).items() if each},
    )


def _loss(planned: Experiment, metric: str, records: Records) -> float | None:
    """Return the baseline's mean final metric; None before every seed is there, and finite."""
    found = [records.get(name, RunRecord()) for name in _baseline_runs(planned)]
    values = [final_metric(each, metric) for each in found]
    there = [each for each in values if each is not None]
    return statistics.fmean(there) if len(there) == len(values) else None


def _baseline_runs(planned: Experiment) -> list[str]:
    return [final_name(planned, planned.baseline_name, seed) for seed in planned.seeds]


def _differences(found: ArmVerdict) -> tuple[float, ...]:
    return tuple(each.difference for each in found.per_seed if each.difference is not None)


def _axis(experiment: Experiment) -> Literal["text", "tokens", "parameters"]:
    ladder = experiment.ladder
    assert ladder is not None
    text = ladder.axis == "tokens" and experiment.baseline.learning.learns_text
    return "text" if text else ladder.axis


def _place(experiment: Experiment, rung: str, records: Records) -> float | None:
    """Return where a rung is on the axis, by its baseline's first record; None before that."""
    there = (records.get(name) for name in _baseline_runs(experiment.rungs[rung]))
    record = next((each for each in there if each is not None and each.done), None)
    if record is None:
        return None
    axis, corpus = _axis(experiment), record.start.corpus
    if axis == "parameters":
        return float(record.start.parameters["total"])
    tokens = learnt(record, record.steps)
    return tokens * corpus["train_bytes"] / corpus["train_tokens"] if axis == "text" else tokens


def _exponent(points: Sequence[tuple[float, float]]) -> float | None:
    """Return c of the law through (x, loss), by least squares; None for fewer than three points."""
    if len(points) < _FEWEST:
        return None
    from scipy import optimize  # slow to import, and few studies have a ladder

    x, losses = np.array(points).T

    def misfit(c: float) -> float:
        return _line(x, losses, c).misfit

    return float(optimize.minimize_scalar(misfit, bounds=(0.02, 2.0), method="bounded").x)


class _Line(NamedTuple):
    """A least-squares line y = a + b x^-c."""

    constants: NDArray[np.float64]  # a and b
    inverse: NDArray[np.float64]  # of the normal equations' matrix
    misfit: float  # sum of squares that is left
    freedom: int  # points less two

    def at(self, x: float, c: float) -> tuple[float, float]:
        """Return y at x, and the variance of it in units of that of a point."""
        row = np.array([1.0, x**-c])
        return float(row @ self.constants), float(row @ self.inverse @ row)


def _line(x: NDArray[np.float64], y: NDArray[np.float64], c: float) -> _Line:
    rows = np.stack([np.ones_like(x), x**-c], axis=1)
    inverse = np.asarray(np.linalg.pinv(rows.T @ rows), np.float64)
    constants = inverse @ rows.T @ y
    return _Line(constants, inverse, float(((y - rows @ constants) ** 2).sum()), len(x) - 2)


def _arm(
    name: str,
    points: Sequence[LadderPoint],
    exponent: float | None,
    before: float | None,
    top: str,
    confidence: float,
) -> LadderArm:
    found = LadderArm(name, tuple(points))
    fit = _fitted(points, exponent)
    if fit is not None and exponent is not None:
        line, unit = fit
        curve = []
        for x in np.geomspace(points[0].at, points[-1].at, _CURVE_POINTS):
            y, variance = line.at(float(x), exponent)
            half = _half(line, unit, variance, confidence)
            curve.append((float(x), y, y - half, y + half))
        constants = tuple(map(float, line.constants))
        found = replace(found, constants=constants, curve=tuple(curve))
    last = points[-1] if points and points[-1].rung == top else None
    earlier = None if last is None else _fitted(points[:-1], before)
    if last is None or earlier is None or before is None:
        return found
    line, unit = earlier
    y, variance = line.at(last.at, before)
    half = _half(line, unit, variance + 1 / len(last.differences), confidence)
    miss = last.effect - y
    return replace(found, predicted=y, predicted_interval=Interval(y - half, y + half), miss=miss)


def _fitted(points: Sequence[LadderPoint], exponent: float | None) -> tuple[_Line, float] | None:
    """Return the line through all differences, and their standard deviation around it."""
    if exponent is None or len(points) < _FEWEST:
        return None
    x = np.array([each.at for each in points for _ in each.differences])
    y = np.array([one for each in points for one in each.differences])
    line = _line(x, y, exponent)
    return line, math.sqrt(line.misfit / line.freedom)


def _half(line: _Line, unit: float, variance: float, confidence: float) -> float:
    """Half of an interval of so many times a point's variance."""
    from scipy import stats

    return float(stats.t.ppf((1 + confidence) / 2, line.freedom)) * unit * math.sqrt(variance)
