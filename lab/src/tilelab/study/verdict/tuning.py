"""The trials of a sweep, rung by rung, as the finished records of the earlier ones decide them.

A sweep without halving has one rung. A rung of an arm is known when all trials of the arm's rung
before it have ended. Its candidates are the best of those by the mean of the final metric over the
sweep's seeds; on a tie the smaller value wins. One that diverged with any seed never goes on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import rank
from tilelab.study.ask.run import Run, trial
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.measures import final_metric

__all__ = ["Rung", "expected_trials", "known_trials", "rungs_of", "tuning_tokens"]

Records = Mapping[str, RunRecord]


@dataclass(frozen=True)
class Rung:
    """The trials of an arm that have the same length.

    Args:
        number: 0 for the first.
        runs: candidate -> its runs, one a seed.
    """

    number: int
    runs: Mapping[float, tuple[Run, ...]]

    @property
    def steps(self) -> int:
        """The optimizer steps of every trial."""
        return next(iter(self.runs.values()))[0].config.steps

    def over(self, records: Records) -> bool:
        """Return whether every trial has ended."""
        runs = (run for each in self.runs.values() for run in each)
        return all((record := records.get(run.name)) is not None and record.done for run in runs)

    def ranked(self, experiment: Experiment, records: Records) -> list[tuple[float, float]]:
        """(mean final metric, candidate) of those that did not diverge, the best first."""
        found = []
        for candidate, runs in self.runs.items():
            values = [final_metric(records[run.name], experiment.metric) for run in runs]
            known = [each for each in values if each is not None]
            if len(known) == len(values):
                found.append((math.fsum(known) / len(known), candidate))
        return sorted(found, key=lambda each: (rank(experiment.metric, each[0]), each[1]))


def rungs_of(experiment: Experiment, arm: str, records: Records) -> list[Rung]:
    """Return the rungs of an arm that are known, the first one always; none without a sweep.

    Fewer than ``sweep.rungs`` where trials are missing, or where every candidate has diverged.
    """
    sweep = experiment.sweep
    if sweep is None:
        return []
    values = experiment.candidates(arm)
    count, found = len(values), []
    for number in range(sweep.rungs):
        runs = {
            value: tuple(trial(experiment, arm, value, number, seed) for seed in sweep.seeds)
            for value in values
        }
        rung = Rung(number, runs)
        found.append(rung)
        if not rung.over(records):
            break
        best = rung.ranked(experiment, records)[: sweep.candidates_of(count, number + 1)]
        values = tuple(value for _, value in best)
        if not values:
            break
    return found


def known_trials(experiment: Experiment, records: Records) -> list[Run]:
    """Return every trial that is known, rung by rung; seeds outside, then candidates, then arms."""
    rungs = {name: rungs_of(experiment, name, records) for name in experiment.arm_names}
    return _in_order([rung for each in rungs.values() for rung in each])


def expected_trials(experiment: Experiment, records: Records) -> list[Run]:
    """Stand-ins for the trials of later rungs: as many, and as long, whatever will be tried."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    found = []
    for name in experiment.arm_names:
        values = experiment.candidates(name)
        known = rungs_of(experiment, name, records)
        if known[-1].over(records):
            continue  # nothing follows: it was the last, or all have diverged
        for number in range(len(known), sweep.rungs):
            tried = values[: sweep.candidates_of(len(values), number)]
            runs = {
                value: tuple(trial(experiment, name, value, number, seed) for seed in sweep.seeds)
                for value in tried
            }
            found.append(Rung(number, runs))
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


def _in_order(rungs: list[Rung]) -> list[Run]:
    """Runs of equal rank in turn, so that no arm is ahead of the others."""
    ranked = [
        ((rung.number, at_seed, at_value), run)
        for rung in rungs
        for at_value, runs in enumerate(rung.runs.values())
        for at_seed, run in enumerate(runs)
    ]
    return [run for _, run in sorted(ranked, key=lambda each: each[0])]
