"""The trials of a sweep, rung by rung, and what they chose.

A sweep without halving has one rung. A rung of an arm is known when all trials of the arm's rung
before it have ended. Its candidates are the best of those by the mean of the final metric over the
sweep's seeds; on a tie the smaller value wins. One that diverged with any seed never goes on.

A search has one rung too. Its candidates are the trials that are known.

The values of a search's trial are those of its record. One that has none follows from the seed, its
number and the trials of its arm before it; so a search goes on from its records alone, and a study
is read without Optuna. A trial that diverged counts as the worst of those that did not.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import rank
from tilelab.study.ask.run import RunSpec, trial
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.verdict.measures import final_metric, status
from tilelab.study.verdict.result import Candidate, Interval, RungResult, SweepResult
from tilewise.errors import InvalidArgument

_DIGITS = 6  # of a value that is asked for

_Ranges = tuple[tuple[str, tuple[float, float, bool]], ...]
_Told = tuple[tuple[tuple[float, ...], float], ...]  # values in the order of the paths, and a rank


def recorded(
    experiment: Experiment, arm: str, record: RunRecord | None
) -> Mapping[str, float] | None:
    """Return the values of a trial that has begun; None of others."""
    if record is None or not record.starts:
        return None
    found = {}
    for path in experiment.ranges(arm):
        value: Any = record.start.config
        for part in path.split("."):
            value = value[part]
        found[path] = float(value)
    return found


def asked(
    experiment: Experiment,
    arm: str,
    number: int,
    points: Mapping[float, Mapping[str, float]],
    told: Sequence[Candidate],
) -> Mapping[str, float]:
    """Return the values of a trial, given what became of those before it.

    ``number`` is from 1. ``points`` has the values of the trials before it, by their numbers, and
    ``told`` what became of them; empty for one that is drawn at random.

    Raises:
        InvalidArgument: Optuna is not installed.
    """
    search = experiment.sweep.search if experiment.sweep else None
    assert search is not None
    ranges = experiment.ranges(arm)
    ranks = [None if each.metric is None else rank(experiment.metric, each.metric) for each in told]
    worst = max((each for each in ranks if each is not None), default=None)
    seen = tuple(
        (tuple(points[each.value][path] for path in ranges), worst if mine is None else mine)
        for each, mine in zip(told, ranks, strict=True)
        if worst is not None
    )
    values = _ask(tuple(ranges.items()), seen, search.seed, number)
    return dict(zip(ranges, values, strict=True))


def check_search(study: Study) -> None:
    """Refuse a study with a search where Optuna is not installed."""
    if any(each.sweep is not None and each.sweep.search is not None for each in study.experiments):
        _optuna()


def there() -> bool:
    """Return whether Optuna is installed."""
    return importlib.util.find_spec("optuna") is not None


@lru_cache(maxsize=1024)
def _ask(ranges: _Ranges, told: _Told, seed: int, number: int) -> tuple[float, ...]:
    optuna = _optuna()
    distributions = {
        path: optuna.distributions.FloatDistribution(low, high, log=log)
        for path, (low, high, log) in ranges
    }
    # A sampler of its own for each trial: what it draws does not depend on who asked before.
    drawn = optuna.samplers.RandomSampler(seed=1000 * seed + number)
    sampler = drawn
    if told:
        sampler = optuna.samplers.GPSampler(
            seed=1000 * seed + number, independent_sampler=drawn, n_startup_trials=1
        )
    study = optuna.create_study(sampler=sampler)
    for values, metric in told:
        params = dict(zip(distributions, values, strict=True))
        made = optuna.trial.create_trial(params=params, distributions=distributions, value=metric)
        study.add_trial(made)
    found = study.ask(distributions).params
    return tuple(
        min(max(float(f"{found[path]:.{_DIGITS}g}"), low), high) for path, (low, high, _) in ranges
    )


def _optuna() -> Any:
    try:
        optuna = importlib.import_module("optuna")
    except ImportError as error:
        came, fix = f"optuna, and it cannot be imported ({error})", "pip install 'tilewise[search]'"
        required = "a Python with the package optuna"
        raise InvalidArgument("sweep.search", came, required, fix) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


Records = Mapping[str, RunRecord]


@dataclass(frozen=True)
class Rung:
    """The trials of an arm that have the same length."""

    runs: Mapping[float, tuple[RunSpec, ...]]  # candidate -> its runs, one a seed

    @property
    def steps(self) -> int:
        """The optimizer steps of every trial."""
        return next(iter(self.runs.values()))[0].config.steps

    def over(self, records: Records) -> bool:
        """Return whether every trial has ended."""
        return all(is_over(run.name, records) for each in self.runs.values() for run in each)

    def candidates(self, metric: str, records: Records) -> tuple[Candidate, ...]:
        """Return what became of every candidate so far, in ascending order."""
        return tuple(
            _candidate(value, [records.get(run.name, RunRecord()) for run in runs], metric)
            for value, runs in sorted(self.runs.items())
        )


def _ranked(candidates: Iterable[Candidate], metric: str) -> list[float]:
    """Return the values of those that did not diverge, the best first."""
    done = [
        (rank(metric, each.metric), each.value) for each in candidates if each.metric is not None
    ]
    return [value for _, value in sorted(done)]


def rungs_of(experiment: Experiment, arm: str, records: Records) -> list[Rung]:
    """Return the rungs of an arm that are known, the first one always; none without a sweep.

    Fewer than ``sweep.rungs`` where trials are missing, or where every candidate has diverged.
    """
    sweep = experiment.sweep
    if sweep is None:
        return []
    if sweep.search is not None:
        return [_searched(experiment, arm, records)]
    values = experiment.candidates(arm)
    count, found = len(values), []
    for number in range(sweep.rungs):
        rung = _rung(experiment, arm, values, number)
        found.append(rung)
        if not rung.over(records):
            break
        ranked = _ranked(rung.candidates(experiment.metric, records), experiment.metric)
        values = tuple(ranked[: sweep.candidates_of(count, number + 1)])
        if not values:
            break
    return found


def _searched(experiment: Experiment, arm: str, records: Records) -> Rung:
    """Return the trials of a search that are known: each is asked for when it may be."""
    sweep = experiment.sweep
    assert sweep is not None
    assert sweep.search is not None
    runs: dict[float, tuple[RunSpec, ...]] = {}
    points: dict[float, Mapping[str, float]] = {}
    at_random = sweep.search.first
    for value in experiment.candidates(arm):
        name = trial(experiment, arm, value, 0, sweep.seeds[0]).name
        point = recorded(experiment, arm, records.get(name))
        if point is None:
            before = Rung(runs)
            if value > at_random and not before.over(records):
                break  # it follows from the trials before it
            told = before.candidates(experiment.metric, records) if value > at_random else ()
            # Without Optuna a study is only looked at: the arm's own values stand in.
            point = {}
            if there():
                point = asked(experiment, arm, int(value), points, told)
        points[value] = point
        runs[value] = tuple(trial(experiment, arm, value, 0, seed, point) for seed in sweep.seeds)
    return Rung(runs)


def _rung(experiment: Experiment, arm: str, values: Sequence[float], number: int) -> Rung:
    seeds = experiment.sweep.seeds if experiment.sweep else ()
    runs = {
        value: tuple(trial(experiment, arm, value, number, seed) for seed in seeds)
        for value in values
    }
    return Rung(runs)


def known_trials(experiment: Experiment, records: Records) -> list[RunSpec]:
    """Return every trial that is known, rung by rung; seeds outside, then candidates, then arms."""
    rungs = [rungs_of(experiment, name, records) for name in experiment.arm_names]
    return _in_order([placed for each in rungs for placed in enumerate(each)])


def expected_trials(experiment: Experiment, records: Records) -> list[RunSpec]:
    """Stand-ins for the trials of later rungs: as many, and as long, whatever will be tried."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    found = []
    for name in experiment.arm_names:
        values = experiment.candidates(name)
        known = rungs_of(experiment, name, records)
        if sweep.search is not None:
            left = values[len(known[-1].runs) :]
            found += [(len(known), _rung(experiment, name, left, 0))] if left else []
            continue
        if known[-1].over(records):
            continue  # nothing follows: it was the last, or all have diverged
        for number in range(len(known), sweep.rungs):
            tried = values[: sweep.candidates_of(len(values), number)]
            found.append((number, _rung(experiment, name, tried, number)))
    return _in_order(found)


def tuning_tokens(experiment: Experiment, arm: str) -> int:
    """Return tokens that the sweep may spend on an arm: every trial of every rung.

    The same share of a run's tokens for every arm; less is taken only where candidates diverge.
    """
    sweep = experiment.sweep
    if sweep is None:
        return 0
    config, count = experiment.config_of(arm), len(experiment.candidates(arm))
    steps = sum(
        sweep.candidates_of(count, rung) * sweep.steps_of(config.steps, rung)
        for rung in range(sweep.rungs)
    )
    return steps * len(sweep.seeds) * config.tokens_per_step


def _in_order(rungs: Iterable[tuple[int, Rung]]) -> list[RunSpec]:
    """Runs of equal rank in turn, so that no arm is ahead of the others."""
    ranked = [
        ((number, at_seed, at_value), run)
        for number, rung in rungs
        for at_value, runs in enumerate(rung.runs.values())
        for at_seed, run in enumerate(runs)
    ]
    return [run for _, run in sorted(ranked, key=lambda each: each[0])]


def sweep_results(experiment: Experiment, records: Records) -> tuple[SweepResult, ...]:
    """Return the sweep of every arm, the baseline first; empty where the experiment has none."""
    if experiment.sweep is None:
        return ()
    return tuple(_result(experiment, arm, records) for arm in experiment.arm_names)


def all_diverged(sweep: SweepResult) -> bool:
    """Return whether every value diverged: then the arm has no runs that count."""
    return all(each.status == "diverged" for each in sweep.candidates)


def _result(experiment: Experiment, arm: str, records: Records) -> SweepResult:
    sweep = experiment.sweep
    assert sweep is not None
    known = rungs_of(experiment, arm, records)
    metric = experiment.metric
    rungs = tuple(RungResult(each.steps, each.candidates(metric, records)) for each in known)
    # Of a value that several rungs tried, the longest trial counts.
    last = {each.value: each for rung in rungs for each in rung.candidates}
    candidates = tuple(last[value] for value in sorted(last))
    search = sweep.search is not None
    if search:
        firsts = [records.get(runs[0].name) for runs in known[-1].runs.values()]  # of each trial
        points = [recorded(experiment, arm, record) for record in firsts]
        candidates = tuple(
            replace(each, point=dict(point or {}))
            for each, point in zip(candidates, points, strict=True)
        )
    over = known[-1].over(records) and (
        not search or len(candidates) == len(experiment.candidates(arm))
    )
    chosen = _chosen(rungs, metric) if over else None
    alive = [each.value for each in candidates if each.status == "done"]
    ends = (candidates[0].value, candidates[-1].value)
    at_edge = chosen in ends and len(candidates) > 1 and not search
    found = _search_words if search else _words
    return SweepResult(
        arm=arm,
        path=sweep.label,
        candidates=candidates,
        chosen=chosen,
        survived=Interval(min(alive), max(alive)) if alive and not search else None,
        at_edge=at_edge,
        words=found(f"{arm}, {sweep.label}", candidates, chosen, over, at_edge),
        rungs=rungs if sweep.halving is not None else (),
        budget_tokens=tuning_tokens(experiment, arm),
    )


def _chosen(rungs: Sequence[RungResult], metric: str) -> float | None:
    """Return the best of the longest rung that has any candidate which diverged in no rung."""
    lost = {each.value for rung in rungs for each in rung.candidates if each.status == "diverged"}
    for rung in reversed(rungs):
        ranked = _ranked((each for each in rung.candidates if each.value not in lost), metric)
        if ranked:
            return ranked[0]
    return None


def _candidate(value: float, runs: Sequence[RunRecord], metric: str) -> Candidate:
    states = {status(each, metric) for each in runs}
    if states != {"done"}:
        return Candidate(value, "diverged" if "diverged" in states else "incomplete", None)
    values = [final_metric(each, metric) for each in runs]
    return Candidate(value, "done", statistics.fmean(each for each in values if each is not None))


def _search_words(
    what: str, candidates: Sequence[Candidate], chosen: float | None, over: bool, at_edge: bool
) -> str:
    done = sum(each.status != "incomplete" for each in candidates)
    lost = sum(each.status == "diverged" for each in candidates)
    text = f"{what}: {done} are done" + ("" if over else " so far")
    best = next((each for each in candidates if each.value == chosen), None)
    if best is not None:
        values = ", ".join(f"{path} {value:g}" for path, value in best.point.items())
        text += f"; number {best.value:g} did best, with {values}"
    return f"{text}; {lost} diverged." if lost else f"{text}; none diverged."


def _words(
    what: str, candidates: Sequence[Candidate], chosen: float | None, over: bool, at_edge: bool
) -> str:
    tried = ", ".join(f"{each.value:g}" for each in candidates)
    lost = [f"{each.value:g}" for each in candidates if each.status == "diverged"]
    text = f"{what}: tried {tried}"
    if not over:
        done = sum(each.status != "incomplete" for each in candidates)
        text += f"; {done} of {len(candidates)} are done"
    elif chosen is not None:
        text += f"; {chosen:g} did best"
    text += f"; diverged: {', '.join(lost)}." if lost else "; none diverged." if over else "."
    if at_edge:
        text += " The best is the last value tried on its side: a better one may lie beyond it."
    return text
