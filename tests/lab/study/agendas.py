"""Studies that are worked through without training: each run's record is what a behaviour says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from tests.lab.study.records_of import Behaviour, record_of
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import Execution
from tilelab.study.conduct.conductor import Conductor
from tilelab.study.plan import Agenda
from tilelab.study.records.events import RunRecord

__all__ = ["conductor_of", "work"]

Behaviours = Mapping[str, Behaviour]


def work(
    study: Study,
    behaviours: Behaviours | None = None,
    records: Mapping[str, RunRecord] | None = None,
    most: int | None = None,
    order: Random | None = None,
) -> Agenda:
    """The agenda when runs have ended, all of them or ``most``.

    Args:
        study: the config.
        behaviours: ``"arm"`` or ``"experiment/arm"`` -> how its runs come out; plainly else.
        records: of runs that ended before.
        most: runs to end; None for all.
        order: draws which of the runs that are ready ends next; None for the first.
    """
    known, left = behaviours or {}, most
    agenda = Agenda(study, records or {})
    agenda.check()
    metrics = {each.name: each.metric for each in study.experiments}
    while not agenda.finished and left != 0:
        ready = agenda.ready()
        run = order.choice(ready) if order else ready[0]
        behaviour = known.get(f"{run.experiment}/{run.arm}", known.get(run.arm, Behaviour()))
        metric = metrics.get(run.experiment, "bits_per_byte")
        agenda.ended(run, record_of(run, behaviour, metric))
        left = None if left is None else left - 1
    return agenda


def conductor_of(study: Study, out: Path, **fields: Any) -> Conductor:
    """A conductor of a study; ``fields`` are its own and those of its execution."""
    execution = {key: fields.pop(key) for key in Execution.model_fields.keys() & fields.keys()}
    return Conductor(study, "tilewise study run x", out, execution=Execution(**execution), **fields)
