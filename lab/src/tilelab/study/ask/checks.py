"""Checks that an experiment's rules hold together, made before any run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from tilelab.study.ask import designs
from tilelab.study.ask.deciding import Combine, Confirm, Design, Sequential, Sweep
from tilewise.errors import InvalidArgument

__all__ = ["Ruled", "check_rules"]


class Ruled(Protocol):
    """The parts of a ``config.Experiment`` that the checks read."""

    @property
    def arms(self) -> Sequence[Any]:
        """Every arm except the baseline."""

    @property
    def arm_names(self) -> tuple[str, ...]:
        """Names of all arms, the baseline first."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the first stage."""

    @property
    def sweep(self) -> Sweep | None:
        """The sweep that tunes a value."""

    @property
    def design(self) -> Design | None:
        """The factorial of the arms."""

    @property
    def combine(self) -> Combine | None:
        """The second stage."""

    @property
    def confirm(self) -> Confirm | None:
        """The last stage."""

    @property
    def sequential(self) -> Sequential | None:
        """The rule for looks at the results."""

    def candidates(self, arm: str) -> tuple[float, ...]:
        """Return the values that the sweep tries for an arm."""

    def config_of(self, arm: str, changes: Mapping[str, float] | None = None) -> Any:
        """Return the config of one run, without its seed."""


def check_rules(experiment: Ruled) -> None:
    """Check the sweep, the design, the stages and the looks of an experiment.

    Raises:
        InvalidArgument: what does not fit.
    """
    if experiment.sweep is not None:
        _check_sweep(experiment, experiment.sweep)
    if experiment.design is not None:
        designs.check(experiment.design, experiment.arm_names[1:])
    _check_stages(experiment)
    if experiment.sequential is not None:
        _check_looks(experiment, experiment.sequential)


def _check_looks(experiment: Ruled, rule: Sequential) -> None:
    looks, seeds = rule.looks, len(experiment.seeds)
    grows = all(one < other for one, other in pairwise(looks))
    if not grows or looks[0] < 2 or looks[-1] != seeds:
        required = f"2 or more, growing, up to the number of seeds ({seeds})"
        raise InvalidArgument("sequential.looks", str(looks), required)
    if experiment.design is not None:
        required = "one of both: effects of a design need every run"
        raise InvalidArgument("sequential", "a design and sequential", required)


def _check_sweep(experiment: Ruled, sweep: Sweep) -> None:
    names = experiment.arm_names
    if sweep.values and set(sweep.values) != set(names):
        came, required = ", ".join(sweep.values), f"candidates for {', '.join(names)}"
        raise InvalidArgument("sweep.values", came, required)
    counts = {len(experiment.candidates(name)) for name in names}
    if len(counts) > 1 or 0 in counts:
        required = "the same number of candidates for every arm, 1 or more"
        raise InvalidArgument("sweep.values", " and ".join(map(str, sorted(counts))), required)
    for arm in names:
        values = experiment.candidates(arm)
        # Six digits name the folder of a trial.
        if len({f"{value:g}" for value in values}) < len(values):
            required = "candidates that differ in their first six digits"
            raise InvalidArgument(f"sweep.values.{arm}", str(values), required)
        for value in values:
            experiment.config_of(arm, {sweep.path: value})
        _check_halving(experiment, sweep, arm)
    if not sweep.seeds or set(sweep.seeds) & set(experiment.seeds):
        required = "at least one, and none of the experiment's own"
        raise InvalidArgument("sweep.seeds", str(sweep.seeds), required)


def _check_halving(experiment: Ruled, sweep: Sweep, arm: str) -> None:
    """Every rung has fewer candidates and more steps than the one before it."""
    count, steps = len(experiment.candidates(arm)), experiment.config_of(arm).steps
    for rung in range(1, sweep.rungs):
        fewer = sweep.candidates_of(count, rung) < sweep.candidates_of(count, rung - 1)
        longer = sweep.steps_of(steps, rung) > sweep.steps_of(steps, rung - 1)
        if not (fewer and longer):
            came = f"{sweep.rungs} for {count} candidates and {steps} steps of {arm}"
            required = "rungs of which each has fewer candidates and more steps than the last"
            raise InvalidArgument("sweep.halving.rungs", came, required)


def _check_stages(experiment: Ruled) -> None:
    """Refuse, before the first stage, what a later stage could not do."""
    if experiment.combine is None and experiment.confirm is None and experiment.design is None:
        return
    if any(arm.kind == "systems" for arm in experiment.arms):
        required = "training arms: a systems arm changes nothing that could be combined"
        raise InvalidArgument("arms", "a systems arm in a design or in stages", required)
    if experiment.combine is not None and experiment.design is not None:
        required = "one of both: the factorial of a design is there from the start"
        raise InvalidArgument("combine", "a design and combine", required)
    if experiment.combine is not None and any("+" in arm.name for arm in experiment.arms):
        required = "names without +, which stands for several factors together"
        raise InvalidArgument("arms", "a factor whose name has a +", required)
    if experiment.combine is not None:
        names = experiment.arm_names[1 : experiment.combine.most + 1]
        for count in range(2, len(names) + 1):  # so many may survive
            designs.fraction(names[:count], experiment.combine.runs)
    if experiment.sweep is not None and experiment.sweep.values and experiment.combine is not None:
        required = "multiples: the arms of the factorial are not known yet"
        raise InvalidArgument("sweep.values", "candidates by arm", required)
    if experiment.confirm is not None and experiment.confirm.winner == "predicted":
        if experiment.design is None and experiment.combine is None:
            required = "observed, or a design or combine that has effects to predict from"
            raise InvalidArgument("confirm.winner", "predicted", required)
        if experiment.sweep is not None:
            required = "observed: what was not run has no tuned value"
            raise InvalidArgument("confirm.winner", "predicted, with a sweep", required)
        if experiment.design is not None and experiment.design.generators:
            # The best combination may be one that is no arm.
            arms = {arm.name: arm.changes for arm in experiment.arms}
            designs.changes_of(experiment.design, arms)
    used = list(experiment.seeds)
    used += [] if experiment.sweep is None else experiment.sweep.seeds
    for name, stage in (("combine", experiment.combine), ("confirm", experiment.confirm)):
        if stage is None:
            continue
        if set(stage.seeds) & set(used) or len(set(stage.seeds)) < len(stage.seeds):
            required = "seeds that are used nowhere else in the experiment, each once"
            raise InvalidArgument(f"{name}.seeds", str(stage.seeds), required)
        used += stage.seeds
