"""Results of a sweep's trials: the chosen value, and the values that survived."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import rank
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.measures import final_metric, status
from tilelab.study.verdict.result import Candidate, Interval, RungResult, SweepResult
from tilelab.study.verdict.tuning import Rung, rungs_of, tuning_tokens

__all__ = ["all_diverged", "sweep_results"]

Records = Mapping[str, RunRecord]


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
    rungs = tuple(_rung(each, records, experiment.metric) for each in known)
    # Of a value that several rungs tried, the longest trial counts.
    last = {each.value: each for rung in rungs for each in rung.candidates}
    candidates = tuple(last[value] for value in sorted(last))
    over = known[-1].over(records)
    chosen = _chosen(rungs, experiment.metric) if over else None
    alive = [each.value for each in candidates if each.status == "done"]
    ends = (candidates[0].value, candidates[-1].value)
    at_edge = chosen in ends and len(candidates) > 1
    return SweepResult(
        arm=arm,
        path=sweep.path,
        candidates=candidates,
        chosen=chosen,
        survived=Interval(min(alive), max(alive)) if alive else None,
        at_edge=at_edge,
        words=_words(f"{arm}, {sweep.path}", candidates, chosen, over, at_edge),
        rungs=rungs if sweep.halving is not None else (),
        budget_tokens=tuning_tokens(experiment, arm),
    )


def _chosen(rungs: Sequence[RungResult], metric: str) -> float | None:
    """Return the best of the longest rung that has any candidate which diverged in no rung."""
    lost = {each.value for rung in rungs for each in rung.candidates if each.status == "diverged"}
    for rung in reversed(rungs):
        ranked = sorted(
            (rank(metric, each.metric), each.value)
            for each in rung.candidates
            if each.metric is not None and each.value not in lost
        )
        if ranked:
            return ranked[0][1]
    return None


def _rung(rung: Rung, records: Records, metric: str) -> RungResult:
    found = {
        value: [records.get(run.name, RunRecord()) for run in runs]
        for value, runs in rung.runs.items()
    }
    candidates = tuple(_candidate(value, found[value], metric) for value in sorted(found))
    return RungResult(rung.steps, candidates)


def _candidate(value: float, runs: Sequence[RunRecord], metric: str) -> Candidate:
    states = {status(each, metric) for each in runs}
    if "diverged" in states:
        return Candidate(value, "diverged", None)
    values = [final_metric(each, metric) for each in runs]
    finished = [each for each in values if each is not None]
    if "incomplete" in states:
        return Candidate(value, "incomplete", None)
    return Candidate(value, "done", statistics.fmean(finished))


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
