"""Experiments at a length: plain attention where its memory suffices, then what needs less."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tilelab.study.ask.config import Experiment, RunConfig, change
from tilelab.study.recipes.arms import one_at_a_time
from tilewise.plan.traffic.memory import plain_held
from tilewise.problem import Problem

__all__ = ["at_length", "plain_attention_bytes"]

TILEWISE = {"attention.implementation": "tilewise"}
_NARROW_BYTES = 2  # of a number in half precision


def plain_attention_bytes(config: RunConfig) -> int:
    """Return the peak bytes of plain attention in a training step, by the IO model.

    The micro-batch has a longest sequence that fills the context; shorter ones are padded to it.
    The rest of the model and its optimizer come on top. Autocast on a GPU has the softmax in
    float32 and keeps a copy of two bytes a probability for the product that follows.
    """
    model, batch = config.model, config.training.batch
    problem = Problem(
        batch=batch,
        heads=model.heads,
        kv_heads=model.heads,
        queries=model.context,
        keys=model.context,
        head_dim=model.head_width,
        value_dim=model.head_width,
        dtype=torch.float32,
        device="cpu",
        layout="dense",
        mask=(),
        score=(),
        scale=1 / math.sqrt(model.head_width),
        dropout_p=model.dropout.attention,
        sinks=False,
    )
    held = plain_held(problem).peak(model.layers)
    if config.training.precision == "float32":
        return held
    return held + model.layers * _NARROW_BYTES * batch * model.heads * model.context**2


def at_length(
    name: str,
    config: RunConfig,
    *,
    task: str,
    patterns: Mapping[str, Mapping[str, Any]],
    plain_gb: float,
    seeds: tuple[int, ...],
    smallest_effect: float,
) -> Experiment:
    """Accuracy and cost of one length: plain, tilewise, and tilewise with sparse patterns.

    Where plain attention does not fit into ``plain_gb``, tilewise is the baseline.

    Args:
        name: of the experiment.
        config: with attention of every token to every other.
        task: and its length, in words.
        patterns: name of an arm -> its ``attention.variant``.
        plain_gb: the memory that plain attention may hold, in 10^9 bytes.
        seeds: paired.
        smallest_effect: of accuracy.
    """
    wanted = plain_attention_bytes(config) / 1e9
    fits = wanted <= plain_gb
    holds = f"plain attention holds up to {wanted:.2g} GB of {plain_gb:g}"
    question = f"{task}: what do tilewise and sparse patterns save and lose ({holds})?"
    if not fits:
        holds = f"would hold {wanted:.2g} GB and may hold {plain_gb:g}"
        question = f"{task}, where plain attention {holds}: what do sparse patterns save and lose?"
    sparse = {
        arm: {**(TILEWISE if fits else {}), "attention.variant": dict(variant)}
        for arm, variant in patterns.items()
    }
    kernel = one_at_a_time({"tilewise": TILEWISE} if fits else {}, kind="systems")
    name_of_baseline = "plain" if fits else "tilewise"
    return Experiment(
        name=name,
        question=question,
        baseline=change(config, {"attention.implementation": name_of_baseline}),
        baseline_name=name_of_baseline,
        arms=(*kernel, *one_at_a_time(sparse)),
        seeds=seeds,
        smallest_effect=smallest_effect,
        metric="accuracy",
    )
