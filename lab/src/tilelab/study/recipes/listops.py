"""ListOps: accuracy and cost against length, from expressions of a line to 2,000 tokens."""

from __future__ import annotations

from typing import Literal, NamedTuple

from tilelab.study.ask.config import (
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
    Task,
    Training,
    Variant,
)
from tilelab.study.recipes.kernels import at_length
from tilelab.study.recipes.registry import recipe

__all__ = ["LENGTHS", "Expressions", "listops", "listops_config", "listops_experiment"]

PATTERNS = {
    "window-global": {"name": "window-global", "size": 64, "tokens": 16},
    "butterfly": {"name": "butterfly", "block": 64},
}


class Expressions(NamedTuple):
    """The expressions of one length of the study.

    Args:
        form: of the expressions.
        longest: tokens of them.
        batch: of a step.
        steps: of a run.
    """

    form: Literal["nyu", "lra"]
    longest: int
    batch: int
    steps: int


LENGTHS = (
    Expressions("nyu", 128, 32, 300),
    Expressions("nyu", 1000, 32, 300),
    Expressions("lra", 1000, 16, 40),
    Expressions("lra", 2000, 16, 40),
)


@recipe
def listops(*, plain_gb: float = 4.0, seeds: int = 3) -> Study:
    """ListOps by length: plain attention while it fits, tilewise, and two sparse patterns.

    There are four lengths. Two have the original expressions, of at most 128 and of at most 1,000
    tokens. Most of them are short: plain attention pads them to the longest of a batch, tilewise
    does not. Two have the expressions of the Long Range Arena, up to 1,000 and up to 2,000. A BERT
    of 0.1 to 0.2 million parameters sees 9,600 of the short expressions and 640 of the Arena's. The
    latter are less than a hundredth of what the Arena trains on, drawn from a fiftieth of its
    examples. On the short ones it learns to be right more than twice as often as chance (0.1). On
    the Arena's it learns hardly more than how often each digit is the answer (0 and 9 about 0.17
    each). There the study compares costs, not what a model can learn.

    Args:
        plain_gb: memory for plain attention, in 10^9 bytes: a length at which the IO model
            predicts more has no plain arm. With smaller batches longer sequences would fit.
        seeds: how many, paired.
    """
    numbers = tuple(range(seeds))
    return Study(
        name="listops",
        question="ListOps: what do accuracy and cost do as expressions grow longer?",
        experiments=tuple(
            listops_experiment(each, listops_config(each), plain_gb, numbers) for each in LENGTHS
        ),
    )


def listops_experiment(
    length: Expressions, config: RunConfig, plain_gb: float, seeds: tuple[int, ...]
) -> Experiment:
    """Plain attention while it fits, tilewise and the patterns on expressions of a length.

    Args:
        length: of the expressions.
        config: what ``listops_config`` says of it, or the same with another model.
        plain_gb: as of ``at_length``.
        seeds: of every arm.
    """
    return at_length(
        f"{length.form}-{length.longest}",
        config,
        task=f"ListOps ({length.form.upper()}), at most {length.longest:,} tokens",
        patterns=PATTERNS,
        plain_gb=plain_gb,
        seeds=seeds,
        smallest_effect=0.02,
    )


def listops_config(length: Expressions) -> RunConfig:
    """Return a run with the small model on expressions of a length.

    Args:
        length: of the expressions.
    """
    return RunConfig(
        model=Model(family="bert", layers=2, heads=4, width=64, context=length.longest + 1),
        data=Data(source="listops", tokenizer="listops"),
        attention=Attention(variant=Variant(name="full")),
        optimizer=Optimizer(name="adamw", lr=0.002, weight_decay=0.01, betas=(0.9, 0.98)),
        schedule=Schedule(name="linear", warmup=0.1),
        training=Training(batch=length.batch),
        budget=Budget(steps=length.steps),
        evaluation=Evaluation(every=length.steps // 2),
        task=Task(name="listops", form=length.form, longest=length.longest),
    )
