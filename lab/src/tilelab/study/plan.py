"""The runs of a study, their order, and which of them may start now.

The order:

* seeds are the outer loop and arms the inner one: a study that is stopped early has the same seeds
  of every arm, as far as it came;
* arms take turns at being first, so that no arm always meets the machine in the same state;
* an experiment with a sweep runs the trials of all its arms first, and then the runs that count,
  with the values that the trials chose. While some trials still run, later experiments keep the
  machine busy. With successive halving the trials of an arm's rung follow from those of its last
  one;
* an experiment of several stages runs each stage when the one before it is over, by the verdict on
  it;
* a sequential experiment runs the seeds of a look, and those of the next one for the arms that are
  not decided then;
* a run whose config and seed are those of another one elsewhere in the study takes over its record:
  ``RunSpec.is_like``. It waits while that one is running;
* a run of an experiment that compares kernels (one that has a systems arm) runs alone, because
  anything that runs beside it would be part of the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.run import RunSpec, finals
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.verdict.detect import Families, families_of
from tilelab.study.verdict.judge import stages_of, wanted_seeds
from tilelab.study.verdict.ladder import rates
from tilelab.study.verdict.stages import follows, stand_ins
from tilelab.study.verdict.sweeps import expected_trials, known_trials, sweep_results
from tilewise.errors import TilewiseError


def planned(study: Study, records: Mapping[str, RunRecord] | None = None) -> list[RunSpec]:
    """Return every run that a study is expected to have, for estimates of its length.

    Stand-ins replace what is not known before other runs have ended: a sweep is taken to choose its
    first candidates, rung by rung.
    """
    families = families_of(study)
    return [
        run
        for experiment in study.experiments
        for part in _runs(experiment, records or {}, families)
        for run in part
    ]


class _Runs(NamedTuple):
    known: list[RunSpec]
    expected: list[RunSpec]  # stand-ins for those that are not known yet


def _runs(experiment: Experiment, records: Mapping[str, RunRecord], families: Families) -> _Runs:
    # No arm counts before the last trial of all has ended. So all arms begin to count together, and
    # a study that is stopped has none without the rest.
    if experiment.ladder is not None:
        return _ladder_runs(experiment, records)
    stages = [experiment]
    staged = experiment.combine is not None or experiment.confirm is not None
    # Judging takes a while: nothing can follow before the first stage is over.
    if staged and _over(_stage_runs(experiment, records, families), records):
        stages = [each.planned for each in stages_of(experiment, records, families)]
    parts = [_stage_runs(each, records, families) for each in stages]
    known = [run for part in parts for run in part.known]
    expected = [run for part in parts for run in part.expected]
    if staged and not _over(_Runs(known, expected), records):
        later = [each for each in stand_ins(experiment) if follows(each, stages[-1])]
        expected += [
            run for each in later for part in _stage_runs(each, {}, families) for run in part
        ]
    return _Runs(known, expected)


def _ladder_runs(experiment: Experiment, records: Mapping[str, RunRecord]) -> _Runs:
    """Return the runs of a ladder: trials of the tuned rungs first, then all rungs upwards."""
    found = rates(experiment, records)
    tuned = [each for each in experiment.rungs.values() if each.sweep is not None]
    trials = [run for each in tuned for run in known_trials(each, records)]
    if found is None:
        return _Runs(trials, _rung_finals(experiment, dict.fromkeys(experiment.rungs)))
    return _Runs([*trials, *_rung_finals(experiment, found)], [])


def _rung_finals(
    experiment: Experiment, found: Mapping[str, Mapping[str, float | None] | None]
) -> list[RunSpec]:
    """Return the runs of all rungs with their rates; first candidates where there are none."""
    ladder = experiment.ladder
    shared = ladder.shared if ladder is not None and ladder.axis == "tokens" else ()
    return [
        run
        for name, planned in experiment.rungs.items()
        for run in finals(planned, _tuned(experiment, found[name]), branching=shared)
    ]


_Tuned = Mapping[str, Mapping[str, float] | None] | None  # as ``run.finals`` takes it


def _tuned(experiment: Experiment, rates: Mapping[str, float | None] | None = None) -> _Tuned:
    """Return what the arms are tuned to: their rates, or a sweep's first candidates without any."""
    sweep = experiment.sweep
    if sweep is None:
        return None
    if sweep.search is not None:  # whose first trial has the arm's own values
        return {name: {} for name in experiment.arm_names}
    if rates is None:
        rates = {name: experiment.candidates(name)[0] for name in experiment.arm_names}
    return {arm: None if rate is None else {sweep.path: rate} for arm, rate in rates.items()}


def _over(runs: _Runs, records: Mapping[str, RunRecord]) -> bool:
    return not runs.expected and all(is_over(run.name, records) for run in runs.known)


def _stage_runs(
    experiment: Experiment, records: Mapping[str, RunRecord], families: Families
) -> _Runs:
    if experiment.sweep is None:
        return _finals(experiment, None, records, families)
    known = known_trials(experiment, records)
    later = expected_trials(experiment, records)
    if not later and all(is_over(run.name, records) for run in known):
        chosen = {each.arm: each.values for each in sweep_results(experiment, records)}
        counted = _finals(experiment, chosen, records, families)
        return counted._replace(known=[*known, *counted.known])
    return _Runs(known, [*later, *finals(experiment, _tuned(experiment))])


def _finals(
    experiment: Experiment,
    tuned: _Tuned,
    records: Mapping[str, RunRecord],
    families: Families,
) -> _Runs:
    """Return the runs that count; for a sequential experiment, those of the looks so far."""
    every = finals(experiment, tuned)
    if experiment.sequential is None:
        return _Runs(every, [])
    wanted = wanted_seeds(experiment, records, families[experiment.name])
    known = finals(experiment, tuned, wanted)
    if all(is_over(run.name, records) for run in known):
        return _Runs(known, [])  # every arm is decided: a look that is not would ask for more
    names = {run.name for run in known}
    # At most: an arm that is decided at its look needs no more seeds.
    ahead = max(map(len, wanted.values()))
    later = [run for run in every if run.name not in names and len(wanted[run.arm]) == ahead]
    return _Runs(known, later)


class Agenda:
    """The finished runs, and those that may start next."""

    def __init__(self, study: Study, records: Mapping[str, RunRecord]) -> None:
        self.study = study
        self.records = dict(records)
        self._known: list[RunSpec] = []
        self._expected: list[RunSpec] = []
        self._families = families_of(study)
        self._plan()

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run has ended, and this is its record."""
        self.records[run.name] = record
        self._plan()

    @property
    def finished(self) -> bool:
        """Whether every run has ended."""
        return self.done == self.total

    @property
    def runs(self) -> list[RunSpec]:
        """All runs in order: those that are known, and stand-ins for those that follow from them.

        An arm whose candidates all diverged has only its trials.
        """
        return [*self._known, *self._expected]

    @property
    def total(self) -> int:
        """Runs of the whole study, as far as it is known."""
        return len(self._known) + len(self._expected)

    @property
    def done(self) -> int:
        """Runs that have ended, diverged ones too."""
        return sum(is_over(run.name, self.records) for run in self._known)

    def ready(self) -> list[RunSpec]:
        """Return the runs that have not ended and may start now, the preferred ones first."""
        return [run for run in self._known if not is_over(run.name, self.records)]

    def twin(self, run: RunSpec) -> RunSpec | None:
        """Return a run that has ended and is like this one; None where there is none."""
        over = (other for other in self._known if is_over(other.name, self.records))
        return next((other for other in over if run.is_like(other)), None)

    def check(self) -> None:
        """Refuse a record of another config: it does not belong to the study that is to go on.

        A study that is only looked at need not: another version of tilewise may have run it.
        """
        for run in self._known:
            record = self.records.get(run.name)
            if record is not None and record.start.config_hash != run.config_hash:
                raise TilewiseError(
                    f"the record of {run.name} is of another config ({record.start.config_hash}; "
                    f"the study's is {run.config_hash}): it was put there or changed by hand; "
                    "remove the folder of that run to run it again"
                )

    def _plan(self) -> None:
        self._known, self._expected = [], []
        for experiment in self.study.experiments:
            runs = _runs(experiment, self.records, self._families)
            self._known += runs.known
            self._expected += runs.expected


class Watcher:
    """Hears of events as they happen. A subclass says what it does; here that is nothing."""

    def started(self, run: RunSpec) -> None:
        """A process took up a run."""

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        """A line was added to the run's record. Raising an error ends the study."""

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """A run is over."""

    def lost(self, run: RunSpec, why: str) -> None:
        """The worker of a run went away; the run will be taken up again."""

    def paused(self, run: RunSpec) -> None:
        """A run stopped at a checkpoint, because time was over."""

    def tick(self) -> None:
        """Some time went by."""
