"""Which choices of ``train.py`` are worth having? ``tilewise study examples/own/study.py``."""

from __future__ import annotations

import os
from pathlib import Path

from tilelab.study.ask.config import Study
from tilelab.study.recipes.own import own_study

# From the folder where the study starts, so that its hash is the same on another machine.
TRAIN = os.path.relpath(Path(__file__).with_name("train.py"))


def study(*, seeds: int = 3, steps: int = 100) -> Study:
    """Linear decay and no weight decay, alone and together, each with a tuned learning rate."""
    return own_study(
        "own-script",
        f"python {TRAIN} {{choices}} --steps {{steps}} --seed {{seed}} --out {{folder}}",
        metric="val_loss",
        smallest_effect=0.02,
        baseline={"lr": 3e-3, "schedule": "cosine", "weight-decay": 0.1},
        arms={"linear": {"schedule": "linear"}, "no-decay": {"weight-decay": 0.0}},
        together=True,
        tune={"lr": (0.5, 1, 2)},
        seeds=seeds,
        steps=steps,
    )
