"""Forecast the time of a study, from a second of calibration before it starts.

One sequence goes forward and backward through the model with one layer, and with two. The
difference is the price of a layer; the rest is the price of everything else. Steps, evaluations and
the start of a process are added up from there. It is for planning an evening, not a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from tilelab.study.ask.config import RunConfig, change
from tilelab.study.ask.run import RunSpec
from tilelab.study.tasks.language import PROMPT_TOKENS
from tilelab.study.tasks.task import AbstractTask, Prepared
from tilelab.study.train.costs import dtype_of, synchronise

__all__ = ["FORWARD_SHARE", "RECOMPUTED", "START_S", "Price"]
__all__ += ["data_key", "forecast_s", "price", "run_s"]

START_S = 5.0  # of a process: importing torch, opening the tokens, measuring memory
_COMPILE_S = 60.0
_BUDGET_S = 0.2  # of one calibration
FORWARD_SHARE = 1 / 3  # of the time of a forward and backward pass
RECOMPUTED = 4 / 3  # with checkpointing: a forward pass more
_MOST_ROWS = 8  # of the micro-batch that is timed


def data_key(config: RunConfig) -> str:
    """Return a key of everything that a task's data depends on: runs with the same key share it."""
    data = config.data.model_dump_json(exclude={"packing"})  # how the same tokens become rows
    return f"{config.task.model_dump_json()} {data}"


class Price(NamedTuple):
    """Seconds that one sequence takes, forward and backward."""

    layer: float  # in each layer
    rest: float  # in everything else


def forecast_s(
    runs: Sequence[RunSpec], corpora: Mapping[str, Prepared], device: torch.device
) -> dict[str, float]:
    """Return seconds that each run takes, by its name; the calibration takes a second or so.

    ``corpora`` is the data of the runs by ``data_key``.
    """
    prices: dict[str, Price] = {}
    found = {}
    for run in runs:
        config, data = run.config, corpora[data_key(run.config)]
        key = _key(config)
        if key not in prices:
            prices[key] = price(config, data, device)
        found[run.name] = run_s(config, prices[key], data)
    return found


def run_s(config: RunConfig, found: Price, data: Prepared) -> float:
    """Return seconds of a whole run whose sequences cost what was ``found``."""
    sequence = found.rest + config.model.layers * found.layer
    training, evaluation = config.training, config.evaluation
    step = training.batch * training.accumulation * sequence
    if training.checkpointing:
        step *= RECOMPUTED
    task: AbstractTask = config.learning
    times = math.ceil(config.steps / evaluation.every)
    examined = times * task.evaluated(config, data, whole=False)
    last = task.evaluated(config, data, whole=True)
    seen = min(config.model.context, PROMPT_TOKENS + evaluation.sample_tokens)
    written = evaluation.sample_tokens * seen / config.model.context
    evaluated = (examined + last + written) * sequence * FORWARD_SHARE
    start = START_S + (_COMPILE_S if training.compile else 0.0)
    return start + config.steps * step + evaluated


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
    return f"{dumped} {config.training.precision}"


def _sequence_s(config: RunConfig, data: Prepared, layers: int, device: torch.device) -> float:
    task: AbstractTask = config.learning
    rows = 1 if task.learns_text else min(config.training.batch, _MOST_ROWS)  # lengths differ
    small = {"training.batch": rows, "training.accumulation": 1, "model.checkpoint": ""}
    cut = change(config, {"model.layers": layers, **small})
    model = task.model(cut, data, 0, device)
    last = task.batches(cut, data, 0).at(cut.steps - 1)  # rows may grow
    (batch,) = (each.to(device) for each in last)
    dtype = dtype_of(config.training.precision)
    narrow = dtype if dtype != torch.float32 else None
    best, began = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - began < _BUDGET_S:
        start = time.perf_counter()
        with torch.autocast(device.type, narrow) if narrow else nullcontext():
            output = model(*batch.inputs)
        loss, _ = task.losses(output, batch.targets, cut.training)
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best / rows
