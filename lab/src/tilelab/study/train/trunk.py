"""Trunks: first steps that several runs of a study have in common, trained once.

Runs of a ladder that differ in their length alone, with a schedule whose first steps do not depend
on it (``wsd`` with ``warmup_steps``), take the same steps up to the point where the shorter one
begins to decay. The shorter run leaves its state there, and a longer one goes on from it. All of it
is to the bit what the longer run would have trained by itself, so it does not matter whether a
trunk is found.

A trunk is a file ``trunks/RUNS-STEP-RATES.safetensors`` in the study's folder. ``RUNS`` is the hash
of the seed and of all of the config but the budget, the evaluation and the schedule; ``RATES`` is
the hash of the learning rates' shares of the steps so far. Whatever schedule a run has, it may go
on from a trunk whose rates are its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.ask.values import hash_of
from tilelab.study.choices import schedules
from tilelab.study.records.events import CorruptRecordError, Evaluation, RunRecord, Step
from tilelab.study.train import state as states
from tilelab.study.train.state import State

_FOLDER = "trunks"
_FREE = {"budget", "evaluation", "schedule"}  # what runs of one trunk may differ in
_RUN = "run"  # in the totals of a trunk: who trained it


class Trunk(NamedTuple):
    """A state that a run may go on from, and what its record says of the steps so far."""

    state: State
    steps: list[Step]
    evaluations: list[Evaluation]


def branch_step(config: RunConfig) -> int:
    """Return the number of first steps that a longer run of the same config would take too."""
    steps, schedule = config.steps, config.schedule
    for step in range(steps):
        own = schedules.factor(schedule, step, steps)
        if own != schedules.factor(schedule, step, 2 * steps):
            return step
    return steps


def leave(run: RunSpec, state: State) -> None:
    """Put down the state of a run for longer ones; nothing where it is there already."""
    path = _path(run, state.step)
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    totals = {**state.totals, _RUN: run.name}
    identity = _identity(run, state.identity)
    states.write(State(identity, state.step, state.tensors, state.values, totals), path)


def found(run: RunSpec, identity: dict[str, str]) -> Trunk | None:
    """Return the longest trunk that the run may go on from; None where there is none.

    Raises:
        CheckpointError: a trunk is damaged, or was trained on another text.
    """
    for step in sorted(_steps(run), reverse=True):
        path = _path(run, step)
        if step > branch_step(run.config) or not path.exists():  # rates of another schedule
            continue
        state = states.read(path, _identity(run, identity))
        assert state is not None
        trained = str(state.totals.pop(_RUN))
        try:
            record = RunRecord.read(run.execution.folder / "runs" / trained / RECORD)
        except CorruptRecordError:
            continue  # the run trains these steps itself
        if record.whole_steps < step:
            continue
        state.identity = dict(identity)
        evaluations = [each for each in record.evaluations if each.step <= step]
        return Trunk(state, record.steps[:step], evaluations)
    return None


def _steps(run: RunSpec) -> Iterator[int]:
    """Yield the steps of all trunks of runs like this one."""
    for path in (run.execution.folder / _FOLDER).glob(f"{family(run)}-*.safetensors"):
        yield int(path.stem.split("-")[1])


def _path(run: RunSpec, step: int) -> Path:
    config = run.config
    rates = [schedules.factor(config.schedule, at, config.steps) for at in range(step)]
    digest = hashlib.sha256(json.dumps(rates).encode()).hexdigest()[:12]
    return run.execution.folder / _FOLDER / f"{family(run)}-{step}-{digest}.safetensors"


def family(run: RunSpec) -> str:
    """Return the hash of the seed and of all of the config that runs of one trunk share."""
    config = run.config.model_dump(mode="json", exclude=_FREE)
    return hash_of({"seed": run.seed, "config": config})


def _identity(run: RunSpec, own: dict[str, str]) -> dict[str, str]:
    """Return a run's identity with the runs of the trunk in place of its own config."""
    return {**own, "config": family(run)}
