"""GPT-2 on a slice of WikiText: four training choices at once, and whether they interact."""

from __future__ import annotations

from typing import Any

from tilelab.study.ask.config import (
    Budget,
    Confirm,
    Data,
    Design,
    Evaluation,
    Experiment,
    Halving,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Study,
    Sweep,
    Training,
)
from tilelab.study.recipes.arms import factorial
from tilelab.study.recipes.registry import recipe

__all__ = ["gpt2_factorial"]

# What is read twice can be learnt by heart: only then have dropout and weight decay a task.
SLICE_BYTES = 120_000
FACTORS: dict[str, dict[str, Any]] = {
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    "decay": {"optimizer.weight_decay": 1.0},
    "wsd": {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.2}},
    "muon": {"optimizer.name": "muon", "optimizer.lr": 0.003},
}
QUESTION = "Do dropout, weight decay, the schedule and the optimizer depend on one another?"


@recipe
def gpt2_factorial(*, steps: int = 120, seeds: int = 3, fresh_seeds: int = 6) -> Study:
    """Dropout, weight decay, schedule and optimizer on WikiText: all sixteen combinations.

    Half an hour on two cores: as much as 124 runs of 250 thousand tokens, of which one takes 20 to
    35 seconds of a core. A byte-level GPT-2 of 0.46 million parameters reads 120 kB of WikiText-103
    twice. Every combination tunes its learning rate by successive halving, with the tokens of four
    runs. Then come the main effects and the interactions of two. The best of the sixteen meets the
    baseline once more on fresh seeds. ``TILEWISE_DATA`` names the folder with the text.

    Args:
        steps: of every run that counts.
        seeds: of every combination, paired.
        fresh_seeds: of the last comparison.
    """
    experiment = Experiment(
        name="factorial",
        question=QUESTION,
        baseline=RunConfig(
            model=Model(layers=2, heads=4, width=128, context=256),
            data=Data(source="wikitext-103", tokenizer="bytes", size_cap_bytes=SLICE_BYTES),
            optimizer=Optimizer(name="adamw", lr=0.001, weight_decay=0.1),
            schedule=Schedule(name="linear", warmup=0.1),
            training=Training(batch=8),
            budget=Budget(steps=steps),
            evaluation=Evaluation(every=max(1, steps // 6), windows=64),
        ),
        baseline_name="adamw+linear",
        arms=factorial(FACTORS),
        seeds=tuple(range(seeds)),
        smallest_effect=0.02,
        metric="bits_per_byte",
        sweep=Sweep(multiples=(0.5, 1, 2, 4), halving=Halving(eta=2, rungs=2)),
        design=Design(factors=tuple(FACTORS)),
        confirm=Confirm(seeds=tuple(range(100, 100 + fresh_seeds))),
    )
    return Study(name="gpt2-factorial", question=QUESTION, experiments=(experiment,))
