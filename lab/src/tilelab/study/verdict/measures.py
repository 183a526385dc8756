"""Measures of runs: the table of what is measured, the values of one run, and those of an arm.

``MEASURES`` has a row for every measure. Its summary over the seeds, its column in the report and
its withholding follow from the row, and a test compares the row with ``docs/metrics.md``. Nothing
here compares runs, except with a target; ``judge`` does.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Literal

from tilelab.stats.paired import exp, ratio, summary
from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import METRICS, reached, value_in
from tilelab.study.ask.run_config import RunConfig
from tilelab.study.ask.values import parse
from tilelab.study.records.events import Evaluation, Memory, RunRecord, Step
from tilelab.study.verdict.result import ArmMeasures, Cost, Ratio, Status, Summary, TargetResult
from tilelab.study.verdict.text import duration, fixed, percent, rate

SPIKE_WINDOW = 32  # steps before a step that say what its loss should be
SPIKE_HISTORY = 8  # fewer steps than that before it say too little
SPIKE_FACTOR = 7.0  # robust standard deviations above the window's median
_NORMAL_MAD = 1.4826  # standard deviation of normal numbers over their median absolute deviation

# Of one run, by the names of MEASURES, of the parts of memory and of the task's metrics.
Values = Mapping[str, float | None]
Finals = Mapping[int, RunRecord]  # seed -> record


class _Reading:
    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self.last = _last(record)
        self.timed = [each for each in record.steps if not each.warmup]
        self.walls = sorted(each.wall_s / each.of for each in self.timed for _ in range(each.of))
        norms = [each.gradient_norm for each in record.steps]
        self.norms = [each for each in norms if each is not None]
        self.layers = [each.softmaxes for each in record.evaluations if each.softmaxes]

    @cached_property
    def loss(self) -> float | None:
        """Nats per token; None for tasks whose loss is another metric."""
        others = () if self.last is None else self.last.metrics
        per_token = not any(METRICS[name].replaces_loss for name in others)
        return self.last.loss if self.last is not None and per_token else None

    @cached_property
    def tokens_per_s(self) -> float | None:
        return self.tokens_over(sum(self.walls))

    def tokens_over(self, time_s: float) -> float | None:
        tokens = learnt(self.record, self.timed)
        return tokens / time_s if tokens and time_s > 0 else None

    @property
    def spikes(self) -> float | None:
        """Nothing of steps that a stored record has in blocks: a mean hides a jump."""
        steps = self.record.steps
        # A script's line may have no loss, and be of many steps; a step of ours has one, or it was
        # not finite.
        every = not self.record.of_script
        if every and any(each.of != 1 for each in steps):
            return None
        return spike_rate([each.loss for each in steps if every or each.loss is not None])

    def mfu(self, convention: str) -> float | None:
        peak = max(each.peak_flops_s for each in self.record.starts)  # the least disturbed
        flops = self.record.start.flops_per_token.get(convention)
        if self.tokens_per_s is None or flops is None or not peak:
            return None
        return flops * self.tokens_per_s / peak

    def decile(self, tenth: int) -> float | None:
        """Return a decile of the step times: the nearest one, without interpolation."""
        return self.walls[round(tenth / 10 * (len(self.walls) - 1))] if self.walls else None

    def of_layers(self, name: str) -> list[float]:
        """Return a statistic of every attention layer at every evaluation that has it."""
        values = [getattr(layer, name) for layers in self.layers for layer in layers]
        return [each for each in values if each is not None]

    @cached_property
    def last_entropy(self) -> float | None:
        """The mean over the layers at the last evaluation that has any."""
        layers = self.layers[-1] if self.layers else []
        values = [each.entropy for each in layers if each.entropy is not None]
        return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class Measure:
    """A number of a run, and how an arm shows it over its seeds."""

    name: str  # in ``verdict.json``
    formula: str  # this and the unit as in ``docs/metrics.md``
    unit: str
    of: Callable[[_Reading], float | None]  # None: the run does not have it
    table: Literal["quality", "stability", "speed", "attention", ""] = ""  # of the report
    column: str = ""
    show: Callable[[float], str] | None = None  # None: the digits of the experiment's metric
    to: str = ""  # its column shows a range, from it to this other measure


MEASURES: Mapping[str, Measure] = {
    each.name: each
    for each in (
        Measure(
            "bits_per_byte",
            "total negative log-likelihood / (ln 2 x UTF-8 bytes of the predicted tokens)",
            "bits per byte",
            lambda run: run.last.bits_per_byte if run.last else None,
            "quality",
            "bits per byte",
        ),
        Measure(
            "loss",
            "L = total negative log-likelihood / number of predicted tokens",
            "nats per token",
            lambda run: run.loss,
            "quality",
            "nats per token",
        ),
        Measure(
            "perplexity",
            "exp(L): depends on the tokenizer",
            "1",
            lambda run: None if run.loss is None else exp(run.loss),
            "quality",
            "token perplexity",
            fixed(2),
        ),
        Measure(
            "word_perplexity",
            "exp(total negative log-likelihood / original words); WikiText only",
            "1",
            lambda run: run.last.word_perplexity if run.last else None,
            "quality",
            "word perplexity",
            fixed(2),
        ),
        Measure(
            "tokens_per_s",
            "tokens of the timed steps / their wall time",
            "tokens/s",
            lambda run: run.tokens_per_s,
            "speed",
            "tokens/s",
            rate,
        ),
        Measure(
            "tokens_per_cpu_s",
            "the same over the CPU time of all threads of the process",
            "tokens/CPU-s",
            lambda run: run.tokens_over(sum(each.cpu_s for each in run.timed)),
            "speed",
            "tokens/CPU-s",
            rate,
        ),
        Measure(
            "step_s",
            "median wall time of a timed step",
            "s",
            lambda run: statistics.median(run.walls) if run.walls else None,
            "speed",
            "step",
            duration,
        ),
        Measure(
            "step_low_s",
            "its first decile (the nearest step, no interpolation)",
            "s",
            lambda run: run.decile(1),
            "speed",
            "first to ninth decile",
            duration,
            to="step_high_s",
        ),
        Measure("step_high_s", "its ninth decile", "s", lambda run: run.decile(9)),
        Measure(
            "mfu_full",
            "operations per token, c = 12, x `tokens_per_s` / peak",
            "share of 1",
            lambda run: run.mfu("full"),
            "speed",
            "MFU, c = 12",
            percent,
        ),
        Measure(
            "mfu_causal",
            "operations per token, c = 6, x `tokens_per_s` / peak",
            "share of 1",
            lambda run: run.mfu("causal"),
            "speed",
            "MFU, c = 6",
            percent,
        ),
        Measure(
            "gradient_norm",
            "median over the steps of the norm of the whole gradient, before clipping",
            "1",
            lambda run: statistics.median(run.norms) if run.norms else None,
            "stability",
            "gradient norm",
            fixed(3),
        ),
        Measure(
            "gradient_norm_max",
            "the largest",
            "1",
            lambda run: max(run.norms, default=None),
            "stability",
            "largest",
            fixed(2),
        ),
        Measure(
            "spike_rate",
            "share of steps whose training loss jumped",
            "share of 1",
            lambda run: run.spikes,
            "stability",
            "spikes",
            percent,
        ),
        Measure(
            "max_logit",
            "the largest attention logit of all layers and evaluations",
            "1",
            lambda run: max(run.of_layers("max_logit"), default=None),
            "attention",
            "largest logit of the run",
            fixed(2),
        ),
        Measure(
            "entropy",
            "entropy of attention at the last evaluation, mean over the layers",
            "nats",
            lambda run: run.last_entropy,
        ),
        Measure(
            "entropy_low",
            "the lowest mean entropy of a head, over all layers and evaluations",
            "nats",
            lambda run: min(run.of_layers("lowest_head"), default=None),
            "attention",
            "lowest head of the run, nats",
            fixed(3),
        ),
    )
}
# Times and speeds: withheld where the speed of an arm is.
TIMES = {each.name for each in MEASURES.values() if each.table == "speed"} | {"step_high_s"}


def learnt(record: RunRecord, steps: Iterable[Step]) -> int:
    """Return tokens that these steps learnt from, as they said, or as the config says."""
    whole = record.start.tokens_per_step
    return sum(whole * each.of if each.tokens is None else each.tokens for each in steps)


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


def measure(record: RunRecord) -> Values:
    """Return every measure of a run by its name, with its memory and its task's metrics."""
    values: dict[str, float | None] = dict.fromkeys(MEASURES)
    if record.starts:
        run = _Reading(record)
        values = {name: each.of(run) for name, each in MEASURES.items()}
        values |= {} if run.last is None else run.last.metrics
    return values if record.memory is None else values | asdict(record.memory)


def task_metrics(runs: Iterable[Values]) -> list[str]:
    """Return the metrics that the task of some runs has beside those of language models."""
    names = dict.fromkeys(name for values in runs for name in values)
    return [name for name in names if name in METRICS and name not in MEASURES]


def spike_rate(losses: Sequence[float | None]) -> float | None:
    """Return the share of steps whose training loss jumped; None is a loss that was not finite.

    A step jumped where its loss is not finite or lies far above the median of up to
    ``SPIKE_WINDOW`` losses before it. Far means more than ``SPIKE_FACTOR`` robust standard
    deviations (1.4826 times the median absolute deviation). Both medians are blind to a few earlier
    spikes. The share is of the steps with ``SPIKE_HISTORY`` or more before them; None where there
    is no such step.
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


def reach(record: RunRecord, metric: str, target: float) -> Evaluation | None:
    """Return the first evaluation at the target or better; None where no evaluation was."""
    for each in record.evaluations:
        value = metric_of(each, metric)
        if value is not None and reached(metric, value, target):
            return each
    return None


def cost(records: Iterable[RunRecord]) -> Cost:
    """Return the cost of these runs in optimizer steps, whether they ended well or not."""
    begun = [each for each in records if each.starts]
    trials = [each for each in begun if each.start.phase == "sweep"]
    return Cost(*_spent(begun), *_spent(trials))


def _spent(records: Sequence[RunRecord]) -> tuple[int, int, float, float]:
    return (
        len(records),
        sum(learnt(each, each.steps) for each in records),
        sum((sum(step.wall_s for step in each.steps) for each in records), 0.0),
        sum((sum(step.cpu_s for step in each.steps) for each in records), 0.0),
    )


def over_seeds(runs: Sequence[Values]) -> ArmMeasures:
    """Summarise the values of an arm's runs. Ratios and kernels are the judge's."""

    def of(names: Iterable[str]) -> dict[str, Summary | None]:
        values = {name: [each.get(name) for each in runs] for name in names}
        return {
            name: summary([each for each in found if each is not None])
            for name, found in values.items()
        }

    def known(names: Iterable[str]) -> dict[str, Summary]:
        return {name: each for name, each in of(names).items() if each is not None}

    memory = known(each.name for each in fields(Memory))
    means = {name: each.mean for name, each in memory.items()}
    split = Memory(**means) if means else None
    return ArmMeasures(of(MEASURES), known(task_metrics(runs)), split)


def target_result(
    experiment: Experiment, finals: Finals, baseline: Finals | None = None
) -> TargetResult | None:
    """Return the cost of reaching the target in the finished runs of an arm; None without one."""
    target = experiment.target
    if target is None:
        return None
    mine = _reaches(experiment, target, finals)
    theirs = {} if baseline is None else _reaches(experiment, target, baseline)
    taken = list(mine.values())

    def of(name: str) -> tuple[float | None, ...]:
        return tuple(None if each is None else getattr(each, name) for each in taken)

    def compared(name: str) -> Ratio | None:
        both = [(mine.get(seed), theirs.get(seed)) for seed in finals]
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in both if a and b]
        return ratio(pairs, experiment.confidence) if len(pairs) == len(both) else None

    tokens, wall_s, cpu_s = of("tokens"), of("train_wall_s"), of("train_cpu_s")
    return TargetResult(
        target=target,
        tokens=tokens,
        wall_s=wall_s,
        cpu_s=cpu_s,
        reached=sum(each is not None for each in taken),
        median_tokens=_median(tokens),
        median_wall_s=_median(wall_s),
        median_cpu_s=_median(cpu_s),
        tokens_ratio=compared("tokens"),
        wall_ratio=compared("train_wall_s"),
        censored=tuple(_budget(finals[seed]) for seed, each in mine.items() if each is None),
    )


def _reaches(experiment: Experiment, target: float, finals: Finals) -> dict[int, Evaluation | None]:
    """Seed -> what it took, of the runs that are over; None for a miss."""
    return {
        seed: reach(record, experiment.metric, target)
        for seed, record in finals.items()
        if record.done
    }


def _budget(record: RunRecord) -> float:
    """Return tokens at the end of a run; of one that diverged, those that it should have had."""
    # Censored where it diverged, an unstable arm would look as if it had only run less.
    if not record.diverged and record.evaluations:
        return float(record.evaluations[-1].tokens)
    budget, step = record.start.config["budget"], record.start.tokens_per_step
    if budget.get("epochs"):  # older records say none
        return float(parse(RunConfig, record.start.config).steps * step)
    return float(budget["steps"] * step if budget["steps"] else budget["tokens"])


def _median(values: Sequence[float | None]) -> float | None:
    """Return the median with every miss as infinite; None where that is not a number."""
    ranked = [math.inf if each is None else each for each in values]
    middle = statistics.median(ranked) if ranked else math.inf
    return middle if math.isfinite(middle) else None


def _last(record: RunRecord) -> Evaluation | None:
    """Return the evaluation after the last step of a run that is done."""
    if record.end is None or record.end.status != "done" or not record.evaluations:
        return None
    last = record.evaluations[-1]
    return last if last.step == record.end.step else None


def _spike_limit(before: Sequence[float]) -> float:
    middle = statistics.median(before)
    spread = statistics.median(abs(each - middle) for each in before)
    return middle + SPIKE_FACTOR * _NORMAL_MAD * spread
