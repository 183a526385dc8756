"""How long a study will take, from a second of calibration before it starts.

One sequence goes forward and backward through the model with one layer, and with two: the
difference is the price of a layer, the rest that of everything else. Steps, evaluations and the
start of a process are added up from there. It is for planning an evening, not a measurement.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from tilewise.lab.study.config import Data, RunConfig, change
from tilewise.lab.study.data.tokens import Tokens
from tilewise.lab.study.plan import Task
from tilewise.lab.study.train.flops import dtype_of, synchronise
from tilewise.lab.study.train.sampler import PROMPT_TOKENS
from tilewise.lab.study.train.trainer import model_of

__all__ = ["Price", "forecast_s", "price", "run_s"]

_START_S = 5.0  # of a process: importing torch, opening the tokens, measuring memory
_COMPILE_S = 60.0
_BUDGET_S = 0.2  # of one calibration
_FORWARD_SHARE = 1 / 3  # of the time of a forward and backward pass
_RECOMPUTED = 4 / 3


class Price(NamedTuple):
    """Seconds that one sequence takes, forward and backward.

    Args:
        layer: in each layer.
        rest: in everything else.
    """

    layer: float
    rest: float


def forecast_s(
    tasks: Sequence[Task], corpora: Mapping[Data, Tokens], device: torch.device
) -> dict[str, float]:
    """Seconds that each run takes, by its name; the calibration takes a second or so.

    Args:
        tasks: the runs.
        corpora: their data, ready.
        device: where they train.
    """
    prices: dict[str, Price] = {}
    found = {}
    for task in tasks:
        config, tokens = task.run.config, corpora[task.run.config.data]
        key = _key(config)
        if key not in prices:
            prices[key] = price(config, tokens.vocabulary, device)
        found[task.run.name] = run_s(config, prices[key], len(tokens.held_out))
    return found


def run_s(config: RunConfig, found: Price, held_out_tokens: int) -> float:
    """Seconds of a whole run.

    Args:
        config: of the run.
        found: what its sequences cost.
        held_out_tokens: of its text.
    """
    sequence = found.rest + config.model.layers * found.layer
    training, evaluation = config.training, config.evaluation
    step = training.batch * training.accumulation * sequence
    if training.checkpointing:
        step *= _RECOMPUTED
    windows = math.ceil(config.steps / evaluation.every) * evaluation.windows
    last = evaluation.windows
    if evaluation.final_stride:
        last = math.ceil(held_out_tokens / evaluation.final_stride)
    seen = min(config.model.context, PROMPT_TOKENS + evaluation.sample_tokens)
    written = evaluation.sample_tokens * seen / config.model.context
    evaluated = (windows + last + written) * sequence * _FORWARD_SHARE
    start = _START_S + (_COMPILE_S if training.compile else 0.0)
    return start + config.steps * step + evaluated


def price(config: RunConfig, vocabulary: int, device: torch.device) -> Price:
    """Measure what a sequence costs on this machine's device, with this process's threads."""
    one, two = (_sequence_s(config, vocabulary, layers, device) for layers in (1, 2))
    layer = max(two - one, 0.0)
    return Price(layer, max(one - layer, 0.0))


def _key(config: RunConfig) -> str:
    """What the price depends on."""
    model = config.model.model_copy(update={"layers": 1})
    attention = config.attention.model_dump_json()
    return (
        f"{model.model_dump_json()} {attention} {config.training.precision} {config.data.tokenizer}"
    )


def _sequence_s(config: RunConfig, vocabulary: int, layers: int, device: torch.device) -> float:
    cut = change(config, {"model.layers": layers})
    model = model_of(cut, vocabulary, 0, device)
    context = config.model.context
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (1, context + 1), generator=generator).to(device)
    dtype = dtype_of(config.training.precision)
    narrow = dtype if dtype != torch.float32 else None
    best, began = math.inf, time.perf_counter()
    while best == math.inf or time.perf_counter() - began < _BUDGET_S:
        start = time.perf_counter()
        with torch.autocast(device.type, narrow) if narrow else nullcontext():
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        model.zero_grad()
        synchronise(device)
        best = min(best, time.perf_counter() - start)
    return best
