"""The forecast of a study: how long its runs will take on this machine.

A second of calibration prices a sequence. Some rows go forward and backward through the model with
one layer, and with two. The difference is the price of a layer; the rest is the price of everything
else. Steps, evaluations and the start of a process are added up from there.

Calibration leaves out the optimizer and what runs beside a run. So where the study has runs that
this machine trained, the price is multiplied by what their steps took over what calibration says
of them: by the median over records of the same steps, or else over all kinds of step.

On one thread of a CPU both times are processor time, which other work does not move. The forecast
is then that of a machine with nothing else to do. It is for planning an evening, not a measurement.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from tilelab.models.layers import products
from tilelab.study.ask.config import RunConfig, change
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.conduct.forks import can_be_forked
from tilelab.study.records.events import RunRecord, is_over
from tilelab.study.tasks.language import PROMPT_TOKENS
from tilelab.study.tasks.task import AbstractTask, Prepared, data_key, dtype_of
from tilelab.study.train.costs import synchronise
from tilelab.study.train.state import branch_step, trunk_family

START_S = 5.0  # of a process: importing torch, opening the tokens, measuring memory
FORK_S = 0.5  # of a fork, which has all but the measuring behind it
_COMPILE_S = 60.0
_BUDGET_S = 0.2  # of one calibration
FORWARD_SHARE = 1 / 3  # of the time of a forward and backward pass
RECOMPUTED = 4 / 3  # with checkpointing: a forward pass more
_MOST_ROWS = 8  # of examples in the micro-batch that is timed
_MOST_TOKENS = 2048  # of text in it, if a sequence is not longer: one short row is all overhead


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

    A run that goes on from the trunk of a shorter one takes the rest of its steps.

    Args:
        runs: of the study; what is known of a trunk comes from those that have ended too.
        corpora: the data by ``data_key``; a run without any is not forecast.
        execution: how they run.
        records: of the runs, by their names.
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
