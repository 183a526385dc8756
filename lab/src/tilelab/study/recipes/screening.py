"""GPT-2 on Python's source: six choices one at a time, those that survive together, the winner."""

from __future__ import annotations

from typing import Any

from tilelab.study.ask.config import (
    Budget,
    Combine,
    Confirm,
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
from tilelab.study.recipes.arms import one_at_a_time
from tilelab.study.recipes.laptop import MUON, WSD
from tilelab.study.recipes.registry import recipe

__all__ = ["screening"]

# Any of them can be combined with any other: no two change the same value.
FACTORS: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "wsd": WSD,
    "rotary": {"model.positions": "rotary"},
    "rms": {"model.norm": "rms"},
    "qk-norm": {"model.qk_norm": True},
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
}
QUESTION = "Of six choices, which are worth having alone, which together, and does the best last?"
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
        question=QUESTION,
        baseline=RunConfig(
            model=Model(layers=4, heads=4, width=128, context=256),
            optimizer=Optimizer(name="adamw", lr=0.001),
            schedule=Schedule(name="linear", warmup=0.1),
            training=Training(batch=8),
            budget=Budget(steps=steps),
            evaluation=Evaluation(every=max(1, steps // 8), windows=64),
        ),
        baseline_name="adamw+linear",
        arms=one_at_a_time(FACTORS),
        seeds=tuple(range(seeds)),
        smallest_effect=SMALLEST_BITS_PER_BYTE,
        metric="bits_per_byte",
        sweep=Sweep(multiples=(0.5, 1, 2, 4), halving=Halving(eta=2, rungs=2, longest=0.5)),
        sequential=Sequential(looks=tuple(sorted({min(FIRST_LOOK, seeds), seeds}))),
        combine=Combine(seeds=(50, 51, 52), most=4, runs=8),
        confirm=Confirm(seeds=tuple(range(100, 100 + fresh_seeds))),
    )
    return Study(name="screening", question=QUESTION, experiments=(experiment,))
