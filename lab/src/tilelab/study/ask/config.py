"""The config of a study: typed, frozen, complete. Its hash names everything that decides a result.

A ``Study`` holds experiments. An ``Experiment`` compares arms with a baseline over seeds. An
``Arm`` is the baseline with some values changed. A ``RunConfig`` is everything of one run except
its seed. Default values are written out: a saved config says every number that was used.

Values are addressed by dotted paths, e.g. ``optimizer.lr`` or ``training.clip``; see ``change``.
A value that does not fit raises pydantic's ``ValidationError`` from a constructor and
``tilewise.InvalidArgument`` from ``parse`` and ``change``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from tilelab.stats import factorial
from tilelab.study.ask import designs, values
from tilelab.study.ask.designs import (
    Combine,
    Confirm,
    Design,
    Halving,
    Ladder,
    Search,
    Sequential,
    Sweep,
)
from tilelab.study.ask.metrics import METRICS
from tilelab.study.ask.run_config import (
    Attention,
    Budget,
    Data,
    Dropout,
    Evaluation,
    LengthWarmup,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Task,
    Training,
    Variant,
)
from tilelab.study.ask.values import Choice, Frozen, change, config_hash, parse
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument

__all__ = [
    "BASELINE",
    "Arm",
    "Attention",
    "Budget",
    "Choice",
    "Combine",
    "Confirm",
    "Data",
    "Design",
    "Dropout",
    "Evaluation",
    "Experiment",
    "Frozen",
    "Halving",
    "Ladder",
    "LengthWarmup",
    "Model",
    "Optimizer",
    "RunConfig",
    "Schedule",
    "Search",
    "Sequential",
    "Study",
    "Sweep",
    "Task",
    "Training",
    "Variant",
    "change",
    "config_hash",
    "parse",
]

BASELINE = "baseline"  # the name of the arm that changes nothing


class Arm(Frozen):
    """The baseline with some values changed.

    Args:
        name: unique in its experiment, made of letters, digits, ``.``, ``+``, ``=`` and ``-``.
        changes: dotted path -> new value.
        kind: ``"systems"`` for an arm that must not change what is learnt (another kernel): it has
            to pass the equivalence test on loss before its speed is reported. ``"control"`` for one
            that computes something wrong on purpose beside systems arms (``attention.fault``): if
            the comparison does not flag it, it could not have seen such a fault.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+=-]*$")
    changes: dict[str, Any] = Field(default_factory=dict)
    kind: Literal["training", "systems", "control"] = "training"

    @field_validator("changes")
    @classmethod
    def _plain(cls, changes: dict[str, Any]) -> dict[str, Any]:
        """The changes in JSON's types, so that an arm that was saved equals the one that was."""
        return values.in_json("changes", changes)


class Experiment(Frozen):
    """One question, and how it is decided.

    Args:
        name: unique in the study.
        question: in words.
        baseline: what the arms are compared with.
        baseline_name: what the report calls it.
        arms: the others.
        seeds: of every arm; the same seed gives every arm the same weights and batches.
        smallest_effect: the smallest difference of the final metric that matters, in its unit.
        metric: of the final held-out evaluation, one that the tasks of all arms have: e.g.
            ``"loss"`` in nats per token or ``"bits_per_byte"`` of a text (``metrics.py`` has all).
        target: the value (same unit) whose time and tokens are reported; None for none.
        confidence: of intervals and tests.
        power: of the number of seeds that an undecided arm still needs.
        sweep: candidates to try first; None where every arm says its own values.
        sequential: when to look, and how to stop early; None to run all seeds.
        design: the factorial that the arms make up; None where they do not, or are not to be read
            so.
        combine: a further stage, the factorial of the arms that survived; None for none.
        confirm: the last stage, the winner on fresh seeds; None for none.
        ladder: the rungs that take the experiment's place, one after the other; None for none.
        spread: standard deviation of paired differences that is expected, in the metric's unit, as
            of an earlier study; with it a study says before it starts what it can detect.
        error: of the tests: each arm's ``"own"``, or one ``"pooled"`` over the arms where their
            variances allow it.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    question: str
    baseline: RunConfig
    baseline_name: str = Field(BASELINE, pattern=r"^[A-Za-z0-9][A-Za-z0-9.+=-]*$")
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    smallest_effect: float = Field(gt=0)
    metric: str = "bits_per_byte"
    target: float | None = Field(None, gt=0)
    confidence: float = Field(0.95, gt=0.5, lt=1)
    power: float = Field(0.8, gt=0.5, lt=1)
    sweep: Sweep | None = None
    sequential: Sequential | None = values.added(None)
    design: Design | None = values.added(None)
    combine: Combine | None = values.added(None)
    confirm: Confirm | None = values.added(None)
    ladder: Ladder | None = values.added(None)
    spread: float | None = values.added(None, gt=0)
    error: Literal["own", "pooled"] = values.added("own")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [self.baseline_name, *(arm.name for arm in self.arms)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument("arms", f"two called {twice[0]!r}", "a name for each arm")
        if any(arm.kind == "control" for arm in self.arms) and not self.alone:
            raise InvalidArgument("arms", "a control", "a systems arm that it is the control of")
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise InvalidArgument("seeds", str(self.seeds), "at least one, and each once")
        for name in names:
            self._check_metric(name, self.config_of(name).learning.metrics)
        if self.sweep is not None:
            _check_sweep(self, self.sweep)
        if self.design is not None:
            factorial.check(self.design, self.arm_names[1:])
        _check_stages(self)
        if self.sequential is not None:
            _check_looks(self, self.sequential)
        if self.ladder is not None:
            _check_ladder(self, self.ladder)
        if self.error == "pooled" and (self.alone or self.sequential is not None):
            what = "a systems arm" if self.alone else "sequential"
            required = "own: kernels round, and looks have other seeds: they share no error"
            raise InvalidArgument("error", f"pooled with {what}", required)
        return self

    def candidates(self, arm: str) -> tuple[float, ...]:
        """Return the values that the sweep tries for an arm, in the order of the config.

        Raises:
            InvalidArgument: multiples of what the arm has no number for.
        """
        sweep = self.sweep
        if sweep is None:
            return ()
        if sweep.search is not None:
            return tuple(float(number) for number in range(1, sweep.search.trials + 1))
        if sweep.values:
            return sweep.values[arm]
        own = self._number(arm, sweep.path, "sweep.path")
        return tuple(float(f"{multiple * own:.6g}") for multiple in sweep.multiples)

    def ranges(self, arm: str) -> dict[str, tuple[float, float, bool]]:
        """Return path -> lowest and highest value that a search tries for an arm, and if by log."""
        search = None if self.sweep is None else self.sweep.search
        found = {}
        for path, (scale, low, high) in ({} if search is None else search.space).items():
            own = self._number(arm, path, "search.space") if scale == "times" else 1.0
            found[path] = (own * low, own * high, scale != "linear")
        return found

    def _number(self, arm: str, path: str, argument: str) -> float:
        own = values.value_at(self.config_of(arm), path)
        if isinstance(own, bool) or not isinstance(own, int | float):
            required = f"a number in every arm; {arm} has {own!r}"
            raise InvalidArgument(argument, path, required)
        return float(own)

    def _check_metric(self, arm: str, known: tuple[str, ...]) -> None:
        if self.metric not in known:
            required = f"one of {', '.join(known)}, which the task of {arm} has"
            fix = values.nearest(self.metric, known if self.metric not in METRICS else ())
            raise InvalidArgument("metric", repr(self.metric), required, fix)

    @property
    def arm_names(self) -> tuple[str, ...]:
        """All arms, the baseline first."""
        return (self.baseline_name, *(arm.name for arm in self.arms))

    @property
    def tested(self) -> tuple[Arm, ...]:
        """The arms that are findings: all but controls, which only show what would be flagged."""
        return tuple(arm for arm in self.arms if arm.kind != "control")

    @property
    def alone(self) -> bool:
        """Whether its runs have the machine to themselves: it compares kernels (a systems arm)."""
        return any(arm.kind == "systems" for arm in self.arms)

    def seeds_of(self, arm: str) -> tuple[int, ...]:
        """Return the seeds of an arm: all, but only the first of a control in float32.

        There the losses of the first steps flag it, and one run has them.
        """
        control = any(each.name == arm and each.kind == "control" for each in self.arms)
        float32 = self.baseline.training.precision == "float32"
        return self.seeds[:1] if control and float32 else self.seeds

    @cached_property
    def rungs(self) -> dict[str, Experiment]:
        """The rungs of its ladder, smallest first, as experiments; none without a ladder.

        A tuned rung has the sweep. The configs have the arms' own values, not yet the tuned ones.
        """
        ladder = self.ladder
        if ladder is None:
            return {}
        *_, top = ladder.rungs
        found = {}
        for name, changes in ladder.rungs.items():
            arms = [arm for arm in self.arms if name == top or arm.name not in ladder.last]
            paths = {f"baseline.{path}": value for path, value in changes.items()}
            own: dict[str, Any] = {"name": f"{self.name}.{name}", "ladder": None, "arms": arms}
            own["spread"] = ladder.spread.get(name, self.spread)
            own["smallest_effect"] = max(self.smallest_effect, ladder.smallest_effect.get(name, 0))
            if name not in ladder.tuned:
                own["sweep"] = None
            elif name in ladder.multiples:
                own["sweep.multiples"] = ladder.multiples[name]
            found[name] = change(self, paths | own)
        return found

    def config_of(self, arm: str, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """Return the config of an arm (without what a sweep chooses), with dotted changes."""
        key = arm, tuple((changes or {}).items())
        if key not in self._made:
            self._made[key] = self._make(arm, changes or {})
        return self._made[key]

    @cached_property
    def _made(self) -> dict[tuple[Any, ...], RunConfig]:
        """Configs that were made before: checking one takes a millisecond, and they are many."""
        return {}

    def _make(self, arm: str, changes: Mapping[str, Any]) -> RunConfig:
        if changes:
            return change(self.config_of(arm), changes)
        if arm == self.baseline_name:
            return self.baseline
        return change(self.baseline, {each.name: each for each in self.arms}[arm].changes)


class Study(Frozen):
    """A named set of experiments that one command runs and one report shows.

    ``correction`` says what Holm's adjustment is over: all comparisons of the ``"study"``, or those
    of each ``"experiment"`` apart, as studies of earlier versions had it.

    ``chip`` names the GPU that it is of a size for (a row of ``tilewise.chips.CHIPS``): it does not
    start on a processor. Empty for a study that runs anywhere: ``--set chip=``.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    question: str
    experiments: tuple[Experiment, ...] = Field(min_length=1)
    chip: str = values.unhashed("")
    correction: Literal["study", "experiment"] = values.changed("study", before="experiment")

    @field_validator("chip")
    @classmethod
    def _known(cls, chip: str) -> str:
        gpus = [name for name, each in CHIPS.items() if each.kind == "gpu"]
        if chip and chip not in gpus:
            raise InvalidArgument("chip", repr(chip), f"one of {', '.join(gpus)}, or nothing")
        return chip

    @model_validator(mode="after")
    def _unique(self) -> Self:
        names = [each.name for each in self.experiments]
        if len(set(names)) < len(names):
            raise InvalidArgument("experiments", ", ".join(names), "a name for each experiment")
        stages = {f"{name}.{stage}" for name in names for stage in ("combine", "confirm")}
        ladders = [each for each in self.experiments if each.ladder is not None]
        stages |= {f"{each.name}.{rung}" for each in ladders for rung in each.rungs}
        if stages & set(names):
            required = "a name that is not that of a later stage of another experiment"
            raise InvalidArgument("experiments", repr(min(stages & set(names))), required)
        # ``--set optimizer.lr=0.1`` has to mean one thing.
        known = (*Experiment.model_fields, *RunConfig.model_fields, "experiments", "correction")
        taken = set(known) & set(names)
        if taken:
            required = "a name that is no key of an experiment or a run"
            raise InvalidArgument("experiments", repr(min(taken)), required)
        return self


def _check_looks(experiment: Experiment, rule: Sequential) -> None:
    looks, seeds = rule.looks, len(experiment.seeds)
    grows = all(one < other for one, other in pairwise(looks))
    if not grows or looks[0] < 2 or looks[-1] != seeds:
        required = f"2 or more, growing, up to the number of seeds ({seeds})"
        raise InvalidArgument("sequential.looks", str(looks), required)
    if experiment.design is not None:
        required = "one of both: effects of a design need every run"
        raise InvalidArgument("sequential", "a design and sequential", required)


def _check_ladder(experiment: Experiment, ladder: Ladder) -> None:
    """Refuse a ladder that does not fit its experiment; each rung checks itself."""
    others = ("combine", "confirm", "design", "sequential")
    if taken := [name for name in others if getattr(experiment, name) is not None]:
        required = "one of both: every rung runs all its seeds, and is judged by itself"
        raise InvalidArgument("ladder", f"a ladder and {taken[0]}", required)
    for name, known in {
        "tuned": (ladder.tuned, ladder.rungs),
        "shared": (ladder.shared, experiment.arm_names),
        "last": ((*ladder.last, *ladder.last.values()), experiment.arm_names),
        "spread": (ladder.spread, ladder.rungs),
        "smallest_effect": (ladder.smallest_effect, ladder.rungs),
    }.items():
        given, there = known
        if unknown := [each for each in given if each not in there]:
            required = f"of {', '.join(there)}"
            raise InvalidArgument(f"ladder.{name}", repr(unknown[0]), required)
    if experiment.baseline_name in ladder.last:
        required = "arms beside the baseline, which every rung has"
        raise InvalidArgument("ladder.last", experiment.baseline_name, required)
    if ladder.spread and experiment.spread is not None:
        required = "one of both: --set ladder.spread={} leaves the experiment's"
        raise InvalidArgument("ladder.spread", "ladder.spread and spread", required)
    if bool(ladder.tuned) != (experiment.sweep is not None):
        required = "both or neither: rungs that are tuned need the sweep that says how"
        raise InvalidArgument("ladder.tuned", f"{ladder.tuned} and sweep", required)
    if experiment.sweep is not None and experiment.sweep.halving is not None:
        required = "no halving: an optimum is read off candidates that trained as long"
        raise InvalidArgument("sweep.halving", "a ladder with halving", required)
    if experiment.sweep is not None and experiment.sweep.search is not None:
        required = "candidates of one path: a rung's value lies between its neighbours"
        raise InvalidArgument("sweep.search", "a ladder with a search", required)
    if unknown := [name for name in ladder.multiples if name not in ladder.tuned]:
        required = f"of the tuned rungs: {', '.join(ladder.tuned)}"
        raise InvalidArgument("ladder.multiples", repr(unknown[0]), required)
    if ladder.multiples and not (experiment.sweep and experiment.sweep.multiples):
        raise InvalidArgument("ladder.multiples", "multiples", "a sweep with multiples")
    if len(set(ladder.tuned)) < len(ladder.tuned):
        raise InvalidArgument("ladder.tuned", str(ladder.tuned), "each rung once")
    changed = {path for changes in ladder.rungs.values() for path in changes}
    for arm in experiment.arms:
        if both := [
            path for path in arm.changes if any(values.overlap(path, each) for each in changed)
        ]:
            required = f"no path that the rungs change ({', '.join(sorted(changed))})"
            raise InvalidArgument(f"arms.{arm.name}", both[0], required)
    sizes = [size_of(each.baseline, ladder) for each in experiment.rungs.values()]
    if sizes != sorted(set(sizes)):
        required = f"the smallest first, each of another number of {ladder.axis}"
        raise InvalidArgument("ladder.rungs", f"{ladder.axis} {sizes}", required)


def size_of(config: RunConfig, ladder: Ladder) -> int:
    """Return where a config is on the axis of a ladder: see ``Ladder.axis``."""
    if ladder.axis == "tokens":
        return config.steps * config.tokens_per_step
    return 12 * config.model.layers * config.model.width**2


def _check_sweep(experiment: Experiment, sweep: Sweep) -> None:
    names = experiment.arm_names
    if sweep.values and set(sweep.values) != set(names):
        came, required = ", ".join(sweep.values), f"candidates for {', '.join(names)}"
        raise InvalidArgument("sweep.values", came, required)
    counts = {len(experiment.candidates(name)) for name in names}
    if len(counts) > 1 or 0 in counts:
        required = "the same number of candidates for every arm, 1 or more"
        raise InvalidArgument("sweep.values", " and ".join(map(str, sorted(counts))), required)
    for arm in names:
        tried = experiment.candidates(arm)
        # Six digits name the folder of a trial.
        if len({f"{value:g}" for value in tried}) < len(tried):
            required = "candidates that differ in their first six digits"
            raise InvalidArgument(f"sweep.values.{arm}", str(tried), required)
        for at in (0, 1):
            if sweep.search is not None:
                ends = {path: each[at] for path, each in experiment.ranges(arm).items()}
                experiment.config_of(arm, ends)
        for value in tried if sweep.search is None else ():
            experiment.config_of(arm, {sweep.path: value})
        _check_halving(experiment, sweep, arm)
    if not sweep.seeds or set(sweep.seeds) & set(experiment.seeds):
        required = "at least one, and none of the experiment's own"
        raise InvalidArgument("sweep.seeds", str(sweep.seeds), required)


def _check_halving(experiment: Experiment, sweep: Sweep, arm: str) -> None:
    """Every rung has fewer candidates and more steps than the one before it."""
    count, steps = len(experiment.candidates(arm)), experiment.config_of(arm).steps
    for rung in range(1, sweep.rungs):
        fewer = sweep.candidates_of(count, rung) < sweep.candidates_of(count, rung - 1)
        longer = sweep.steps_of(steps, rung) > sweep.steps_of(steps, rung - 1)
        if not (fewer and longer):
            came = f"{sweep.rungs} for {count} candidates and {steps} steps of {arm}"
            required = "rungs of which each has fewer candidates and more steps than the last"
            raise InvalidArgument("sweep.halving.rungs", came, required)


def _check_stages(experiment: Experiment) -> None:
    """Refuse, before the first stage, what a later stage could not do."""
    if experiment.combine is None and experiment.confirm is None and experiment.design is None:
        return
    if experiment.alone:
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
    staged = experiment.combine is not None or experiment.confirm is not None
    if staged and experiment.sweep is not None and experiment.sweep.search is not None:
        required = "values or multiples, which later stages can take over"
        raise InvalidArgument("sweep.search", "a search with stages", required)
    used = list(experiment.seeds)
    used += [] if experiment.sweep is None else experiment.sweep.seeds
    for name, stage in (("combine", experiment.combine), ("confirm", experiment.confirm)):
        if stage is None:
            continue
        if set(stage.seeds) & set(used) or len(set(stage.seeds)) < len(stage.seeds):
            required = "seeds that are used nowhere else in the experiment, each once"
            raise InvalidArgument(f"{name}.seeds", str(stage.seeds), required)
        used += stage.seeds
