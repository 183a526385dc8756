"""A judged study: values only, which ``judge`` makes from records and the reports show.

Effects are differences of the experiment's metric on the held-out data after the last step, arm
minus baseline. An effect below zero is better for a loss; above zero is better for a metric that is
to be high (``metrics.py``). Every definition is in ``docs/metrics.md``. None stands for what is not
known or is withheld.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tilelab.stats.values import ErrorUsed, Verdict
from tilelab.stats.values import FactorEffect as FactorEffect
from tilelab.stats.values import Interaction as Interaction
from tilelab.stats.values import Interval as Interval
from tilelab.stats.values import Label as Label
from tilelab.stats.values import Ratio as Ratio
from tilelab.stats.values import SeedResult as SeedResult
from tilelab.stats.values import Status as Status
from tilelab.stats.values import Summary as Summary
from tilelab.study.ask.metrics import Floor
from tilelab.study.records.events import Memory, finite


@dataclass(frozen=True)
class KernelUse:
    """An attention kernel that ran in an arm."""

    kernel: str  # its name, as the run recorded it
    layers: tuple[int, ...]  # indices of the layers that ran it, in any seed
    calls: int  # forward passes, over these layers and all seeds


@dataclass(frozen=True)
class Cost:
    """The cost of an arm, all its runs together: whole, diverged and partial ones."""

    runs: int  # that were begun, trials included
    tokens: int  # trained on
    wall_s: float | None  # in optimizer steps; None: withheld
    cpu_s: float | None  # over all threads
    sweep_runs: int = 0  # these four: the part of trials
    sweep_tokens: int = 0
    sweep_wall_s: float | None = 0.0
    sweep_cpu_s: float | None = 0.0


@dataclass(frozen=True)
class TargetResult:
    """The cost of reaching the target, at the first evaluation that was there, or better."""

    target: float  # in the experiment's metric
    tokens: tuple[float | None, ...]  # of each seed that is over; None for a miss
    wall_s: tuple[float | None, ...]  # empty where speed is withheld, as the CPU time
    cpu_s: tuple[float | None, ...]
    reached: int  # seeds that reached it
    median_tokens: float | None  # None where half or more missed
    median_wall_s: float | None
    median_cpu_s: float | None
    tokens_ratio: Ratio | None = None  # None unless every seed of both reached it
    wall_ratio: Ratio | None = None
    censored: tuple[float, ...] = ()  # tokens at which each miss ended: its budget


@dataclass(frozen=True)
class ArmMeasures:
    """All measures of an arm (or of the baseline) over its seeds; see ``docs/metrics.md``.

    Quality is of the seeds that are done; all else of every seed that has come so far, diverged and
    partial ones too. Indexing gives the summary of a measure.
    """

    summaries: dict[str, Summary | None]  # by ``measures.MEASURES``; None: not known
    metrics: dict[str, Summary] = field(default_factory=dict)  # by ``METRICS``
    memory: Memory | None = None  # means over the seeds
    speed_ratio: Ratio | None = None  # of ``tokens_per_s``; None for the baseline
    cpu_ratio: Ratio | None = None  # of ``tokens_per_cpu_s``
    memory_ratio: Ratio | None = None  # of the peak
    activations_ratio: Ratio | None = None
    kernels: tuple[KernelUse, ...] = ()  # most calls first

    def __getitem__(self, measure: str) -> Summary | None:
        return self.summaries[measure]

    def mean(self, metric: str) -> float | None:
        """Return the mean over the seeds of a metric that decides; None where it is not known."""
        found = self.metrics.get(metric) or self.summaries.get(metric)
        return None if found is None else found.mean


@dataclass(frozen=True)
class KernelFlag:
    """A difference of attention kernels that a reader has to know of."""

    arm: str  # e.g. ``"sdpa math"``; ``" and "`` between several
    baseline: str  # in the same layers
    layers: tuple[int, ...]
    expected: bool  # the arm changes the attention by its own words
    words: str  # as a sentence


Clock = Literal["cpu", "wall"]


@dataclass(frozen=True)
class Speed:
    """The speed of an arm against the baseline, by the clock that speaks: ``clocks.py``."""

    ratio: Ratio | None  # None: not known, or withheld
    by: Literal["wall", "processor"]
    why: str = ""  # of another clock than the wall's, or of a ratio that is withheld


@dataclass(frozen=True)
class EqualTime:
    """The effect of an arm at equal time: ``clocks.py``."""

    rung: str  # at whose end by the baseline; empty without a ladder: the earlier of both ends
    clock: Clock
    at_s: float  # geometric mean over the seeds
    effect: float
    interval: Interval | None
    differences: tuple[float, ...]  # of each seed


@dataclass(frozen=True, kw_only=True)
class ArmVerdict(Verdict):
    """The verdict on an arm's runs against the baseline's."""

    kind: Literal["training", "systems", "control"]
    kernel_flags: tuple[KernelFlag, ...]
    speed_withheld: str  # why; empty where speed is shown
    speed: Speed  # as it is shown
    measures: ArmMeasures
    cost: Cost
    target: TargetResult | None
    notes: tuple[str, ...] = ()  # what else a reader has to know, as sentences
    agrees: bool | None = None  # a systems arm in float32: its losses differ by rounding only
    learnt: bool | None = None  # better than the floor that decides; None: not known
    neither_learnt: bool = False  # nor has the baseline
    equal_time: EqualTime | None = None  # where the times of arm and baseline differ

    @property
    def name(self) -> str:
        """The arm, as ``Baseline.name``."""
        return self.arm

    @property
    def changed_what_is_learnt(self) -> bool:
        """Whether the arm is a systems arm, which is to change nothing, and changed the result."""
        return self.kind == "systems" and self._changed

    @property
    def flagged(self) -> bool | None:
        """Whether a control was seen to change the result; None of others, and before its end."""
        known = self.kind == "control" and self.label != "incomplete"
        return self._changed if known else None

    @property
    def _changed(self) -> bool:
        return self.label in ("better", "worse", "diverged") or self.agrees is False


@dataclass(frozen=True)
class Baseline:
    """The baseline of the arms; fields as of ``ArmVerdict``."""

    name: str
    status: Status  # ``"done"`` where every seed is; ``"diverged"`` where any diverged
    n: int  # finished seeds
    diverged: tuple[int, ...]  # seeds
    incomplete: tuple[int, ...]  # seeds
    measures: ArmMeasures
    cost: Cost
    target: TargetResult | None
    learnt: bool | None = None


@dataclass(frozen=True)
class Candidate:
    """A value that a sweep tried."""

    value: float
    status: Status  # ``"diverged"`` where any seed did
    metric: float | None  # mean final metric over the sweep's seeds; None unless done
    point: dict[str, float] = field(default_factory=dict)  # of a search: what the trial tried


@dataclass(frozen=True)
class RungResult:
    """The trials of one length of successive halving."""

    steps: int  # of every trial
    candidates: tuple[Candidate, ...]  # in ascending order


@dataclass(frozen=True)
class SweepResult:
    """The trials of one arm."""

    arm: str
    path: str
    candidates: tuple[Candidate, ...]  # in ascending order, each with its longest trial
    chosen: float | None  # None while trials are missing, or all diverged
    survived: Interval | None  # smallest and largest that did not diverge
    at_edge: bool  # a better value may lie outside
    words: str  # as a sentence
    rungs: tuple[RungResult, ...] = ()  # of successive halving, the shortest first; empty without
    budget_tokens: int = 0  # that all trials may take

    @property
    def values(self) -> dict[str, float] | None:
        """The chosen values, by their paths; None while trials are missing, or all diverged."""
        if self.chosen is None:
            return None
        best = next(each for each in self.candidates if each.value == self.chosen)
        return best.point or {self.path: self.chosen}


@dataclass(frozen=True, kw_only=True)
class FloorResult(Floor):
    """A floor, and the arms that are better."""

    decides: bool  # an arm that is not better has not learnt
    beaten_by: tuple[str, ...]  # arms, the baseline among them


@dataclass(frozen=True)
class Sensitivity:
    """How much an experiment could have detected: see ``detect.py``."""

    comparisons: int  # that share the error rate
    critical_t: float | None  # of the first of their tests; None for one seed
    spread: float | None  # of paired differences, root mean square over the arms
    detectable: float | None  # the smallest effect that is found with the experiment's power


@dataclass(frozen=True)
class ExperimentVerdict:
    """One question decided, as far as its runs have come."""

    experiment: str
    question: str
    metric: str
    smallest_effect: float
    confidence: float
    baseline: Baseline
    arms: tuple[ArmVerdict, ...]  # in the config's order
    interactions: tuple[Interaction, ...]  # empty with a design, which has ``effects``
    sweeps: tuple[SweepResult, ...]  # of every arm, the baseline first; empty without a sweep
    notes: tuple[str, ...] = ()  # as sentences
    effects: tuple[FactorEffect, ...] = ()  # of a design's factors; empty without a design
    follows: str = ""  # what was decided for the next stage
    floors: tuple[FloorResult, ...] = ()  # empty where none are stored
    sensitivity: Sensitivity | None = None  # None without arms
    error: ErrorUsed | None = None  # None where each arm's own was asked for

    @property
    def all_arms(self) -> tuple[Baseline | ArmVerdict, ...]:
        """The baseline and the arms; their place is the colour in figures."""
        return (self.baseline, *self.arms)

    @property
    def slowed(self) -> list[str]:
        """The arms whose wall clock other load has moved."""
        return [arm.arm for arm in self.arms if arm.speed.by == "processor"]


@dataclass(frozen=True)
class LadderPoint:
    """The effect of an arm at one rung."""

    rung: str
    at: float  # on the axis
    effect: float  # as the rung's verdict has it
    interval: Interval | None
    differences: tuple[float, ...]  # of each seed


@dataclass(frozen=True)
class LadderArm:
    """The effect of an arm as a function of the axis, e(x) = a + b x^-c; see ``ladder.py``."""

    arm: str
    points: tuple[LadderPoint, ...]
    constants: tuple[float, ...] = ()  # a and b of the fit to all rungs; empty without a fit
    curve: tuple[tuple[float, float, float, float], ...] = ()  # x, e(x), its interval
    predicted: float | None = None  # at the last rung, by the fit to all others
    predicted_interval: Interval | None = None  # for a mean over as many seeds
    miss: float | None = None  # the last rung's effect minus what was predicted
    equal_time: tuple[EqualTime, ...] = ()  # only where it need not be extrapolated


@dataclass(frozen=True)
class LadderVerdict:
    """A ladder: the verdicts on its rungs, which are experiments, put in a row."""

    experiment: str
    question: str
    metric: str
    axis: Literal["text", "tokens", "parameters"]  # text is in bytes
    rungs: tuple[str, ...]  # the smallest first
    places: tuple[float | None, ...]  # of each rung on the axis; None before it is known
    baseline: str
    losses: tuple[float | None, ...]  # the baseline's final metric at each rung
    exponent: float | None  # c of the baseline's law; None for fewer than three rungs
    arms: tuple[LadderArm, ...]
    rates: dict[str, dict[str, float | None]]  # rung -> arm -> its tuned value; empty without


@dataclass(frozen=True)
class StudyVerdict:
    """A study judged from its records."""

    study: str
    question: str
    complete: bool  # every planned run is over
    experiments: tuple[ExperimentVerdict, ...]  # in the config's order
    ladders: tuple[LadderVerdict, ...] = ()
    correction: Literal["study", "experiment"] = "experiment"  # what Holm's adjustment is over

    def as_json(self) -> dict[str, Any]:
        """Return all of it in JSON's types; what is not finite becomes null."""
        values: dict[str, Any] = json.loads(json.dumps(finite(asdict(self)), allow_nan=False))
        for experiment in values["experiments"]:
            for each in (experiment["baseline"], *experiment["arms"]):
                each["measures"] |= each["measures"].pop("summaries")
        return values
