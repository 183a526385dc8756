"""Quantities that a verdict is made of: measured values over seeds, each with its spread.

Every definition is in ``docs/metrics.md``. None stands for what is not known or is withheld.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "ArmMeasures",
    "Cost",
    "Interval",
    "KernelUse",
    "MemorySplit",
    "Ratio",
    "Summary",
    "TargetResult",
]


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
    partial ones too.

    Args:
        loss: held-out nats per token after the last step.
        bits_per_byte, perplexity, word_perplexity: other forms of it.
        metrics: what evaluations of other tasks have, by name (``lab/study/metrics.py``).
        tokens_per_s, tokens_per_cpu_s: throughput of optimizer steps, warm-up left out.
        mfu_full, mfu_causal: model FLOPs utilisation with c = 12 and c = 6, as a share of 1.
        step_s: median wall seconds of a step.
        step_low_s, step_high_s: first and ninth decile.
        memory: the split and the peak.
        gradient_norm, gradient_norm_max: median and largest norm over the steps, before clipping.
        spike_rate: share of steps whose loss jumped.
        max_logit: the largest attention logit of all layers and evaluations.
        entropy: of attention, nats, mean over the layers, at the last evaluation.
        entropy_low: the lowest mean entropy of a head, over all layers and evaluations.
        speed_ratio: of ``tokens_per_s`` against the baseline; None for the baseline itself.
        cpu_ratio: of ``tokens_per_cpu_s``.
        memory_ratio: of ``memory.peak_bytes``.
        activations_ratio: of ``memory.activations_bytes``.
        kernels: the attention kernels that ran, most calls first.
    """

    loss: Summary | None = None
    bits_per_byte: Summary | None = None
    perplexity: Summary | None = None
    word_perplexity: Summary | None = None
    metrics: dict[str, Summary] = field(default_factory=dict)
    tokens_per_s: Summary | None = None
    tokens_per_cpu_s: Summary | None = None
    mfu_full: Summary | None = None
    mfu_causal: Summary | None = None
    step_s: Summary | None = None
    step_low_s: Summary | None = None
    step_high_s: Summary | None = None
    memory: MemorySplit | None = None
    gradient_norm: Summary | None = None
    gradient_norm_max: Summary | None = None
    spike_rate: Summary | None = None
    max_logit: Summary | None = None
    entropy: Summary | None = None
    entropy_low: Summary | None = None
    speed_ratio: Ratio | None = None
    cpu_ratio: Ratio | None = None
    memory_ratio: Ratio | None = None
    activations_ratio: Ratio | None = None
    kernels: tuple[KernelUse, ...] = ()
