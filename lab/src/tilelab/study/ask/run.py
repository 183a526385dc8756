"""A run: one arm of one experiment with one seed; and the runs that an experiment consists of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tilelab.study.ask.config import Experiment, RunConfig, config_hash, parse

__all__ = ["RECORD", "Run", "finals", "trial", "trials"]

RECORD = "record.jsonl"  # the file of events in the folder of a run


@dataclass(frozen=True)
class Run:
    """The training run of one process.

    Args:
        experiment, arm: names.
        seed: of weights, order of the data and random numbers.
        config: everything else.
        phase: ``"sweep"`` for a trial, which chooses a value and then counts as cost only.
        candidate: the swept value of a trial.
        rung: of a trial of successive halving, 0 for the shortest; None for others.
    """

    experiment: str
    arm: str
    seed: int
    config: RunConfig
    phase: Literal["final", "sweep"] = "final"
    candidate: float | None = None
    rung: int | None = None

    @property
    def name(self) -> str:
        """``experiment/arm/seed-0``; of a trial ``experiment/arm/sweep-0.003-seed-1000``.

        A trial of successive halving has its rung too: ``.../sweep-0.003-rung-1-seed-1000``.
        """
        trial = f"sweep-{self.candidate:g}-" if self.phase == "sweep" else ""
        trial += "" if self.rung is None else f"rung-{self.rung}-"
        return f"{self.experiment}/{self.arm}/{trial}seed-{self.seed}"

    @property
    def config_hash(self) -> str:
        """The hash of the config alone; a run refuses a checkpoint with another one."""
        return config_hash(self.config)

    def folder(self, study: Path) -> Path:
        """Return the folder that the run writes to, inside the folder of its study."""
        return study / "runs" / self.name

    def as_json(self) -> dict[str, Any]:
        """Return the run in JSON's types; ``from_json`` reads it back."""
        return {
            "experiment": self.experiment,
            "arm": self.arm,
            "seed": self.seed,
            "config": self.config.model_dump(mode="json"),
            "config_hash": self.config_hash,
            "phase": self.phase,
            "candidate": self.candidate,
            "rung": self.rung,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Run:
        """Return the inverse of ``as_json``."""
        own = {key: value for key, value in values.items() if key != "config_hash"}
        return cls(**{**own, "config": parse(RunConfig, values["config"])})


def trials(experiment: Experiment) -> list[Run]:
    """Return the runs of the sweep, if there is one; with successive halving, of the first rung."""
    sweep = experiment.sweep
    if sweep is None:
        return []
    names = experiment.arm_names
    tried = {name: experiment.candidates(name) for name in names}
    return [
        trial(experiment, name, tried[name][index], 0, seed)
        for seed in sweep.seeds
        for index in range(len(tried[names[0]]))
        for name in names
    ]


def trial(experiment: Experiment, arm: str, value: float, rung: int, seed: int) -> Run:
    """Return one trial of an experiment's sweep.

    Args:
        experiment: which has a sweep.
        arm: that is tuned.
        value: the candidate.
        rung: 0 without halving.
        seed: one of the sweep's.
    """
    sweep = experiment.sweep
    assert sweep is not None
    changes = {sweep.path: value}
    if sweep.halving is not None:
        changes["budget.steps"] = sweep.steps_of(experiment.config_of(arm).steps, rung)
    config = experiment.config_of(arm, changes)
    number = None if sweep.halving is None else rung
    return Run(experiment.name, arm, seed, config, "sweep", value, number)


def finals(
    experiment: Experiment,
    chosen: Mapping[str, float | None],
    wanted: Mapping[str, Sequence[int]] | None = None,
) -> list[Run]:
    """Return the runs that count.

    Args:
        experiment: of them.
        chosen: for an experiment with a sweep, arm -> what it chose; an arm with None has no runs,
            one that is missing is not known yet and has none either. Empty without a sweep.
        wanted: arm -> its seeds; None for all of the experiment's.
    """
    sweep, names = experiment.sweep, experiment.arm_names
    found = []
    for turn, seed in enumerate(experiment.seeds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            if wanted is not None and seed not in wanted[name]:
                continue
            changes = {}
            if sweep is not None:
                value = chosen.get(name)
                if value is None:
                    continue
                changes = {sweep.path: value}
            config = experiment.config_of(name, changes)
            found.append(Run(experiment.name, name, seed, config))
    return found
