"""Half an hour of one GPU: three kernels, and seven runs that learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tilelab.study.ask.config import (
    Budget,
    Data,
    Evaluation,
    Experiment,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Study,
    Training,
    change,
)
from tilelab.study.need import gpu_need
from tilelab.study.recipes import recipe
from tilelab.study.recipes.arms import compare_kernels, one_at_a_time
from tilewise.chips import CHIPS

CHIP = "h100"
QUESTION = "What do the kernels and the training choices bring in half an hour of one GPU?"
SMALL = {"model.layers": 12, "model.heads": 12, "model.width": 768}  # GPT-2's
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
        learnt = in_parts(learnt, STEP_TOKENS["choices"], ARMS.values())
        changes = [{"attention.implementation": each} for each in KERNELS]
        compared = [in_parts(each, STEP_TOKENS["kernels"], changes) for each in compared]
        exact = in_parts(exact, STEP_TOKENS["exact"], changes)
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
        chip="" if tiny else CHIP,
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


def in_parts(config: RunConfig, tokens: int, arms: Any) -> RunConfig:
    """Return a config whose steps have so many tokens, in the largest micro-batches with room.

    Every arm has the same ones, so the largest arm decides. Sizes are powers of two.
    """
    memory = CHIPS[CHIP].memory_bytes
    assert memory is not None
    sequences = tokens // config.model.context
    batch = 1 << (sequences.bit_length() - 1)
    while batch > 1 and _most(config, batch, list(arms)) > ROOM * memory:
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
        gentle = {"optimizer.lr": 0.0003, "schedule": {"name": "constant", "warmup": 0.25}}
        config = change(config, {**gentle, "evaluation.windows": 16 * CONTEXT // context})
    return change(config, SMALL)


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
