"""What a reader has to know besides the verdicts: does the comparison hold at all?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tilewise.lab.study.config import Experiment
from tilewise.lab.study.records import RunRecord
from tilewise.lab.study.verdict.measures import Metric, metric_of
from tilewise.lab.study.verdict.quantities import ArmMeasures
from tilewise.lab.study.verdict.words import UNITS, seeds_text

__all__ = ["experiment_notes", "pairing_note"]

# Weights that are equal give losses that differ by rounding, also of kernels and of bf16.
SAME_START = 5e-3
# What the speed of runs depends on, among what records keep of their machine.
_MACHINE = ("chip", "threads", "instruction_set", "versions", "commit")

Finals = Mapping[str, Mapping[int, RunRecord]]  # arm -> seed -> record


def experiment_notes(
    experiment: Experiment, finals: Finals, measures: Iterable[ArmMeasures]
) -> tuple[str, ...]:
    """What concerns all arms of an experiment, each a sentence.

    Args:
        experiment: its config.
        finals: the runs that count, the baseline's first.
        measures: of every arm, the baseline too.
    """
    records = [each for runs in finals.values() for each in runs.values() if each.starts]
    notes = [
        *_texts(experiment, finals),
        *_machines(records),
        *_target(experiment, records),
        *_utilisation(measures),
    ]
    if len(experiment.seeds) == 1:
        notes.append("One seed only: nothing can be tested, so there are no error bars.")
    return tuple(notes)


def pairing_note(
    arm: Mapping[int, RunRecord], baseline: Mapping[int, RunRecord], metric: Metric
) -> tuple[str, ...]:
    """A warning where an arm did not start from the weights of the baseline.

    Only where the model, the text, the evaluation and the precision are the baseline's: then the
    loss before the first step has to be the same.

    Args:
        arm: seed -> record.
        baseline: the same of the baseline.
        metric: of the experiment.
    """
    apart = []
    for seed, record in arm.items():
        other = baseline.get(seed)
        if other is None or not _same_beginning(record, other):
            continue
        mine, theirs = _first(record, metric), _first(other, metric)
        if mine is not None and theirs is not None and abs(mine - theirs) > SAME_START * theirs:
            apart.append(seed)
    if not apart:
        return ()
    seeds = seeds_text(apart)
    return (f"Not paired: the loss before the first step is not the baseline's with {seeds}.",)


def _same_beginning(record: RunRecord, other: RunRecord) -> bool:
    if not record.starts or not other.starts:
        return False
    return _beginning(record.start.config) == _beginning(other.start.config)


def _beginning(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the loss before the first step depends on."""
    model = {key: value for key, value in config["model"].items() if key != "dropout"}
    variant = config["attention"]["variant"]
    precision = config["training"]["precision"]
    return model, config["data"], config["evaluation"], variant, precision


def _first(record: RunRecord, metric: Metric) -> float | None:
    found = [each for each in record.evaluations if each.step == 0]
    return metric_of(found[0], metric) if found else None


def _texts(experiment: Experiment, finals: Finals) -> list[str]:
    """Arms with the same ``data`` have to have seen the same text."""
    texts: dict[str, set[Any]] = {}
    for arm, runs in finals.items():
        key = experiment.config_of(arm).data.model_dump_json()
        for record in runs.values():
            if record.starts:
                texts.setdefault(key, set()).update(
                    each.corpus.get("sha256") for each in record.starts
                )
    if all(len(found) <= 1 for found in texts.values()):
        return []
    return ["The text was not the same in all runs (its hash differs): losses do not compare."]


def _machines(records: Sequence[RunRecord]) -> list[str]:
    """Runs of several machines, or of several versions, are not comparable in speed."""
    starts = [start for record in records for start in record.starts]
    differing = []
    for key in _MACHINE:
        seen = {repr(each.environment[key]) for each in starts if key in each.environment}
        if len(seen) > 1:
            differing.append(key.replace("_", " "))
    if not differing:
        return []
    what = ", ".join(differing)
    return [f"The runs were not all made alike ({what} differ): their speeds do not compare."]


def _target(experiment: Experiment, records: Sequence[RunRecord]) -> list[str]:
    if experiment.target is None:
        return []
    values = [
        value
        for record in records
        for each in record.evaluations
        if (value := metric_of(each, experiment.metric)) is not None
    ]
    over = records and all(record.done for record in records)
    if not over or not values or min(values) <= experiment.target:
        return []
    unit = UNITS[experiment.metric]
    return [
        f"No run reached the target of {experiment.target:g} {unit}; the lowest evaluation was "
        f"{min(values):.4g}. Every arm is censored."
    ]


def _utilisation(measures: Iterable[ArmMeasures]) -> list[str]:
    shares = [each.mfu_causal.mean for each in measures if each.mfu_causal is not None]
    if max(shares, default=0.0) <= 1:
        return []
    return [
        "A utilisation (MFU) above 100 %: the peak that its run measured before the start was too "
        "low, probably because something else kept the machine busy."
    ]
