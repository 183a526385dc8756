"""The kernels: the same training through three implementations of attention."""

from __future__ import annotations

from tilelab.study.ask.config import (
    Budget,
    Data,
    Evaluation,
    Experiment,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Study,
    Training,
    change,
)
from tilelab.study.recipes.arms import one_at_a_time
from tilelab.study.recipes.registry import recipe

__all__ = ["SAMPLE_TOKENS", "kernels", "kernels_experiment"]


SAMPLE_TOKENS = 160
# One unit in the last place of the initial weights: what rounding alone does to a run.
ROUNDING = {"rounding": {"model.nudge": True}}


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
    experiments = [
        kernels_experiment(context=context, steps=steps, seeds=numbers, text=text, control=True)
    ]
    if long_context:
        experiments.append(_long(long_context, numbers, text))
    return Study(
        name="kernels",
        question="What does attention that never writes the N x N matrix change in training?",
        experiments=tuple(experiments),
    )


def kernels_experiment(
    *,
    context: int,
    steps: int,
    seeds: tuple[int, ...],
    text: str = "stdlib",
    control: bool = False,
) -> Experiment:
    """Plain attention against the two fused ones, as arms that must not change what is learnt.

    Args:
        context: tokens that attend to one another.
        steps: of every run; the first ones do not count for speed.
        seeds: of every arm.
        text: ``data.source`` of every run.
        control: whether there is an arm that changes nothing but rounding.
    """
    arms = {"sdpa": _attention("sdpa"), "tilewise": _attention("tilewise")}
    return Experiment(
        name="kernels",
        question=f"At context {context}, do fused kernels learn the same, faster and in less?",
        baseline=change(_training(context, steps, text), _attention("plain")),
        baseline_name="plain",
        arms=one_at_a_time({**arms, **(ROUNDING if control else {})}, kind="systems"),
        seeds=seeds,
        smallest_effect=0.01,
        metric="bits_per_byte",
    )


def _long(context: int, seeds: tuple[int, ...], text: str) -> Experiment:
    """The fused ones where the plain one cannot follow; the report tells what it would need."""
    few = {
        "training.batch": 1,
        "evaluation.every": 3,
        "evaluation.windows": 1,
        "evaluation.sample_tokens": 0,
    }
    return Experiment(
        name="long",
        question=f"At context {context}, what does a step take that plain attention cannot make?",
        baseline=change(_training(context, 3, text), {**few, **_attention("sdpa")}),
        baseline_name="sdpa",
        arms=one_at_a_time({"tilewise": _attention("tilewise")}, kind="systems"),
        seeds=seeds,
        smallest_effect=0.01,
        metric="bits_per_byte",
    )


def _attention(implementation: str) -> dict[str, str]:
    return {"attention.implementation": implementation}


def _training(context: int, steps: int, text: str) -> RunConfig:
    """Return the run config of a byte-level GPT-2 of 0.9 million parameters, with any attention."""
    return RunConfig(
        model=Model(layers=4, heads=4, width=128, context=context),
        data=Data(source=text, size_cap_bytes=4 * 1024 * 1024),
        # Gentle: at 0.003 the loss of single steps jumps by several nats in the first twenty, and
        # what differs by rounding only is thrown far apart.
        optimizer=Optimizer(name="adamw", lr=0.0003),
        schedule=Schedule(name="constant", warmup=0.25),
        training=Training(batch=2),
        budget=Budget(steps=steps),
        evaluation=Evaluation(every=max(1, steps // 2), windows=4, sample_tokens=SAMPLE_TOKENS),
    )
