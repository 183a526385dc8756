"""GPT-2 on text, several training choices: all combinations of four, or six one at a time."""

from __future__ import annotations

from typing import Any

from tilelab.study.ask.config import (
    Budget,
    Combine,
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
    Sequential,
    Study,
    Sweep,
    Training,
)
from tilelab.study.recipes.arms import factorial, one_at_a_time
from tilelab.study.recipes.laptop import MUON, WSD
from tilelab.study.recipes.registry import recipe

# What is read twice can be learnt by heart: only then have dropout and weight decay a task.
SLICE_BYTES = 120_000
FACTORS: dict[str, dict[str, Any]] = {
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    "decay": {"optimizer.weight_decay": 1.0},
    "wsd": WSD,
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


# Any of them can be combined with any other: no two change the same value.
SCREENED: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "wsd": WSD,
    "rotary": {"model.positions": "rotary"},
    "rms": {"model.norm": "rms"},
    "qk-norm": {"model.qk_norm": True},
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
}
SCREENING = "Of six choices, which are worth having alone, which together, and does the best last?"
FIRST_LOOK = 3  # seeds of every arm before any is decided
SMALLEST_BITS_PER_BYTE = 0.02


@recipe
def screening(*, steps: int = 160, seeds: int = 5, fresh_seeds: int = 6) -> Study:
    """Six choices one at a time, a factorial of those that survive, the winner on fresh seeds.

    An hour or less on two cores: at most as much as 101 runs of 330 thousand tokens, of which one
    takes 20 to 60 seconds of a core. A byte-level GPT-2 of 0.85 million parameters reads the source
    of Python's standard library. Muon, warmup-stable-decay, rotary positions, RMSNorm, QK-norm and
    dropout are each compared with AdamW and a linear decay: with three seeds, and with all
    ``seeds`` where three do not decide. Up to four factors that were not shown to be worse go on,
    on three seeds of their own. They run in all combinations of two or three, or half of those of
    four. The best of these meets the baseline once more. Until then every arm tunes its learning
    rate by successive halving, on a quarter and on half of the steps, with the tokens of two whole
    runs.

    Args:
        steps: of every run that counts.
        seeds: of the first stage at most, paired; 2 or more.
        fresh_seeds: of the last comparison.
    """
    experiment = Experiment(
        name="choices",
        question=SCREENING,
        baseline=RunConfig(
            model=Model(layers=4, heads=4, width=128, context=256),
            optimizer=Optimizer(name="adamw", lr=0.001),
            schedule=Schedule(name="linear", warmup=0.1),
            training=Training(batch=8),
            budget=Budget(steps=steps),
            evaluation=Evaluation(every=max(1, steps // 8), windows=64),
        ),
        baseline_name="adamw+linear",
        arms=one_at_a_time(SCREENED),
        seeds=tuple(range(seeds)),
        smallest_effect=SMALLEST_BITS_PER_BYTE,
        metric="bits_per_byte",
        sweep=Sweep(multiples=(0.5, 1, 2, 4), halving=Halving(eta=2, rungs=2, longest=0.5)),
        sequential=Sequential(looks=tuple(sorted({min(FIRST_LOOK, seeds), seeds}))),
        combine=Combine(seeds=(50, 51, 52), most=4, runs=8),
        confirm=Confirm(seeds=tuple(range(100, 100 + fresh_seeds))),
    )
    return Study(name="screening", question=SCREENING, experiments=(experiment,))
