"""The kernels: the same training through three implementations of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from tilelab.study.ask.config import Experiment, RunConfig, Study, change
from tilelab.study.recipes import recipe
from tilelab.study.recipes.arms import (
    attention,
    compare_kernels,
    faults,
    one_at_a_time,
    small_gpt2,
)
from tilewise.plan.traffic.memory import plain_held
from tilewise.problem import Problem


@recipe
def kernels(
    *,
    text: str = "stdlib",
    context: int = 1024,
    steps: int = 20,
    seeds: int = 3,
    long_context: int = 16384,
) -> Study:
    """Plain, sdpa and tilewise attention: do they learn the same, and what do they cost?

    Args:
        text: ``"stdlib"``, the name of a WikiText, or the path of a text file or a folder of them.
        context: tokens that attend to one another.
        steps: of every run.
        seeds: how many.
        long_context: of a few steps that plain attention has no memory for; 0 for none.
    """
    numbers = tuple(range(seeds))
    experiments = [kernels_experiment(context, steps, numbers, text, control=True)]
    if long_context:
        # The report tells what plain attention would need.
        few = {
            "evaluation.every": 3,
            "evaluation.windows": 1,
        }
        question = (
            f"At context {long_context}, what does a step take that plain attention cannot make?"
        )
        config = change(_training(long_context, 3, text), few)
        fused = ("sdpa", "tilewise")
        experiments.append(compare_kernels("long", question, config, numbers, fused))
    return Study(
        name="kernels",
        question="What does attention that never writes the N x N matrix change in training?",
        experiments=tuple(experiments),
    )


def kernels_experiment(
    context: int, steps: int, seeds: tuple[int, ...], text: str = "stdlib", control: bool = False
) -> Experiment:
    """Plain attention against the two fused ones, and with ``control`` against rounding alone."""
    question = f"At context {context}, do fused kernels learn the same, faster and in less?"
    return compare_kernels(
        "kernels", question, _training(context, steps, text), seeds, control=control
    )


def _training(context: int, steps: int, text: str) -> RunConfig:
    """Return the run config of a byte-level GPT-2 of 0.9 million parameters, with any attention."""
    return small_gpt2(
        steps,
        evaluations=2,
        windows=4,
        model__context=context,
        data={"source": text, "size_cap_bytes": 4 * 1024 * 1024},
        # Gentle: at 0.003 the loss of single steps jumps by several nats in the first twenty, and
        # what differs by rounding only is thrown far apart.
        optimizer__lr=0.0006,
        schedule={"name": "constant", "warmup": 0.25},
        training__batch=1,
    )


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

    Where plain attention does not fit into ``plain_gb`` (10^9 bytes), tilewise is the baseline.
    ``task`` says task and length in words; ``patterns`` has the ``attention.variant`` of each arm.
    """
    wanted = plain_attention_bytes(config) / 1e9
    fits = wanted <= plain_gb
    holds = f"plain attention holds up to {wanted:.2g} GB of {plain_gb:g}"
    question = f"{task}: what do tilewise and sparse patterns save and lose ({holds})?"
    if not fits:
        holds = f"would hold {wanted:.2g} GB and may hold {plain_gb:g}"
        question = f"{task}, where plain attention {holds}: what do sparse patterns save and lose?"
    sparse = {
        arm: {**(attention("tilewise") if fits else {}), "attention.variant": dict(variant)}
        for arm, variant in patterns.items()
    }
    kernel = one_at_a_time({"tilewise": attention("tilewise")} if fits else {}, kind="systems")
    controls = faults() if fits else ()
    name_of_baseline = "plain" if fits else "tilewise"
    return Experiment(
        name=name,
        question=question,
        baseline=change(config, attention(name_of_baseline)),
        baseline_name=name_of_baseline,
        arms=(*kernel, *one_at_a_time(sparse), *controls),
        seeds=seeds,
        smallest_effect=smallest_effect,
        metric="accuracy",
    )
