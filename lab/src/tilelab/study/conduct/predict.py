"""Predict what a study would take on an absent GPU, by counting: no run starts, no data is read.

The seconds of an optimizer step are those of four parts, one after the other:

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
context, which they may not. A study on a GPU begins with a measured forecast (``forecast.py``). The
memory is what the runner asks for before it starts a run.

``checked`` sets a prediction beside what runs measured: milliseconds a step, and memory.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Group, RenderableType
from rich.table import Table

from tilelab.common.files import write_atomically
from tilelab.common.terminal import Text, in_words
from tilelab.study.ask.config import RunConfig, Study, Variant
from tilelab.study.choices import variants
from tilelab.study.conduct.forecast import FORWARD_SHARE, RECOMPUTED, START_S
from tilelab.study.need import gpu_need, logits_bytes, need, parameters, vocabulary, writes_matrix
from tilelab.study.plan import planned
from tilelab.study.records.events import RunRecord
from tilelab.study.tasks.task import AbstractTask, dtype_of
from tilelab.study.verdict.detect import check_designs, plan_lines
from tilelab.study.verdict.text import digits_for, duration, plain
from tilewise.chips import Chip, named
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.answer import Question, answer

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
            raise InvalidArgument("--dry-run", f"{each.name}, which runs a script", required)
    rows = _rows(study, chip)
    said = [_summary(rows, chip), "", "What the designs can detect:", *plan_lines(study)]
    try:
        check_designs(study)
    except InvalidArgument as error:
        said.append(f"! It would be refused: {error}")
    return Group(_table(study, rows, chip), Text("\n".join(said)))


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
    """Return a row for each arm of a study with a chip; arms without a finished run have none.

    A run that took over the record of another one does not count.
    """
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
        steps = [each.wall_s for one in ours for each in one.steps if not each.warmup]
        if not steps:
            continue
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
