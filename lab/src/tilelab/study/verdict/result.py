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

from tilelab.study.records.events import finite

__all__ = [
    "ArmMeasures",
    "ArmVerdict",
    "Baseline",
    "Candidate",
    "Cost",
    "ExperimentVerdict",
    "FactorEffect",
    "Interaction",
    "InteractionLabel",
    "Interval",
    "KernelFlag",
    "KernelUse",
    "Label",
    "Look",
    "MemorySplit",
    "Ratio",
    "RungResult",
    "SeedResult",
    "StudyVerdict",
    "Summary",
    "SweepResult",
    "TargetResult",
]

Label = Literal["better", "worse", "no difference", "undecided", "diverged", "incomplete"]
InteractionLabel = Literal[
    "better together",
    "worse together",
    "additive",
    "better",
    "worse",
    "no difference",
    "undecided",
    "diverged",
    "incomplete",
]
Status = Literal["done", "diverged", "incomplete"]


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval.

    Args:
        low, high: its ends, both included.
    """

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """One measure over the seeds.

    Args:
        mean: over the seeds.
        values: of each seed that has it, in the order of the experiment's seeds.
        spread: the sample standard deviation; None for a single seed.
    """

    mean: float
    values: tuple[float, ...]
    spread: float | None


@dataclass(frozen=True)
class Ratio:
    """An arm over its baseline, paired by seed.

    Args:
        value: geometric mean of the ratios of the seeds; above 1 the arm has more.
        interval: t interval on the logarithms, at the experiment's confidence; None for one seed.
        n: paired seeds.
    """

    value: float
    interval: Interval | None
    n: int


@dataclass(frozen=True)
class MemorySplit:
    """The parts of memory, in bytes; means over the seeds. See ``records.Memory``."""

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    peak_bytes: float


@dataclass(frozen=True)
class KernelUse:
    """An attention kernel that ran in an arm.

    Args:
        kernel: its name, as the run recorded it.
        layers: indices of the layers that ran it, in any seed.
        calls: forward passes, over these layers and all seeds.
    """

    kernel: str
    layers: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class Cost:
    """The cost of an arm, all its runs together: whole, diverged and partial ones.

    Args:
        runs: that were begun, trials included.
        tokens: trained on.
        wall_s, cpu_s: in optimizer steps (evaluations left out); CPU over all threads. None where
            speed is withheld: time for the same tokens is speed.
        sweep_runs, sweep_tokens, sweep_wall_s, sweep_cpu_s: the part that trials of a sweep took.
    """

    runs: int
    tokens: int
    wall_s: float | None
    cpu_s: float | None
    sweep_runs: int = 0
    sweep_tokens: int = 0
    sweep_wall_s: float | None = 0.0
    sweep_cpu_s: float | None = 0.0


@dataclass(frozen=True)
class TargetResult:
    """The cost of reaching the target, at the first evaluation that was there, or better.

    Args:
        target: in the experiment's metric.
        tokens, wall_s, cpu_s: of each seed that is over, in their order; None for a miss, which is
            censored: it counts as longer than any that reached it. ``wall_s`` and ``cpu_s`` are
            empty where speed is withheld.
        censored: tokens at which each miss ended: its budget, of one that diverged too.
        reached: seeds that reached it.
        median_tokens, median_wall_s, median_cpu_s: over the seeds; None where half or more missed
            (or nothing is known, or speed is withheld).
        tokens_ratio, wall_ratio: against the baseline; None unless every seed of both reached it.
    """

    target: float
    tokens: tuple[float | None, ...]
    wall_s: tuple[float | None, ...]
    cpu_s: tuple[float | None, ...]
    reached: int
    median_tokens: float | None
    median_wall_s: float | None
    median_cpu_s: float | None
    tokens_ratio: Ratio | None = None
    wall_ratio: Ratio | None = None
    censored: tuple[float, ...] = ()


@dataclass(frozen=True)
class ArmMeasures:
    """All measures of an arm (or of the baseline) over its seeds; see ``docs/metrics.md``.

    Quality is of the seeds that are done; all else of every seed that has come so far, diverged and
    partial ones too. Indexing gives the summary of a measure.

    Args:
        summaries: of every measure by its name (``measures.MEASURES``); None for what is not known.
        metrics: what evaluations of other tasks have, by name (``ask.metrics.METRICS``).
        memory: the split and the peak.
        speed_ratio: of ``tokens_per_s`` against the baseline; None for the baseline itself.
        cpu_ratio: of ``tokens_per_cpu_s``.
        memory_ratio: of ``memory.peak_bytes``.
        activations_ratio: of ``memory.activations_bytes``.
        kernels: the attention kernels that ran, most calls first.
    """

    summaries: dict[str, Summary | None]
    metrics: dict[str, Summary] = field(default_factory=dict)
    memory: MemorySplit | None = None
    speed_ratio: Ratio | None = None
    cpu_ratio: Ratio | None = None
    memory_ratio: Ratio | None = None
    activations_ratio: Ratio | None = None
    kernels: tuple[KernelUse, ...] = ()

    def __getitem__(self, measure: str) -> Summary | None:
        return self.summaries[measure]


@dataclass(frozen=True)
class KernelFlag:
    """A difference of attention kernels that a reader has to know of.

    Args:
        arm: kernels of the arm in ``layers``, e.g. ``"sdpa math"``; ``" and "`` between several.
        baseline: those of the baseline in the same layers.
        layers: indices.
        expected: True where the arm changes the attention by its own words (a systems arm, or a
            change below ``attention``); False where it is a side effect.
        words: the whole flag as a sentence.
    """

    arm: str
    baseline: str
    layers: tuple[int, ...]
    expected: bool
    words: str


@dataclass(frozen=True)
class SeedResult:
    """One seed of an arm.

    Args:
        seed: the seed.
        status: of the arm's run.
        metric: of the arm after the last step; None unless done.
        baseline: the same of the baseline with this seed.
        difference: ``metric - baseline``; None unless both are done.
        identical: both runs ended with the same weights, bit for bit.
    """

    seed: int
    status: Status
    metric: float | None
    baseline: float | None
    difference: float | None
    identical: bool


@dataclass(frozen=True)
class Look:
    """A look of a sequential comparison.

    Args:
        number: 1 for the first look.
        of: looks that there may be.
        level: of its tests, over all arms; the interval is at 1 less this.
    """

    number: int
    of: int
    level: float


@dataclass(frozen=True)
class ArmVerdict:
    """The verdict on an arm's runs against the baseline's.

    Args:
        arm, kind: name, and ``"training"`` or ``"systems"``.
        label: the decision.
        reason: the decision as one sentence with its numbers.
        n: paired seeds that finished in both.
        effect: mean paired difference; None without a pair.
        interval: of the effect, at the experiment's confidence, not adjusted for other arms; None
            for fewer than two pairs.
        p_value, p_holm: of the two-sided paired t test, as it is and adjusted over the arms.
        p_equivalence, p_equivalence_holm: of the two one-sided tests against the smallest effect.
        more_seeds: further seeds that an undecided arm needs; None for other labels.
        per_seed: every seed of the experiment; of a sequential one those that the arm needed.
        diverged: seeds that diverged.
        identical: every paired seed ended with the same weights, bit for bit.
        kernel_flags: where attention kernels differ from the baseline's.
        speed_withheld: why no speed is reported; empty where it is. Then every measure of time in
            ``measures`` and ``target`` is None.
        measures, cost, target: see there; target is None where the experiment has none.
        notes: what else a reader has to know, as sentences.
        agrees: of a systems arm in float32, whether its losses differ by rounding only; else None.
        look: of a sequential experiment, where it was decided or where it is; else None.
    """

    arm: str
    kind: Literal["training", "systems"]
    label: Label
    reason: str
    n: int
    effect: float | None
    interval: Interval | None
    p_value: float | None
    p_holm: float | None
    p_equivalence: float | None
    p_equivalence_holm: float | None
    more_seeds: int | None
    per_seed: tuple[SeedResult, ...]
    diverged: tuple[int, ...]
    identical: bool
    kernel_flags: tuple[KernelFlag, ...]
    speed_withheld: str
    measures: ArmMeasures
    cost: Cost
    target: TargetResult | None
    notes: tuple[str, ...] = ()
    agrees: bool | None = None
    look: Look | None = None

    @property
    def name(self) -> str:
        """The arm, as ``Baseline.name``."""
        return self.arm

    @property
    def changed_what_is_learnt(self) -> bool:
        """Whether the arm is a systems arm, which is to change nothing, and changed the result."""
        changed = self.label in ("better", "worse", "diverged") or self.agrees is False
        return self.kind == "systems" and changed


@dataclass(frozen=True)
class Baseline:
    """The baseline of the arms; fields as of ``ArmVerdict``.

    Args:
        name: what the report calls it.
        status: ``"done"`` where every seed is; ``"diverged"`` where any diverged.
        n: finished seeds.
        diverged, incomplete: seeds.
        measures, cost, target: of its runs.
    """

    name: str
    status: Status
    n: int
    diverged: tuple[int, ...]
    incomplete: tuple[int, ...]
    measures: ArmMeasures
    cost: Cost
    target: TargetResult | None


@dataclass(frozen=True)
class Interaction:
    """An interaction: the effect of all choices together minus what smaller sets explain.

    For two: (both - baseline) - (first - baseline) - (second - baseline).

    Args:
        arms: the single choices, e.g. ``("lion", "wsd")``.
        together: the arm that has them all, e.g. ``"lion+wsd"``.
        label: the decision, made like an arm's.
        n, effect, interval, p_value, p_holm: like an arm's; Holm over the interactions.
        reason: the decision as a sentence.
    """

    arms: tuple[str, ...]
    together: str
    label: InteractionLabel
    n: int
    effect: float | None
    interval: Interval | None
    p_value: float | None
    p_holm: float | None
    reason: str


@dataclass(frozen=True)
class FactorEffect:
    """An effect of a factorial design, averaged over the levels of all other factors.

    Args:
        factors: of one its main effect, of more their interaction.
        aliases: the effects that a fraction cannot tell apart from it, with their sign, e.g.
            ``"+c x d"``; empty for a full factorial.
        label: the decision, made like an arm's; of several factors like an interaction's.
        n, effect, interval, p_value, p_holm, p_equivalence_holm: like an arm's; Holm over the main
            effects, or over the interactions.
        reason: the decision as a sentence.
    """

    factors: tuple[str, ...]
    aliases: tuple[str, ...]
    label: InteractionLabel
    n: int
    effect: float | None
    interval: Interval | None
    p_value: float | None
    p_holm: float | None
    p_equivalence_holm: float | None
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A value that a sweep tried.

    Args:
        value: the swept value.
        status: ``"diverged"`` where any seed did.
        metric: mean final metric over the sweep's seeds; None unless done.
    """

    value: float
    status: Status
    metric: float | None


@dataclass(frozen=True)
class RungResult:
    """The trials of one length of successive halving.

    Args:
        steps: of every trial.
        candidates: in ascending order.
    """

    steps: int
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class SweepResult:
    """The trials of one arm.

    Args:
        arm, path: whose, and what was swept.
        candidates: in ascending order; of successive halving with their longest trial.
        chosen: the best mean final metric, the smaller value on a tie; None while trials are
            missing or where all diverged. Of successive halving the best of the longest rung that
            has one which never diverged.
        survived: smallest and largest value that did not diverge; None where none is known to.
        at_edge: the chosen value is the smallest or largest tried, so a better one may lie outside.
        words: all of it as a sentence.
        rungs: of successive halving, the shortest first; empty without.
        budget_tokens: tokens that all trials of the arm may take.
    """

    arm: str
    path: str
    candidates: tuple[Candidate, ...]
    chosen: float | None
    survived: Interval | None
    at_edge: bool
    words: str
    rungs: tuple[RungResult, ...] = ()
    budget_tokens: int = 0


@dataclass(frozen=True)
class ExperimentVerdict:
    """One question decided, as far as its runs have come.

    Args:
        experiment, question: name and words.
        metric, smallest_effect, confidence: how it was decided.
        baseline, arms: in the config's order.
        interactions: of arms named ``a+b`` whose parts are arms too; where the experiment has a
            design, its ``effects`` are in their place.
        sweeps: of every arm, the baseline first; empty without a sweep.
        notes: what concerns the whole experiment, as sentences.
        effects: of a design's factors; empty without a design.
        follows: what was decided for the next stage, as a sentence; empty where there is none.
    """

    experiment: str
    question: str
    metric: str
    smallest_effect: float
    confidence: float
    baseline: Baseline
    arms: tuple[ArmVerdict, ...]
    interactions: tuple[Interaction, ...]
    sweeps: tuple[SweepResult, ...]
    notes: tuple[str, ...] = ()
    effects: tuple[FactorEffect, ...] = ()
    follows: str = ""

    @property
    def all_arms(self) -> tuple[Baseline | ArmVerdict, ...]:
        """The baseline and the arms; their place is the colour in figures."""
        return (self.baseline, *self.arms)


@dataclass(frozen=True)
class StudyVerdict:
    """A study judged from its records.

    Args:
        study, question: name and words.
        complete: whether every planned run is over.
        experiments: in the config's order.
    """

    study: str
    question: str
    complete: bool
    experiments: tuple[ExperimentVerdict, ...]

    def as_json(self) -> dict[str, Any]:
        """Return all of it in JSON's types; what is not finite becomes null."""
        values: dict[str, Any] = json.loads(json.dumps(finite(asdict(self)), allow_nan=False))
        for experiment in values["experiments"]:
            for each in (experiment["baseline"], *experiment["arms"]):
                each["measures"] |= each["measures"].pop("summaries")
        return values
