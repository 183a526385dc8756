"""A run: one arm of one experiment with one seed; and the runs that an experiment consists of."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from tilelab.study.ask.config import Experiment, Frozen, RunConfig, config_hash, parse

RECORD = "record.jsonl"  # the file of events in the folder of a run
Strategy = Literal["ddp", "fsdp"]


class Execution(Frozen):
    """How and where the runs of a study are executed; nothing of it changes a result."""

    folder: Path = Path()  # of the study
    cache: Path = Path()  # of tokens
    threads: int = 1  # of each process
    device: Literal["cpu", "cuda"] = "cpu"
    processes: int = 1  # that train each run together, each with a device of its own
    strategy: Strategy = "ddp"  # how they share the model, see ``train/team.py``
    context: int = 1  # of the processes that share each sequence
    core: int | None = None  # that a run is pinned to; None for no pinning
    checkpoint_every_s: float = 10.0  # seconds between checkpoints of a run
    environment: dict[str, Any] = Field(default_factory=dict)  # where they ran, for the records
    module: str | None = None  # of the child; None: the package's own
    variables: dict[str, str] = Field(default_factory=dict)  # set in the environment
    working: Path | None = None  # of relative paths in configs, where a machine has it
    until: float | None = None  # the time, in seconds of Unix, after which no step begins


STANDARD = Execution()


@dataclass(frozen=True)
class RunSpec:
    """One training run, from the plan of a study to its record."""

    experiment: str
    arm: str
    seed: int  # of weights, order of the data and random numbers
    config: RunConfig
    phase: Literal["final", "sweep"] = "final"  # a trial chooses, and is cost only
    candidate: float | None = None  # the swept value of a trial
    rung: int | None = None  # of a trial of successive halving, 0 for the shortest; None for others
    alone: bool = False  # nothing else of the study runs meanwhile
    branches: bool = False  # runs of other lengths may share its first steps
    execution: Execution = STANDARD  # how and where; the standard one until the run is started

    @property
    def name(self) -> str:
        """``experiment/arm/seed-0``; of a trial ``experiment/arm/sweep-0.003-seed-1000``.

        A trial of successive halving has its rung too: ``.../sweep-0.003-rung-1-seed-1000``.
        """
        trial = f"sweep-{self.candidate:g}-" if self.phase == "sweep" else ""
        trial += "" if self.rung is None else f"rung-{self.rung}-"
        return f"{self.experiment}/{self.arm}/{trial}seed-{self.seed}"

    @cached_property
    def config_hash(self) -> str:
        """The hash of the config alone; a run refuses a checkpoint with another one."""
        return config_hash(self.config)

    def is_like(self, other: RunSpec) -> bool:
        """Return whether the other run comes to the same bits, elsewhere in the study.

        Arms of one experiment are compared, so each trains its own runs; and where kernels are
        compared, the times of a run are its result. Nobody knows that a script repeats its bits.
        """
        if self.config.learning.external:
            return False
        elsewhere = (self.experiment, self.phase) != (other.experiment, other.phase)
        if self.alone or other.alone or self.seed != other.seed or not elsewhere:
            return False
        return self.config_hash == other.config_hash

    def folder(self, study: Path) -> Path:
        """Return the folder that the run writes to, inside the folder of its study."""
        return study / "runs" / self.name

    @property
    def time_is_up(self) -> bool:
        """Whether the run has to stop, at a checkpoint, however far it is."""
        until = self.execution.until
        return until is not None and time.time() >= until

    @property
    def record(self) -> Path:
        """The file of the run's events."""
        return self.folder(self.execution.folder) / RECORD

    def executed(self, execution: Execution, **changes: Any) -> RunSpec:
        """Return the same run, executed in another way; ``changes`` are to fields of that."""
        return replace(self, execution=execution.model_copy(update=changes))

    def as_json(self) -> dict[str, Any]:
        """Return the run in JSON's types; ``from_json`` reads it back."""
        parts = {name: getattr(self, name).model_dump(mode="json") for name in _PARTS}
        return {**vars(self), "config_hash": self.config_hash, **parts}

    @property
    def facts(self) -> dict[str, Any]:
        """What a record says of the run when it starts, in JSON's types."""
        names = ("experiment", "arm", "seed", "phase", "candidate", "config", "config_hash")
        values = self.as_json()
        return {"run": self.name, **{name: values[name] for name in names}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RunSpec:
        """Return the inverse of ``as_json``."""
        own = {key: value for key, value in values.items() if key != "config_hash"}
        return cls(**own | {name: parse(kind, own[name]) for name, kind in _PARTS.items()})


_PARTS: Mapping[str, type[Frozen]] = {"config": RunConfig, "execution": Execution}


def final_name(experiment: Experiment, arm: str, seed: int) -> str:
    """Return the name of a run that counts."""
    return f"{experiment.name}/{arm}/seed-{seed}"


def trial(
    experiment: Experiment,
    arm: str,
    value: float,
    rung: int,
    seed: int,
    point: Mapping[str, float] | None = None,
) -> RunSpec:
    """Return one trial of an experiment's sweep; without halving, ``rung`` is 0.

    ``point`` has the values of a search's trial; without any it has the arm's own. The trial is
    scored on the text for tuning, where the data has one.
    """
    sweep = experiment.sweep
    assert sweep is not None
    changes: dict[str, Any] = {sweep.path: value} if sweep.search is None else {**(point or {})}
    if experiment.config_of(arm).data.tuning:
        changes["evaluation.text"] = "tuning"
    if sweep.halving is not None:
        changes["budget.steps"] = sweep.steps_of(experiment.config_of(arm).steps, rung)
    config = experiment.config_of(arm, changes)
    number = None if sweep.halving is None else rung
    return RunSpec(experiment.name, arm, seed, config, "sweep", value, number, experiment.alone)


def finals(
    experiment: Experiment,
    tuned: Mapping[str, Mapping[str, float] | None] | None = None,
    wanted: Mapping[str, Sequence[int]] | None = None,
    branching: Sequence[str] = (),
) -> list[RunSpec]:
    """Return the runs that count.

    Args:
        experiment: that has them.
        tuned: arm -> the values that its trials chose, by their paths; an arm that has none has no
            runs. None where every arm runs with the values of its config.
        wanted: arm -> its seeds; None for all.
        branching: arms whose runs share steps with those of other rungs.
    """
    names = experiment.arm_names
    found = []
    for index, seed in enumerate(experiment.seeds):
        first = index % len(names)
        for name in (*names[first:], *names[:first]):
            if seed not in (experiment.seeds_of(name) if wanted is None else wanted[name]):
                continue
            values = {} if tuned is None else tuned.get(name)
            if values is None:
                continue
            config = experiment.config_of(name, values)
            run = RunSpec(experiment.name, name, seed, config, alone=experiment.alone)
            found.append(replace(run, branches=name in branching))
    return found
