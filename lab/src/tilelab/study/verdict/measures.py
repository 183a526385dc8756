"""Measures of one run's record: quality, speed, memory, stability, cost.

``docs/metrics.md`` has the definitions. Nothing here compares runs; ``judge`` does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from tilelab.study.ask.metrics import METRICS, reached, value_in
from tilelab.study.records.events import Evaluation, Memory, RunRecord, Step
from tilelab.study.verdict.quantities import ArmMeasures, Cost, MemorySplit, Summary
from tilelab.study.verdict.result import Status
from tilelab.study.verdict.stats import summary

__all__ = [
    "SPIKE_FACTOR",
    "SPIKE_HISTORY",
    "SPIKE_WINDOW",
    "Reach",
    "RunMeasures",
    "cost",
    "final_metric",
    "learnt",
    "measure",
    "metric_of",
    "over_seeds",
    "reach",
    "spike_rate",
    "status",
    "tokens_per_step",
]

SPIKE_WINDOW = 32  # steps before a step that say what its loss should be
SPIKE_HISTORY = 8  # fewer steps than that before it say too little
SPIKE_FACTOR = 7.0  # robust standard deviations above the window's median
_NORMAL_MAD = 1.4826  # standard deviation of normal numbers over their median absolute deviation


@dataclass(frozen=True)
class RunMeasures:
    """The measures of one run; None for what its record does not have.

    Args:
        loss, bits_per_byte, perplexity, word_perplexity: after the last step; None unless done, or
            of another task.
        metrics: the task's others, after the last step.
        tokens_per_s, tokens_per_cpu_s: of the steps after the warm-up.
        mfu_full, mfu_causal: shares of the peak, with c = 12 and c = 6.
        step_s, step_low_s, step_high_s: median and outer deciles of the wall time of a step.
        memory: the split.
        gradient_norm, gradient_norm_max: over all steps that have one.
        spike_rate: share of the steps that could be judged.
        max_logit, entropy_low: the outermost of all layers and evaluations.
        entropy: mean over the layers, at the last evaluation.
    """

    loss: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None
    word_perplexity: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    tokens_per_s: float | None = None
    tokens_per_cpu_s: float | None = None
    mfu_full: float | None = None
    mfu_causal: float | None = None
    step_s: float | None = None
    step_low_s: float | None = None
    step_high_s: float | None = None
    memory: Memory | None = None
    gradient_norm: float | None = None
    gradient_norm_max: float | None = None
    spike_rate: float | None = None
    max_logit: float | None = None
    entropy: float | None = None
    entropy_low: float | None = None


@dataclass(frozen=True)
class Reach:
    """The cost of the first evaluation that was at the target or better.

    Args:
        tokens: trained on by then.
        wall_s, cpu_s: spent in optimizer steps by then.
    """

    tokens: int
    wall_s: float
    cpu_s: float


def tokens_per_step(record: RunRecord) -> int:
    """Count the tokens that one optimizer step can learn from: whole sequences, no padding."""
    config = record.start.config
    training = config["training"]
    return int(training["batch"] * training["accumulation"] * config["model"]["context"])


def learnt(record: RunRecord, steps: Iterable[Step]) -> int:
    """Return tokens that these steps learnt from, as they said, or as the config says."""
    whole = tokens_per_step(record)
    return sum(whole if each.tokens is None else each.tokens for each in steps)


def metric_of(evaluation: Evaluation, metric: str) -> float | None:
    """Return the value of an evaluation in that metric; None where it was not finite."""
    return value_in(vars(evaluation), metric)


def final_metric(record: RunRecord, metric: str) -> float | None:
    """Return the held-out metric after the last step; None unless the run is done."""
    last = _last(record)
    return None if last is None else metric_of(last, metric)


def status(record: RunRecord, metric: str) -> Status:
    """Return the state of a run: done, diverged (also where its final metric is), or incomplete."""
    last = _last(record)
    if record.diverged or (last is not None and metric_of(last, metric) is None):
        return "diverged"
    return "incomplete" if last is None else "done"


def measure(record: RunRecord) -> RunMeasures:
    """Return all measures of a run, as far as it has come."""
    if not record.starts:
        return RunMeasures()
    last = _last(record)
    others = {} if last is None else last.metrics
    per_token = not any(METRICS[name].replaces_loss for name in others)
    loss = last.loss if last is not None and per_token else None
    norms = [each.gradient_norm for each in record.steps if each.gradient_norm is not None]
    timed = [each for each in record.steps if not each.warmup]
    walls = sorted(each.wall_s for each in timed)
    tokens = learnt(record, timed)
    tokens_per_s = _over(tokens, sum(walls))
    return RunMeasures(
        loss=loss,
        bits_per_byte=None if last is None else last.bits_per_byte,
        perplexity=None if loss is None else _exp(loss),
        word_perplexity=None if last is None else last.word_perplexity,
        metrics={name: each for name, each in others.items() if each is not None},
        tokens_per_s=tokens_per_s,
        tokens_per_cpu_s=_over(tokens, sum(each.cpu_s for each in timed)),
        mfu_full=_mfu(record, "full", tokens_per_s),
        mfu_causal=_mfu(record, "causal", tokens_per_s),
        step_s=statistics.median(walls) if walls else None,
        step_low_s=_decile(walls, 1),
        step_high_s=_decile(walls, 9),
        memory=record.memory,
        gradient_norm=statistics.median(norms) if norms else None,
        gradient_norm_max=max(norms, default=None),
        spike_rate=spike_rate([each.loss for each in record.steps]),
        **_attention(record),
    )


def _attention(record: RunRecord) -> dict[str, float]:
    """Return the measures of the attention layers, for a run that has statistics."""
    seen = [each.softmaxes for each in record.evaluations if each.softmaxes]
    layers = [layer for each in seen for layer in each]
    logits = [each.max_logit for each in layers if each.max_logit is not None]
    lowest = [each.lowest_head for each in layers if each.lowest_head is not None]
    last = [each.entropy for each in seen[-1] if each.entropy is not None] if seen else []
    found = {}
    if logits and lowest and last:
        found["max_logit"], found["entropy_low"] = max(logits), min(lowest)
        found["entropy"] = statistics.fmean(last)
    return found


def spike_rate(losses: Sequence[float | None]) -> float | None:
    """Return the share of steps whose training loss jumped.

    A step jumped where its loss is not finite or lies far above the median of up to
    ``SPIKE_WINDOW`` losses before it. Far means more than ``SPIKE_FACTOR`` robust standard
    deviations (1.4826 times the median absolute deviation). Both medians are blind to a few earlier
    spikes.

    Args:
        losses: of the steps in order; None for one that was not finite.

    Returns:
        Of the steps with ``SPIKE_HISTORY`` or more before them; None where there is no such step.
    """
    before: list[float] = []
    judged = spikes = 0
    for loss in losses:
        if len(before) >= SPIKE_HISTORY:
            judged += 1
            spikes += loss is None or loss > _spike_limit(before[-SPIKE_WINDOW:])
        if loss is not None:
            before.append(loss)
    return spikes / judged if judged else None


def reach(record: RunRecord, metric: str, target: float) -> Reach | None:
    """Return the first evaluation at the target or better; None where no evaluation was."""
    for each in record.evaluations:
        value = metric_of(each, metric)
        if value is not None and reached(metric, value, target):
            return Reach(each.tokens, each.train_wall_s, each.train_cpu_s)
    return None


def cost(records: Iterable[RunRecord]) -> Cost:
    """Return the cost of these runs in optimizer steps, whether they ended well or not."""
    runs = tokens = sweep_runs = sweep_tokens = 0
    wall_s = cpu_s = sweep_wall_s = sweep_cpu_s = 0.0
    for record in records:
        if not record.starts:
            continue
        taken = learnt(record, record.steps)
        run_wall_s = sum(each.wall_s for each in record.steps)
        run_cpu_s = sum(each.cpu_s for each in record.steps)
        runs, tokens = runs + 1, tokens + taken
        wall_s, cpu_s = wall_s + run_wall_s, cpu_s + run_cpu_s
        if record.start.phase == "sweep":
            sweep_runs, sweep_tokens = sweep_runs + 1, sweep_tokens + taken
            sweep_wall_s, sweep_cpu_s = sweep_wall_s + run_wall_s, sweep_cpu_s + run_cpu_s
    return Cost(runs, tokens, wall_s, cpu_s, sweep_runs, sweep_tokens, sweep_wall_s, sweep_cpu_s)


def over_seeds(records: Sequence[RunRecord]) -> ArmMeasures:
    """Summarise the measures of an arm over its seeds. Ratios and kernels are the judge's."""
    runs = [measure(each) for each in records]

    def of(name: str) -> Summary | None:
        values = [getattr(each, name) for each in runs]
        return summary([each for each in values if each is not None])

    return ArmMeasures(
        loss=of("loss"),
        bits_per_byte=of("bits_per_byte"),
        perplexity=of("perplexity"),
        word_perplexity=of("word_perplexity"),
        metrics=_metrics([each.metrics for each in runs]),
        tokens_per_s=of("tokens_per_s"),
        tokens_per_cpu_s=of("tokens_per_cpu_s"),
        mfu_full=of("mfu_full"),
        mfu_causal=of("mfu_causal"),
        step_s=of("step_s"),
        step_low_s=of("step_low_s"),
        step_high_s=of("step_high_s"),
        memory=_mean_memory([each.memory for each in runs if each.memory is not None]),
        gradient_norm=of("gradient_norm"),
        gradient_norm_max=of("gradient_norm_max"),
        spike_rate=of("spike_rate"),
        max_logit=of("max_logit"),
        entropy=of("entropy"),
        entropy_low=of("entropy_low"),
    )


def _metrics(runs: Sequence[dict[str, float]]) -> dict[str, Summary]:
    names = dict.fromkeys(name for each in runs for name in each)
    found = {name: summary([each[name] for each in runs if name in each]) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def _last(record: RunRecord) -> Evaluation | None:
    """Return the evaluation after the last step of a run that is done."""
    if record.end is None or record.end.status != "done" or not record.evaluations:
        return None
    last = record.evaluations[-1]
    return last if last.step == record.end.step else None


def _over(amount: float, time_s: float) -> float | None:
    return amount / time_s if amount and time_s > 0 else None


def _mfu(record: RunRecord, convention: str, tokens_per_s: float | None) -> float | None:
    peak = max(each.peak_flops_s for each in record.starts)  # the least disturbed measurement
    flops = record.start.flops_per_token.get(convention)
    if tokens_per_s is None or flops is None or not peak:
        return None
    return flops * tokens_per_s / peak


def _decile(ordered: Sequence[float], tenth: int) -> float | None:
    """Return a decile of sorted values: the nearest one, without interpolation."""
    return ordered[round(tenth / 10 * (len(ordered) - 1))] if ordered else None


def _spike_limit(before: Sequence[float]) -> float:
    middle = statistics.median(before)
    spread = statistics.median(abs(each - middle) for each in before)
    return middle + SPIKE_FACTOR * _NORMAL_MAD * spread


def _mean_memory(splits: Sequence[Memory]) -> MemorySplit | None:
    if not splits:
        return None
    names = [part.name for part in fields(MemorySplit)]
    return MemorySplit(**{name: _mean(splits, name) for name in names})


def _mean(splits: Sequence[Memory], name: str) -> float:
    return statistics.fmean(getattr(split, name) for split in splits)


def _exp(loss: float) -> float:
    """e^loss, infinite where a float cannot hold it: the loss of a run that went astray."""
    return math.exp(loss) if loss < 700 else math.inf
