"""What a study would take: predicted by counting for an absent GPU, or measured on this machine.

**Predicted**: no run starts, no data is read. The seconds of an optimizer step are those of four
parts, one after the other:

* matrix products, 6 operations for each weight that a token is multiplied with, at the chip's peak;
* attention, by the IO model (``tilewise explain --chip``): plain attention by its passes over the
  matrix, the others by the tiled algorithm. The model takes torch's fused kernel to be as good as
  ours;
* what else lies in memory for the backward pass (``need.py``), at the chip's bandwidth: written and
  read again, and so are its gradients;
* the weights: cast for every micro-batch, gradients added up, and the optimizer's update.

An evaluation is a forward pass: a third of a step's time for as many sequences. The prediction
leaves out

* evaluations on data sets of examples, whose sizes are not known without the data;
* what an ``evaluation.final_stride`` adds to the last evaluation: the whole held-out text.

For a text the prediction is a lower bound. It leaves out launches, the passes of a chain of small
operations, and the distance from the ceilings. For examples it assumes that sequences fill the
context, which they may not. The memory is what the runner asks for before it starts a run.

``checked`` sets a prediction beside what runs measured: milliseconds a step, and memory.

**Measured** (``forecast_s``), before a study begins: a second of calibration prices a sequence.
Some rows go forward and backward through the model with one layer, and with two. The difference is
the price of a layer; the rest is the price of everything else. Steps, evaluations and the start of
a process are added up from there.

Calibration leaves out the optimizer and what runs beside a run. So where the study has runs that
this machine trained, the price is multiplied by what their steps took over what calibration says
of them: by the median over records of the same steps, or else over all kinds of step.

On one thread of a CPU both times are processor time, which other work does not move. The forecast
is then that of a machine with nothing else to do. It is for planning an evening, not a measurement.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from tilelab.common.files import write_atomically
from tilelab.common.terminal import Text, in_words
from tilelab.models.layers import products
from tilelab.study.ask.config import RunConfig, Study, Variant, change
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.choices import variants
from tilelab.study.conduct.forks import can_be_forked
from tilelab.study.need import gpu_need, logits_bytes, need, parameters, vocabulary, writes_matrix
from tilelab.study.plan import planned
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.tasks.language import PROMPT_TOKENS
from tilelab.study.tasks.task import AbstractTask, Prepared, data_key, dtype_of
from tilelab.study.train.costs import synchronise
from tilelab.study.train.state import branch_step, trunk_family
from tilelab.study.verdict.detect import check_designs, plan_lines
from tilelab.study.verdict.text import digits_for, duration, plain
from tilewise.chips import Chip, named
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.answer import Question, answer

START_S = 5.0  # of a process: importing torch, opening the tokens, measuring memory
FORK_S = 0.5  # of a fork, which has all but the measuring behind it
_COMPILE_S = 60.0
_BUDGET_S = 0.2  # of one calibration
FORWARD_SHARE = 1 / 3  # of the time of a forward and backward pass
RECOMPUTED = 4 / 3  # with checkpointing: a forward pass more
_MOST_ROWS = 8  # of examples in the micro-batch that is timed
_MOST_TOKENS = 2048  # of text in it, if a sequence is not longer: one short row is all overhead
_DEVICE = "cuda"  # what every chip here is to torch
_KEPT_TIMES = 4  # written and read, of what is kept and of its gradient
_CAST_BYTES = 4 + 2 + 8  # a weight in a micro-batch: read, written narrow; its gradient added
_UPDATE_BYTES = 7 * 4  # weight, gradient and two moments read, all but the gradient written
_FLOAT_CAST_BYTES = 8  # in float32 nothing is cast


class Predicted(NamedTuple):
    """The predicted cost of one run on a chip."""

    products_s: float  # these three of an optimizer step
    attention_s: float
    rest_s: float  # memory
    run_s: float
    memory_bytes: int  # at its highest

    @property
    def step_s(self) -> float:
        """Seconds of an optimizer step."""
        return self.products_s + self.attention_s + self.rest_s


def gpu_named(name: str) -> Chip:
    """Return the row of a GPU; refuse other names, and processors."""
    chip = named(name)
    if chip.kind != "gpu":
        fix = "A processor that is here needs no prediction: runs are timed before a study starts."
        raise InvalidArgument("--chip", repr(name), "a GPU of `tilewise explain --chip`", fix)
    return chip


def predict(config: RunConfig, chip: Chip) -> Predicted:
    """Return the prediction for one run; see the top of this file.

    Raises:
        InvalidArgument: the row lacks a figure.
        Unsupported: an attention whose traffic depends on numbers, such as a table of blocks.
    """
    training, model = config.training, config.model
    dtype = dtype_of(training.precision)
    peak, bandwidth = chip.peak(str(dtype).removeprefix("torch.")), chip.bandwidth_bytes_s
    if not peak or not bandwidth:
        came = f"{chip.name}, without a peak in {training.precision} or a bandwidth"
        raise InvalidArgument("--chip", came, "a chip with both")
    total, wanted = parameters(config), need(config, _DEVICE)
    recomputed = RECOMPUTED if training.checkpointing else 1.0
    products = recomputed * 6.0 * _multiplied(config) * config.tokens_per_step / peak
    parts = training.accumulation
    attention = recomputed * parts * model.layers * _attention_s(config, chip)
    cast = _FLOAT_CAST_BYTES if training.precision == "float32" else _CAST_BYTES
    # Logits travel as often where they are made in chunks, which are not kept.
    travels = wanted.activations + (2 * logits_bytes(config) if training.loss_tokens else 0)
    moved = parts * (_KEPT_TIMES * travels + cast * total)
    rest = (moved + _UPDATE_BYTES * total) / bandwidth
    step = products + attention + rest
    task: AbstractTask = config.learning
    times = 1 + math.ceil(config.steps / config.evaluation.every)
    examined = times * config.evaluation.windows if task.learns_text else 0
    evaluated = examined * FORWARD_SHARE * step / (training.batch * parts)
    run = START_S + config.steps * step + evaluated
    return Predicted(products, attention, rest, run, wanted.total)


def _multiplied(config: RunConfig) -> float:
    """Weights that a token is multiplied with, on average: what is looked up is left out."""
    model, found = config.model, float(parameters(config))
    if model.positions == "learned":
        found -= model.context * model.width
    if not model.tied:
        found -= vocabulary(config.data) * model.width
    if model.family == "bert":  # tokens and their types; a head over some tokens is the former
        tokens = vocabulary(config.data)
        hidden = config.task.options.get("probability", 0.0)
        found -= ((1.0 - hidden) * tokens + 2) * model.width
    return found


def _attention_s(config: RunConfig, chip: Chip) -> float:
    model, training = config.model, config.training
    return _layer_s(
        chip,
        (training.batch, model.heads, model.context, model.head_width),
        model.kv_heads or model.heads,
        training.precision,
        config.attention.variant.model_dump_json(),
        model.family == "gpt2",
        model.dropout.attention,
        writes_matrix(config, _DEVICE),
    )


@lru_cache(maxsize=512)
def _layer_s(
    chip: Chip,
    queries: tuple[int, int, int, int],
    kv_heads: int,
    precision: str,
    variant: str,
    causal: bool,
    dropout_p: float,
    plain: bool,
) -> float:
    batch, number, length, width = queries
    heads = variants.Heads(number, torch.device("cpu"), length, causal)
    which = Variant.model_validate_json(variant)
    mask, score, pattern = variants.build(which, heads)
    if pattern is not None or mask.captured:
        fix = "Leave its arm out: the time of the others does not depend on it."
        raise Unsupported(f"a prediction of {which.name}, which draws its pattern", fix=fix)
    keys = (batch, kv_heads, length, width)
    question = Question(queries, keys, width, dtype_of(precision), mask, score, 1, ())
    found = answer(question, chip, dropout_p, None).account
    assert found is not None
    return found.seconds(found.both.plain if plain else found.both.ours, chip).total


class _Row(NamedTuple):
    experiment: str
    arm: str
    config: RunConfig
    runs: int
    predicted: Predicted
    total_s: float


def _rows(study: Study, chip: Chip) -> list[_Row]:
    """Return a row per arm in the study's order; an arm's total includes its sweep's trials."""
    found: dict[tuple[str, str], list[RunConfig]] = {}
    for run in planned(study):
        found.setdefault((run.experiment, run.arm), []).append(run.config)
    rows = []
    for (experiment, arm), configs in found.items():
        each = [predict(config, chip) for config in configs]
        longest = max(range(len(each)), key=lambda at: each[at].run_s)
        seconds = sum(one.run_s for one in each)
        rows.append(_Row(experiment, arm, configs[longest], len(each), each[longest], seconds))
    return rows


def dry_run(study: Study, chip: Chip) -> RenderableType:
    """Return the table of what a study would take; errors as of ``predict``."""
    for each in study.experiments:
        if each.baseline.learning.external:
            required = "a study of the models here: nothing is known of a script's"
            fix = "Without --chip it lists the runs of a script."
            raise InvalidArgument("--chip", f"{each.name}, which runs a script", required, fix)
    rows = _rows(study, chip)
    said = [_summary(rows, chip), "", *_designs(study)]
    return Group(_table(study, rows, chip), Text("\n".join(said)))


def dry_run_of_script(study: Study) -> RenderableType:
    """Return the table of a script's runs: how many, of what, and what they can detect."""
    table = Table(title=f"{study.name}, which runs a script", title_justify="left")
    for head in ("experiment", "arm", "choices"):
        table.add_column(head, overflow="fold")
    for head in ("trials", "runs that count", "steps"):
        table.add_column(head, justify="right")
    runs = planned(study)
    for each in study.experiments:
        for arm in each.arm_names:
            own = [run for run in runs if (run.experiment, run.arm) == (each.name, arm)]
            trials = sum(run.phase == "sweep" for run in own)
            config = each.config_of(arm)
            choices = " ".join(f"{name}={value}" for name, value in config.choice.items())
            counts = (f"{trials}", f"{len(own) - trials}", f"{config.steps:,}")
            table.add_row(each.name, arm, choices, *counts)
    known = f"{len(runs)} runs. Nothing is known of their time and memory, and nothing was run."
    return Group(table, Text("\n".join([known, "", *_designs(study)])))


def _designs(study: Study) -> list[str]:
    said = ["What the designs can detect:", *plan_lines(study)]
    try:
        check_designs(study)
    except InvalidArgument as error:
        said.append(f"! It would be refused: {error}")
    return said


def _table(study: Study, rows: Sequence[_Row], chip: Chip) -> Table:
    table = Table(title=f"{study.name} on one {chip.name}, predicted", title_justify="left")
    for head in ("experiment", "arm", "model", "context", "batch"):
        table.add_column(head, overflow="fold")
    for head in ("runs", "steps", "step", "attention", "each run", "all runs", "memory"):
        table.add_column(head, justify="right")
    before = ""
    for row in rows:
        config, predicted, model = row.config, row.predicted, row.config.model
        parts, millions = config.training.accumulation, parameters(config) / 1e6
        size = plain(millions, digits_for(millions))
        if before and row.experiment != before:
            table.add_section()
        table.add_row(
            row.experiment if row.experiment != before else "",
            row.arm,
            f"{model.family} {model.layers} x {model.width}, {size} M",
            f"{model.context:,}",
            f"{config.training.batch}{f' x {parts}' if parts > 1 else ''}",
            f"{row.runs}",
            f"{config.steps:,}",
            duration(predicted.step_s),
            f"{predicted.attention_s / predicted.step_s:.0%}",
            in_words(predicted.run_s),
            f"{row.total_s / 3600:,.2f} h",
            f"{predicted.memory_bytes / 1e9:,.1f} GB{'' if _fits(row, chip) else ' !'}",
        )
        before = row.experiment
    return table


def _fits(row: _Row, chip: Chip) -> bool:
    return chip.memory_bytes is None or row.predicted.memory_bytes <= chip.memory_bytes


def _summary(rows: Sequence[_Row], chip: Chip) -> str:
    hours = sum(row.total_s for row in rows) / 3600
    lines = [
        f"{sum(row.runs for row in rows)} runs, {hours:,.1f} hours, one after the other.",
        "Predicted by counting operations and bytes against the chip's ceilings, which no run "
        "reaches: take it for the least. Nothing was run, and no data was read.",
    ]
    if any(not row.config.learning.learns_text for row in rows):
        lines.append("Evaluations of examples are not counted.")
    if any(row.config.evaluation.final_stride for row in rows):
        lines.append(
            "The last evaluation is counted as one of the others: that it goes over the whole "
            "held-out text (evaluation.final_stride) is not."
        )
    large = [f"{row.experiment}/{row.arm}" for row in rows if not _fits(row, chip)]
    if large:
        room = f"{(chip.memory_bytes or 0) / 1e9:,.0f} GB"
        lines.append(f"! needs more than the chip's {room}: {', '.join(large)}")
    return "\n".join(lines)


PREDICTED = "predicted.json"  # in the folder of a study


@dataclass(frozen=True)
class Checked:
    """One arm: the prediction for the study's chip, and what its runs measured."""

    experiment: str
    arm: str
    device: str  # that ran it; the prediction is for the chip of the study
    runs: int  # that are over
    predicted_step_ms: float
    measured_step_ms: float  # the median over the steps of all runs, without warm-up
    predicted_bytes: int  # beside the process itself, as the measured ones
    measured_bytes: float  # the largest peak of its runs


def checked(study: Study, records: Mapping[str, RunRecord]) -> list[Checked]:
    """Return a row for each arm of a study with a chip; arms without a finished run have none."""
    if not study.chip:
        return []
    chip = gpu_named(study.chip)
    found: dict[tuple[str, str], tuple[RunConfig, list[RunRecord]]] = {}
    for run in planned(study, records):
        record = records.get(run.name)
        if record is None or not record.done or record.memory is None or record.start.same_as:
            continue
        if run.phase == "final":
            found.setdefault((run.experiment, run.arm), (run.config, []))[1].append(record)
    rows = []
    for (experiment, arm), (config, ours) in found.items():
        timed = [each for one in ours for each in one.steps if not each.warmup]
        if not timed:
            continue
        # A line of a condensed record stands for several steps.
        steps = [each.wall_s / each.of for each in timed for _ in range(each.of)]
        predicted = predict(config, chip)
        rows.append(
            Checked(
                experiment,
                arm,
                str(ours[0].start.environment.get("device", "")),
                len(ours),
                1e3 * predicted.step_s,
                1e3 * statistics.median(steps),
                gpu_need(config).training,
                max(each.memory.peak_bytes for each in ours if each.memory is not None),
            )
        )
    return rows


def write_checked(rows: Sequence[Checked], folder: Path) -> None:
    """Put the rows into ``predicted.json`` of a study's folder."""
    write_atomically(
        folder / PREDICTED, json.dumps([asdict(each) for each in rows], indent=1) + "\n"
    )


def checked_table(study: Study, rows: Sequence[Checked]) -> Table:
    """Return the rows for people; ratios are measured over predicted."""
    devices = ", ".join(dict.fromkeys(each.device for each in rows))
    title = f"Predicted for {study.chip}, measured on {devices}"
    made = Table(title=title, title_justify="left")
    for head in ("experiment", "arm"):
        made.add_column(head, overflow="fold")
    for head in ("predicted step", "measured", "ratio", "predicted memory", "measured", "ratio"):
        made.add_column(head, justify="right")
    for each in rows:
        made.add_row(
            each.experiment,
            each.arm,
            f"{each.predicted_step_ms:,.1f} ms",
            f"{each.measured_step_ms:,.1f} ms",
            f"{each.measured_step_ms / each.predicted_step_ms:.2f}",
            f"{each.predicted_bytes / 1e9:,.1f} GB",
            f"{each.measured_bytes / 1e9:,.1f} GB",
            f"{each.measured_bytes / each.predicted_bytes:.2f}",
        )
    return made


class Price(NamedTuple):
    """Seconds that one sequence takes, forward and backward."""

    layer: float  # in each layer
    rest: float  # in everything else


def forecast_s(
    runs: Sequence[RunSpec],
    corpora: Mapping[str, Prepared],
    execution: Execution,
    records: Mapping[str, RunRecord],
) -> dict[str, float]:
    """Return seconds that each run takes that is not over, by its name.

    Calibration takes about half a second for each kind of sequence.

    A run that goes on from the trunk of a shorter one takes the rest of its steps; what is known of
    a trunk comes from runs that have ended too. ``corpora`` has the data by ``data_key``; a run
    without any is not forecast.
    """
    device, prices = torch.device(execution.device), dict[str, Price]()

    def priced(config: RunConfig) -> Price:
        key = _key(config)
        if key not in prices:
            prices[key] = price(config, corpora[data_key(config)], device)
        return prices[key]

    there = [run for run in runs if data_key(run.config) in corpora]
    ratios = defaultdict[str, list[float]](list)
    for run in there:
        step = _seen_step_s(records.get(run.name, RunRecord()), execution)
        if step is not None:
            ratios[_kind(run.config)].append(step / _step_s(run.config, priced(run.config)))
    of_kind = {kind: statistics.median(each) for kind, each in ratios.items()}
    of_all = statistics.median(of_kind.values()) if of_kind else 1.0
    shared, found = _shared_steps(there), {}
    for run in there:
        if is_over(run.name, records):
            continue
        ratio = of_kind.get(_kind(run.config), of_all)
        own = Price(*(ratio * each for each in priced(run.config)))
        start = FORK_S if can_be_forked(run.executed(execution)) else START_S
        whole = run_s(run.config, own, corpora[data_key(run.config)], start)
        found[run.name] = whole - shared.get(run.name, 0) * _step_s(run.config, own)
    return found


def _seen_step_s(record: RunRecord, execution: Execution) -> float | None:
    """Return seconds of a step of a run that was executed so on this machine; None for others."""
    own = {
        "chip": execution.environment.get("chip"),
        "instruction_set": execution.environment.get("instruction_set"),
        "threads": execution.threads,
        "device": "cpu" if execution.device == "cpu" else torch.cuda.get_device_name(),
        "processes": execution.processes,
    }
    timed = [each for each in record.steps if not each.warmup]
    if not timed:
        return None
    there = {"device": "cpu", "processes": 1, **record.start.environment}
    if any(there.get(name) != value for name, value in own.items()):
        return None
    own_time = record.one_thread
    return statistics.median((each.cpu_s if own_time else each.wall_s) / each.of for each in timed)


def _kind(config: RunConfig) -> str:
    """Return a key of everything that the time of a step depends on."""
    training = config.training.model_dump_json(exclude={"label_smoothing", "z_loss", "clip"})
    model = config.model.model_dump_json()
    return f"{_key(config)} {model} {training} {config.optimizer.name}"


def _shared_steps(runs: Sequence[RunSpec]) -> dict[str, int]:
    """Return the first steps that a run takes over from a shorter one, by its name."""
    alike = defaultdict[str, list[RunSpec]](list)
    for run in runs:
        if run.branches:
            alike[trunk_family(run)].append(run)
    found = {}
    for each in alike.values():
        before = 0
        for run in sorted(each, key=lambda run: run.config.steps):
            found[run.name] = before
            before = branch_step(run.config)
    return found


def run_s(config: RunConfig, found: Price, data: Prepared, start_s: float = START_S) -> float:
    """Return seconds of a whole run whose sequences cost what was ``found``."""
    sequence = found.rest + config.model.layers * found.layer
    training, evaluation = config.training, config.evaluation
    task: AbstractTask = config.learning
    times = math.ceil(config.steps / evaluation.every)
    examined = times * task.evaluated(config, data, whole=False)
    last = task.evaluated(config, data, whole=True)
    seen = min(config.model.context, PROMPT_TOKENS + evaluation.sample_tokens)
    written = evaluation.sample_tokens * seen / config.model.context
    evaluated = (examined + last + written) * sequence * FORWARD_SHARE
    start = start_s + (_COMPILE_S if training.compile else 0.0)
    return start + config.steps * _step_s(config, found) + evaluated


def _step_s(config: RunConfig, found: Price) -> float:
    """Return seconds of an optimizer step, with what is recomputed."""
    training = config.training
    sequence = found.rest + config.model.layers * found.layer
    again = RECOMPUTED if training.checkpointing else 1.0
    return again * training.batch * training.accumulation * sequence


def price(config: RunConfig, data: Prepared, device: torch.device) -> Price:
    """Measure what a sequence costs on this machine's device, with this process's threads."""
    one, two = (_sequence_s(config, data, layers, device) for layers in (1, 2))
    layer = max(two - one, 0.0)
    return Price(layer, max(one - layer, 0.0))


def _key(config: RunConfig) -> str:
    """Return a key of everything that the price depends on."""
    model = config.model.model_copy(update={"layers": 1})
    parts = (model, config.attention, config.task, config.data)
    dumped = " ".join(each.model_dump_json() for each in parts)
    return f"{dumped} {config.training.precision} {config.training.loss_tokens}"


def _sequence_s(config: RunConfig, data: Prepared, layers: int, device: torch.device) -> float:
    task: AbstractTask = config.learning
    text = max(1, _MOST_TOKENS // config.model.context)
    rows = min(config.training.batch, text if task.learns_text else _MOST_ROWS)
    small = {"training.batch": rows, "training.accumulation": 1, "model.checkpoint": ""}
    cut = change(config, {"model.layers": layers, **small})
    model = task.model(cut, data, 0, device)
    forward = task.learner(model, cut.training)
    last = task.batches(cut, data, 0)(cut.steps - 1)  # rows may grow
    (batch,) = (each.to(device) for each in last)
    dtype = dtype_of(config.training.precision)
    narrow = dtype if dtype != torch.float32 else None
    own = device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.process_time if own else time.perf_counter
    took, began = list[float](), time.perf_counter()
    while len(took) < 2 or time.perf_counter() - began < _BUDGET_S:  # the first is slower
        start = clock()
        with products(device, dtype):
            with torch.autocast(device.type, narrow) if narrow else nullcontext():
                output = forward(*batch.inputs)
            loss, _ = task.losses(output, batch.targets, cut.training)
            loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        synchronise(device)
        took.append(clock() - start)
    return min(took) / rows
