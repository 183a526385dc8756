"""What recipes are made of: arms from factors, a small GPT-2, and kernels that are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import torch

from tilelab.study.ask.config import (
    Arm,
    Experiment,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Training,
    change,
)
from tilelab.study.ask.values import overlap
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic.memory import plain_held
from tilewise.problem import Problem

Factors = Mapping[str, Mapping[str, Any]]


def one_at_a_time(
    factors: Factors, kind: Literal["training", "systems", "control"] = "training"
) -> tuple[Arm, ...]:
    """Return one arm for each factor.

    Args:
        factors: name of the arm -> what it changes, by dotted paths.
        kind: of all these arms.
    """
    return tuple(
        Arm(name=name, changes=dict(changes), kind=kind) for name, changes in factors.items()
    )


def factorial(factors: Factors) -> tuple[Arm, ...]:
    """Return all 2^k - 1 combinations of k factors: ``lion``, ``wsd``, ``lion+wsd``.

    With the baseline, which has none of them, that is a full factorial design: it shows what each
    factor does alone and whether they add up.

    Args:
        factors: name -> what it changes, by dotted paths; names without ``+``.

    Raises:
        InvalidArgument: two factors that change the same value cannot be combined.
    """
    arms = []
    for size in range(1, len(factors) + 1):
        for together in combinations(factors, size):
            changes: dict[str, Any] = {}
            for name in together:
                for path in factors[name]:
                    if any(overlap(path, other) for other in changes):
                        came = f"{path}, which another factor changes too"
                        required = "factors that change different values"
                        raise InvalidArgument(name, came, required)
                changes.update(factors[name])
            arms.append(Arm(name="+".join(together), changes=changes))
    return tuple(arms)


# A byte-level GPT-2 of 0.85 million parameters, AdamW, straight to zero.
SMALL_GPT2 = RunConfig(
    model=Model(layers=4, heads=4, width=128, context=256),
    optimizer=Optimizer(name="adamw", lr=0.001),
    schedule=Schedule(name="linear", warmup=0.1),
    training=Training(batch=8),
)

# For byte-level runs of half a minute: all of a held-out text of 0.3 MB takes a quarter of that.
# Rates are chosen on a text of their own, as in the recipe ``ladder``.
SCORED = {"data.held_out": 0.02, "data.tuning": 0.02, "evaluation.final_stride": 256}


def small_gpt2(steps: int, evaluations: int, windows: int, **changes: Any) -> RunConfig:
    """Return a run of ``SMALL_GPT2``.

    Args:
        steps: of the run.
        evaluations: how many after the first.
        windows: of each.
        changes: what differs, by paths with ``__`` for dots.
    """
    dotted = {path.replace("__", "."): value for path, value in changes.items()}
    evaluation = {"evaluation.every": max(1, steps // evaluations), "evaluation.windows": windows}
    return change(SMALL_GPT2, {"budget.steps": steps, **evaluation, **dotted})


def attention(implementation: str) -> dict[str, Any]:
    """Return the change to an implementation of attention."""
    return {"attention.implementation": implementation}


# One unit in the last place of the initial weights: what rounding alone does to a run.
ROUNDING: dict[str, dict[str, Any]] = {"rounding": {"model.nudge": True}}


def faults(implementation: str = "tilewise") -> tuple[Arm, ...]:
    """Return the controls of a comparison of kernels: a wrong scale, a mask that is off by one."""
    return one_at_a_time(
        {
            f"wrong-{fault}": {**attention(implementation), "attention.fault": fault}
            for fault in ("scale", "mask")
        },
        kind="control",
    )


def compare_kernels(
    name: str,
    question: str,
    config: RunConfig,
    seeds: tuple[int, ...],
    kernels: Sequence[str] = ("plain", "sdpa", "tilewise"),
    *,
    control: bool = False,
    **fields: Any,
) -> Experiment:
    """Compare some implementations of attention with the first, as arms that change nothing else.

    With ``control`` one more arm changes nothing but rounding. Two more compute something wrong
    with the last implementation: the comparison has to flag them. ``fields`` are further ones of
    the experiment.
    """
    first, *others = kernels
    arms = {each: attention(each) for each in others}
    return Experiment(
        name=name,
        question=question,
        baseline=change(config, attention(first)),
        baseline_name=first,
        arms=(
            *one_at_a_time({**arms, **(ROUNDING if control else {})}, kind="systems"),
            *faults(kernels[-1]),
        ),
        seeds=seeds,
        **{"smallest_effect": 0.01, **fields},
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
