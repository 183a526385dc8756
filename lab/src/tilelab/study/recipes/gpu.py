"""Studies for one GPU: the shipped ones at full size on an H200, and half an hour of an H100."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

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
    change,
)
from tilelab.study.need import gpu_need
from tilelab.study.recipes import bert, gpt2, recipe
from tilelab.study.recipes.arms import attention, compare_kernels, one_at_a_time
from tilelab.study.recipes.ladder import TUNING
from tilewise.chips import CHIPS

SIZES = {
    "small": {"model.layers": 12, "model.heads": 12, "model.width": 768},
    "medium": {"model.layers": 24, "model.heads": 16, "model.width": 1024},
}
RATES = {"small": 0.0003, "medium": 0.00015}  # gentle, as in the recipe kernels
CONTEXTS = (1024, 2048, 4096, 8192, 16384)
MICRO_BATCH_TOKENS = 16384
WIKITEXT_TOKENS = 117_920_140  # of WikiText-103 by GPT-2's tokenizer
GLUE = ("cola", "rte", "sst2")
# As in the recipe gpt2-factorial, with the rates of a model that is six times as wide.
FACTORS = {
    **gpt2.COMBINED,
    "muon": {"optimizer.name": "muon", "optimizer.lr": 0.0006},
}
BERT_LARGE = SIZES["medium"]
# Of the Long Range Arena's own ListOps: 1,000 of 5,000 steps of warm-up, batches of 32.
LRA = {
    "model.layers": 6,
    "model.heads": 8,
    "model.width": 512,
    "optimizer.lr": 0.0005,
    "schedule.warmup": 0.2,
    "training.precision": "bf16",
}
LRA_STEPS, LRA_BATCH = 5000, 32
BERT_BASE = {**SIZES["small"], "optimizer.lr": 0.0002, "training.precision": "bf16"}
PASSAGES_TOKENS, PASSAGES_STEPS = 32768, 400


@recipe
def h200(
    *,
    steps: int = 300,
    seeds: int = 3,
    checkpoint: str = "bert-large-uncased",
    glue: str = "glue",
) -> Study:
    """The shipped protocols with GPT-2 small and medium and BERT base and large, for one H200.

    All in bfloat16. ``kernels``: plain, sdpa and tilewise attention on WikiText-103, at contexts of
    1,024 to 16,384 and 16,384 tokens a step (plain while its matrices have room), and on masked
    tokens with BERT-large. ``gpt2-factorial``: the sixteen combinations with GPT-2 small on two
    epochs of WikiText-103. ``fine-tuning``: BERT-large on all of CoLA, RTE and SST-2.
    ``listops``: its four lengths with the Long Range Arena's own size of model, batch and steps.
    ``long-documents``: a model of BERT-base's size from scratch, some ten epochs of the 233
    addresses, 32,768 tokens a step. ``tilewise study h200 --dry-run`` says what it takes, on any
    machine.

    Args:
        steps: of the runs that compare kernels.
        seeds: of every arm, paired; the factorial has one more, fine-tuning two.
        checkpoint: a folder with BERT-large in the Hugging Face layout.
        glue: ``data.source`` of the fine-tuning.
    """
    numbers = tuple(range(seeds))
    return Study(
        name="h200",
        correction="experiment",  # each asks a question of its own
        question="At full size, what do the kernels and the training choices bring?",
        experiments=(
            *(_gpt2(size, context, steps, numbers) for size in SIZES for context in CONTEXTS),
            _bert(steps, numbers),
            _factorial(tuple(range(seeds + 1))),
            *(_fine_tuning(each, checkpoint, glue, tuple(range(seeds + 2))) for each in GLUE),
            *(_listops(each, numbers) for each in bert.EXPRESSIONS),
            *(_passages(length, numbers) for length in bert.LENGTHS),
        ),
        chip="h200",
    )


def _compared(name: str, question: str, config: RunConfig, seeds: tuple[int, ...]) -> Experiment:
    """Three kernels on one config; two of them where plain attention has no room."""
    fits = gpu_need(change(config, attention("plain"))).total <= _room("h200")
    names = ("plain", "sdpa", "tilewise") if fits else ("sdpa", "tilewise")
    fields = {"smallest_effect": 0.02, "metric": "loss"}
    return compare_kernels(name, question, config, seeds, names, control=True, **fields)


def _gpt2(size: str, context: int, steps: int, seeds: tuple[int, ...]) -> Experiment:
    config = RunConfig(
        model=Model(context=context),
        data=_wikitext("gpt2"),
        optimizer=Optimizer(name="adamw", lr=RATES[size]),
        schedule=Schedule(name="constant", warmup=0.25),
        training=Training(batch=MICRO_BATCH_TOKENS // context, precision="bf16"),
        budget=Budget(steps=steps),
        evaluation=Evaluation(
            every=max(1, steps // 3), windows=max(4, 4 * MICRO_BATCH_TOKENS // context)
        ),
    )
    question = f"GPT-2 {size} at context {context:,}: the same, faster and in less?"
    name = f"{size}-{context // 1024}k"
    return _compared(name, question, change(config, SIZES[size]), seeds)


def _bert(steps: int, seeds: tuple[int, ...]) -> Experiment:
    config = RunConfig(
        model=Model(family="bert", context=512),
        data=_wikitext("wordpiece"),
        attention=Attention(variant=Variant(name="full")),
        optimizer=Optimizer(name="adamw", lr=0.0001),
        schedule=Schedule(name="constant", warmup=0.25),
        training=Training(batch=MICRO_BATCH_TOKENS // 512, precision="bf16"),
        budget=Budget(steps=steps),
        evaluation=Evaluation(every=max(1, steps // 3), windows=128),
        task=Task(name="masked-language-modelling"),
    )
    question = "BERT-large on masked tokens, context 512: the same, faster and in less?"
    return _compared("bert-large", question, change(config, BERT_LARGE), seeds)


def _factorial(seeds: tuple[int, ...]) -> Experiment:
    config = RunConfig(
        model=Model(context=1024),
        data=_wikitext("gpt2"),
        optimizer=Optimizer(name="adamw", lr=0.0003, weight_decay=0.1),
        schedule=Schedule(name="linear", warmup=0.1),
        training=Training(batch=32, accumulation=4, precision="bf16"),
        budget=Budget(tokens=2 * WIKITEXT_TOKENS),
        evaluation=Evaluation(every=180, windows=64),
    )
    scored = {"data.tuning": TUNING, "evaluation.final_stride": config.model.context // 2}
    baseline = change(config, {**SIZES["small"], **scored})
    return gpt2.combinations(baseline, FACTORS, seeds, tuple(range(100, 106)), 0.01)


def _fine_tuning(dataset: str, checkpoint: str, source: str, seeds: tuple[int, ...]) -> Experiment:
    """BERT-large on all of a data set, in the protocol of ``fine-tuning``."""
    whole = bert.PARTS[dataset]._replace(train_examples=0, context=128, batch=32, lr=2e-5, epochs=3)
    small = bert.tuned_experiment(whole, source, seeds)
    changes = {
        **BERT_LARGE,
        "model.checkpoint": checkpoint,
        "task.pooling": "first",  # which BERT-large was trained for
    }
    own = {f"baseline.{path}": value for path, value in changes.items()}
    return change(small, {"name": f"bert-{dataset}", **own})


def _listops(length: bert.Expressions, seeds: tuple[int, ...]) -> Experiment:
    """Return the Arena's model and steps on expressions of a length, as ``listops`` runs them."""
    whole = length._replace(batch=LRA_BATCH, steps=LRA_STEPS)
    config = change(bert.listops_config(whole), LRA)
    return bert.listops_experiment(whole, config, _beside(config), seeds)


def _passages(length: int, seeds: tuple[int, ...]) -> Experiment:
    """Return a model of BERT-base's size on passages, in the protocol of ``long-documents``."""
    small = bert.passages_config(length, PASSAGES_STEPS, tokens=PASSAGES_TOKENS)
    config = change(small, BERT_BASE)
    return bert.passages_experiment(config, _beside(config), seeds)


def _beside(config: RunConfig) -> float:
    """10^9 bytes, whole ones, that the chip has left for the matrices of plain attention."""
    rest = gpu_need(change(config, attention("tilewise"))).total
    return (_room("h200") - rest) // 10**9


def _room(chip: str) -> int:
    room = CHIPS[chip].memory_bytes
    assert room is not None
    return room


def _wikitext(tokenizer: Any) -> Data:
    return Data(source="wikitext-103", tokenizer=tokenizer, size_cap_bytes=1024**3)


QUESTION = "What do the kernels and the training choices bring in half an hour of one GPU?"
CONTEXT, LONG_CONTEXT = 1024, 4096
STEP_TOKENS = {"kernels": 32_768, "exact": 8_192, "choices": 65_536}
KERNELS = ("plain", "sdpa", "tilewise")
CONTROLS = ("wrong-scale",)  # the time is for one of those that ``compare_kernels`` has
EVALUATIONS = 4
SMALLEST = 0.02  # nats per token, or bits per byte
LOSS_TOKENS = 2048  # 134 MB of logits in bf16, in place of 4.3 GB for a step at once
ROOM = 0.75  # of the memory: the rest is for what counting leaves out
# Rates are those that runs of this size and length are known for. Nothing is tuned here.
WSD = {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.2}}
LION = {"optimizer": {"name": "lion", "lr": 0.0002, "weight_decay": 0.5}}
MUON = {"optimizer": {"name": "muon", "lr": 0.002, "adamw_lr_share": 0.5}}
DROPOUT = {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1}
# Dropout is another graph, so it comes last: all others share one.
ARMS: dict[str, dict[str, Any]] = {
    "adamw+wsd": WSD,
    "lion+linear": LION,
    "muon+linear": MUON,
    "muon+wsd": {**MUON, **WSD},
    "adamw+linear+dropout": DROPOUT,
}
# 32,768 tokens are a multiple of 64: the head's product needs no padding.
DATA = Data(
    source="packages",
    tokenizer="bpe",
    vocabulary=32_768,
    vocabulary_bytes=16_000_000,
    size_cap_bytes=160_000_000,
    held_out=0.01,
)
TINY_DATA = {"data.vocabulary": 512, "data.vocabulary_bytes": 0, "data.size_cap_bytes": 500_000}


@recipe
def gpu30(
    *, tokens: int = 40_000_000, seeds: int = 1, steps: int = 20, tiny: bool = False
) -> Study:
    """Kernels of GPT-2 small at two contexts, and seven runs of 40 M tokens: 28 minutes of an H100.

    All on the Python packages of the machine that runs it, in micro-batches as large as the chip
    has room for, by counting (``need.py``). Run it with ``--one-process``, which compiles twice:
    for the runs without dropout, and for the one with it.

    ``kernels-1k`` and ``kernels-4k``: plain, sdpa and tilewise attention in bfloat16, three seeds
    each. The first of two tests needs |t| > 6.2. It finds a difference of 4.6 times the spread of
    paired differences with power 80 %. A wrong scale runs beside them. Rounding may hide its 1 % in
    bfloat16, and then the report says so. ``kernels-exact`` has the same in float32 with one seed:
    there the first steps tell a wrong scale from rounding. These three take some 4 minutes.

    ``noise`` and ``choices``: compiled, in bfloat16, some 20 minutes. AdamW has two seeds; WSD,
    Lion, Muon, Muon with WSD and dropout have one, against the first of these. One pair of runs
    tests nothing, and the report says so: it describes these arms. ``noise`` shows how far apart
    two seeds are, which is no estimate of a spread. With a spread of paired differences known from
    elsewhere, a difference stands out among five arms (Holm, 5 %) from 2.6 times the spread on, and
    one of 3.4 times is found with power 80 %.

    For verdicts in the same time take shorter runs: ``--seeds 3 --tokens 15000000`` has 18 of them
    and one error for all arms. The first of five tests then needs |t| > 3.2, and 2.4 times the
    spread is found.

    Args:
        tokens: that each of the runs of ``choices`` learns from.
        seeds: of each arm of ``choices``. With 2 or more there is no ``noise``.
        steps: of the runs that compare kernels.
        tiny: a model and a text for trying it out, on any machine.
    """
    contexts = (CONTEXT, LONG_CONTEXT)
    learnt = _base(CONTEXT, "choices", tokens)
    compared = [_base(each, "kernels", steps * STEP_TOKENS["kernels"]) for each in contexts]
    exact = _base(CONTEXT, "exact", steps * STEP_TOKENS["exact"])
    exact = change(exact, {"training.precision": "float32"})
    learnt = change(learnt, {"training.compile": True})
    if tiny:
        learnt = _tiny(learnt, 32, 12)
        compared = [_tiny(each, 32 * (at + 1), 4) for at, each in enumerate(compared)]
        exact = _tiny(exact, 32, 20)
    else:
        learnt = _in_parts(learnt, STEP_TOKENS["choices"], ARMS.values())
        changes = [{"attention.implementation": each} for each in KERNELS]
        compared = [_in_parts(each, STEP_TOKENS["kernels"], changes) for each in compared]
        exact = _in_parts(exact, STEP_TOKENS["exact"], changes)
    return Study(
        name="gpu30-tiny" if tiny else "gpu30",
        question=QUESTION,
        experiments=(
            *(
                _kernels(f"kernels-{name}", config)
                for name, config in zip(("1k", "4k"), compared, strict=True)
            ),
            _kernels("kernels-exact", exact, seeds=(0,), control=True),
            *_choices(learnt, seeds),
        ),
        correction="experiment",  # each asks a question of its own
        chip="" if tiny else "h100",
    )


def _choices(config: RunConfig, seeds: int) -> Iterator[Experiment]:
    fields: dict[str, Any] = {
        "baseline": config,
        "baseline_name": "adamw+linear",
        "smallest_effect": SMALLEST,
    }
    if seeds == 1:
        question = "How far apart are two seeds?"
        yield Experiment(name="noise", question=question, arms=(), seeds=(0, 1), **fields)
    yield Experiment(
        name="choices",
        question="Which optimizer, schedule and dropout, at one seed?"
        if seeds == 1
        else "Which optimizer, schedule and dropout?",
        arms=one_at_a_time(ARMS),
        seeds=tuple(range(seeds)),
        error="own" if seeds == 1 else "pooled",
        **fields,
    )


def _in_parts(config: RunConfig, tokens: int, arms: Any) -> RunConfig:
    """Return a config with steps of so many tokens, in the largest batches with room in any arm."""
    sequences = tokens // config.model.context
    batch = 1 << (sequences.bit_length() - 1)
    while batch > 1 and _most(config, batch, list(arms)) > ROOM * _room("h100"):
        batch //= 2
    return change(config, {"training.batch": batch, "training.accumulation": sequences // batch})


def _most(config: RunConfig, batch: int, arms: Sequence[dict[str, Any]]) -> int:
    each = [change(config, {"training.batch": batch, **changes}) for changes in ({}, *arms)]
    return max(gpu_need(one).total for one in each)


def _base(context: int, part: str, tokens: int) -> RunConfig:
    steps = max(1, tokens // STEP_TOKENS[part])
    config = RunConfig(
        model=Model(context=context),
        data=DATA,
        optimizer=Optimizer(name="adamw", lr=0.001),
        schedule=Schedule(name="linear", warmup=0.1),
        training=Training(precision="bf16", loss_tokens=LOSS_TOKENS),
        budget=Budget(steps=steps),
        evaluation=Evaluation(
            every=max(1, steps // EVALUATIONS),
            windows=64 * CONTEXT // context,
            attention_windows=0,
        ),
    )
    if part != "choices":  # gentle, as in the recipe kernels
        gentle = {"optimizer.lr": RATES["small"], "schedule": {"name": "constant", "warmup": 0.25}}
        config = change(config, {**gentle, "evaluation.windows": 16 * CONTEXT // context})
    return change(config, SIZES["small"])


def _tiny(config: RunConfig, context: int, steps: int) -> RunConfig:
    return change(
        config,
        {
            **TINY_DATA,
            "model.layers": 1,
            "model.heads": 2,
            "model.width": 32,
            "model.context": context,
            "model.std": 0.2,  # else all scores are near 0, and no scale shows
            "training.batch": 2,
            "training.accumulation": 2,
            "training.loss_tokens": 24,
            "budget.steps": steps,
            "evaluation.every": max(1, steps // 2),
            "evaluation.windows": 4,
        },
    )


def _kernels(
    name: str, config: RunConfig, seeds: tuple[int, ...] = (0, 1, 2), control: bool = False
) -> Experiment:
    context, precision = f"{config.model.context:,}", config.training.precision
    question = f"At context {context} in {precision}: do all kernels train alike, at what cost?"
    fields: dict[str, Any] = {"smallest_effect": SMALLEST, "metric": "loss", "control": control}
    made = compare_kernels(name, question, config, seeds, KERNELS, **fields)
    kept = tuple(each for each in made.arms if each.kind != "control" or each.name in CONTROLS)
    return change(made, {"arms": kept})
