"""The kernels: the same training through three implementations of attention."""

from __future__ import annotations

from tilewise.lab.study.config import (
    Attention,
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
)
from tilewise.lab.study.recipes.arms import one_at_a_time
from tilewise.lab.study.recipes.registry import recipe

__all__ = ["kernels", "kernels_experiment"]


# One unit in the last place of the initial weights: what rounding alone does to a run.
ROUNDING = {"rounding": {"model.nudge": True}}


@recipe
def kernels(*, text: str = "stdlib", context: int = 1024, steps: int = 20, seeds: int = 3) -> Study:
    """Plain, sdpa and tilewise attention: do they learn the same, and what do they cost?

    Args:
        text: ``"stdlib"``, the name of a WikiText, or the path of a text file or a folder of them.
        context: tokens that attend to one another.
        steps: of every run.
        seeds: how many.
    """
    experiment = kernels_experiment(
        context=context, steps=steps, seeds=tuple(range(seeds)), text=text, control=True
    )
    return Study(
        name="kernels",
        question="What does attention that never writes the N x N matrix change in training?",
        experiments=(experiment,),
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
    baseline = RunConfig(
        model=Model(layers=4, heads=4, width=128, context=context),
        data=Data(source=text, size_cap_bytes=4 * 1024 * 1024),
        attention=Attention(implementation="plain"),
        # Gentle: at 0.003 the loss of single steps jumps by several nats in the first twenty, and
        # what differs by rounding only is thrown far apart.
        optimizer=Optimizer(name="adamw", lr=0.0003),
        schedule=Schedule(name="constant", warmup=0.25),
        training=Training(batch=2),
        budget=Budget(steps=steps),
        evaluation=Evaluation(every=max(1, steps // 2), windows=4),
    )
    arms = {
        "sdpa": {"attention.implementation": "sdpa"},
        "tilewise": {"attention.implementation": "tilewise"},
    }
    return Experiment(
        name="kernels",
        question=f"At context {context}, do fused kernels learn the same, faster and in less?",
        baseline=baseline,
        baseline_name="plain",
        arms=one_at_a_time({**arms, **(ROUNDING if control else {})}, kind="systems"),
        seeds=seeds,
        smallest_effect=0.01,
        metric="bits_per_byte",
    )
