"""Which runs a study consists of, in which order, and which of them may start now.

The order:

* seeds are the outer loop and arms the inner one, so that a study that is stopped early has the
  same seeds of every arm, as far as it came;
* arms take turns at being first, so that no arm always meets the machine in the same state;
* an experiment with a sweep runs the trials of all its arms, and then, with the values that they
  chose, the runs that count; while some trials still run, later experiments keep the machine busy;
* a run of an experiment that compares kernels (one that has a systems arm) runs alone: what runs
  beside it would be part of what is measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tilewise.errors import TilewiseError
from tilewise.lab.study.config import Experiment, Study
from tilewise.lab.study.metrics import rank
from tilewise.lab.study.records import RunRecord
from tilewise.lab.study.run import Run, finals, trials
from tilewise.lab.study.verdict.measures import final_metric

__all__ = [
    "Agenda",
    "Task",
    "chosen_value",
    "planned",
]


@dataclass(frozen=True)
class Task:
    """A run and how it is to be run.

    Args:
        run: what.
        alone: nothing else of the study runs meanwhile.
    """

    run: Run
    alone: bool


def chosen_value(
    experiment: Experiment, arm: str, records: Mapping[str, RunRecord]
) -> float | None:
    """What the sweep chose for an arm, from the finished records of its trials.

    The candidate with the best mean of the final metric over the sweep's seeds; of equals the
    smallest. One that diverged with any seed is not chosen.

    Returns:
        the value; None where every candidate diverged: then the arm has no final runs.
    """
    means: dict[float, list[float]] = {}
    for run in trials(experiment):
        if run.arm == arm:
            assert run.candidate is not None
            value = final_metric(records[run.name], experiment.metric)
            worth = math.inf if value is None else rank(experiment.metric, value)
            means.setdefault(run.candidate, []).append(worth)
    ranked = sorted((sum(values) / len(values), candidate) for candidate, values in means.items())
    best, candidate = ranked[0]
    return candidate if math.isfinite(best) else None


def planned(study: Study) -> list[Task]:
    """Every run of a study, as if each sweep chose its first candidate: for estimates before it."""
    tasks = []
    for experiment in study.experiments:
        sweep = experiment.sweep
        firsts = {} if sweep is None else {arm: values[0] for arm, values in sweep.values.items()}
        alone = _alone(experiment)
        runs = [*trials(experiment), *finals(experiment, firsts)]
        tasks += [Task(run, alone) for run in runs]
    return tasks


def _alone(experiment: Experiment) -> bool:
    return any(arm.kind == "systems" for arm in experiment.arms)


class Agenda:
    """What is done and what may be done next.

    Args:
        study: the config.
        records: of runs so far, by name.
    """

    def __init__(self, study: Study, records: Mapping[str, RunRecord]) -> None:
        self.study = study
        self.records = dict(records)
        self._trials = {each.name: trials(each) for each in study.experiments}
        self._tasks: list[Task] = []
        self._plan()

    def ended(self, run: Run, record: RunRecord) -> None:
        """A run has ended, and this is its record."""
        self.records[run.name] = record
        self._plan()

    @property
    def finished(self) -> bool:
        """Whether every run has ended."""
        return self.done == self.total

    @property
    def total(self) -> int:
        """Runs of the whole study; an arm whose candidates all diverged has only its trials."""
        return sum(
            len(self._trials[experiment.name])
            + len(experiment.seeds) * (len(experiment.arm_names) - self._lost(experiment))
            for experiment in self.study.experiments
        )

    @property
    def done(self) -> int:
        """Runs that have ended, diverged ones too."""
        return sum(self._is_done(task.run) for task in self._tasks)

    def ready(self) -> list[Task]:
        """The runs that have not ended and that may start now, those first that should be."""
        return [task for task in self._tasks if not self._is_done(task.run)]

    def check(self) -> None:
        """Make sure that what is there belongs to the study that is to go on.

        A study that is only looked at need not: another version of tilewise may have run it.

        Raises:
            TilewiseError: a record is of another config.
        """
        for task in self._tasks:
            record, run = self.records.get(task.run.name), task.run
            if record is not None and record.start.config_hash != run.config_hash:
                raise TilewiseError(
                    f"the record of {run.name} is of another config ({record.start.config_hash}; "
                    f"the study's is {run.config_hash}): it was put there or changed by hand; "
                    "remove the folder of that run to run it again"
                )

    def _plan(self) -> None:
        """All runs whose config is known, in order."""
        self._tasks = []
        for experiment in self.study.experiments:
            alone = _alone(experiment)
            runs = (*self._trials[experiment.name], *finals(experiment, self._chosen(experiment)))
            self._tasks += [Task(run, alone) for run in runs]

    def _chosen(self, experiment: Experiment) -> dict[str, float | None]:
        """What is known of the sweep: nothing before its last trial has ended.

        So all arms begin to count together, and a study that is stopped has none without the rest.
        """
        known = all(map(self._is_done, self._trials[experiment.name]))
        if experiment.sweep is None or not known:
            return {}
        names = experiment.arm_names
        return {name: chosen_value(experiment, name, self.records) for name in names}

    def _lost(self, experiment: Experiment) -> int:
        return sum(value is None for value in self._chosen(experiment).values())

    def _is_done(self, run: Run) -> bool:
        record = self.records.get(run.name)
        return record is not None and record.done
