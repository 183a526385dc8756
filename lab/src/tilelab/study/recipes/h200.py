"""The shipped studies at full size, for one H200: kernels, the factorial, fine-tuning, length."""

from __future__ import annotations

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
from tilelab.study.recipes.arms import attention, compare_kernels
from tilewise.chips import CHIPS

CHIP = "h200"
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
BERT_LARGE = {"model.layers": 24, "model.heads": 16, "model.width": 1024}
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
BERT_BASE = {
    "model.layers": 12,
    "model.heads": 12,
    "model.width": 768,
    "optimizer.lr": 0.0002,
    "training.precision": "bf16",
}
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
            *(_kernels(size, context, steps, numbers) for size in SIZES for context in CONTEXTS),
            _bert_kernels(steps, numbers),
            _factorial(tuple(range(seeds + 1))),
            *(_fine_tuning(each, checkpoint, glue, tuple(range(seeds + 2))) for each in GLUE),
            *(_listops(each, numbers) for each in bert.EXPRESSIONS),
            *(_passages(length, numbers) for length in bert.LENGTHS),
        ),
        chip=CHIP,
    )


def _compared(name: str, question: str, config: RunConfig, seeds: tuple[int, ...]) -> Experiment:
    """Three kernels on one config; two of them where plain attention has no room."""
    fits = gpu_need(change(config, attention("plain"))).total <= _room()
    names = ("plain", "sdpa", "tilewise") if fits else ("sdpa", "tilewise")
    fields = {"smallest_effect": 0.02, "metric": "loss"}
    return compare_kernels(name, question, config, seeds, names, control=True, **fields)


def _kernels(size: str, context: int, steps: int, seeds: tuple[int, ...]) -> Experiment:
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


def _bert_kernels(steps: int, seeds: tuple[int, ...]) -> Experiment:
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
    baseline = change(config, SIZES["small"])
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
    return (_room() - rest) // 10**9


def _room() -> int:
    room = CHIPS[CHIP].memory_bytes
    assert room is not None
    return room


def _wikitext(tokenizer: Any) -> Data:
    return Data(source="wikitext-103", tokenizer=tokenizer, size_cap_bytes=1024**3)
