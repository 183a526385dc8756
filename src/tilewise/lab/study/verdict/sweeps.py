"""What the trials of a sweep say: which value was chosen, and which values survived."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tilewise.lab.study.config import Experiment
from tilewise.lab.study.metrics import rank
from tilewise.lab.study.records import RunRecord
from tilewise.lab.study.run import trials
from tilewise.lab.study.verdict.measures import final_metric, status
from tilewise.lab.study.verdict.quantities import Interval
from tilewise.lab.study.verdict.result import Candidate, SweepResult

__all__ = ["all_diverged", "sweep_results"]


def sweep_results(
    experiment: Experiment, records: Mapping[str, RunRecord]
) -> tuple[SweepResult, ...]:
    """The sweep of every arm, the baseline first; empty where the experiment has none."""
    if experiment.sweep is None:
        return ()
    found: dict[str, dict[float, list[RunRecord]]] = {}
    for run in trials(experiment):
        assert run.candidate is not None
        record = records.get(run.name, RunRecord())
        found.setdefault(run.arm, {}).setdefault(run.candidate, []).append(record)
    path = experiment.sweep.path
    return tuple(_result(arm, path, found[arm], experiment.metric) for arm in experiment.arm_names)


def all_diverged(sweep: SweepResult) -> bool:
    """Whether every value diverged: then the arm has no runs that count."""
    return all(each.status == "diverged" for each in sweep.candidates)


def _result(
    arm: str, path: str, found: Mapping[float, Sequence[RunRecord]], metric: str
) -> SweepResult:
    candidates = [_candidate(value, found[value], metric) for value in sorted(found)]
    done = [(each.metric, each.value) for each in candidates if each.metric is not None]
    ranked = sorted((rank(metric, found), value) for found, value in done)
    known = all(each.status != "incomplete" for each in candidates)
    chosen = ranked[0][1] if ranked and known else None
    alive = [each.value for each in candidates if each.status == "done"]
    ends = (candidates[0].value, candidates[-1].value)
    return SweepResult(
        arm=arm,
        path=path,
        candidates=tuple(candidates),
        chosen=chosen,
        survived=Interval(min(alive), max(alive)) if alive else None,
        at_edge=chosen in ends and len(candidates) > 1,
        words=_words(path, candidates, chosen, known, ends),
    )


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
    path: str,
    candidates: Sequence[Candidate],
    chosen: float | None,
    known: bool,
    ends: tuple[float, float],
) -> str:
    tried = ", ".join(f"{each.value:g}" for each in candidates)
    lost = [f"{each.value:g}" for each in candidates if each.status == "diverged"]
    text = f"{path}: tried {tried}"
    if not known:
        done = sum(each.status != "incomplete" for each in candidates)
        text += f"; {done} of {len(candidates)} are done"
    elif chosen is not None:
        text += f"; {chosen:g} did best"
    text += f"; diverged: {', '.join(lost)}." if lost else "; none diverged." if known else "."
    if chosen in ends and len(candidates) > 1:
        text += " The best is the last value tried on its side: a better one may lie beyond it."
    return text
