"""Half an hour of one GPU: three kernels, and seven runs that learn."""

from __future__ import annotations

from collections.abc import Sequence
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
from tilelab.study.recipes.arms import compare_kernels, one_at_a_time
from tilelab.study.recipes.registry import recipe
from tilewise.chips import CHIPS

CHIP = "h100"
QUESTION = "What do the kernels and the training choices bring in half an hour of one GPU?"
SMALL = {"model.layers": 12, "model.heads": 12, "model.width": 768}  # GPT-2's
CONTEXT, LONG_CONTEXT = 1024, 4096
STEP_TOKENS = {"kernels": 32_768, "choices": 65_536}
KERNELS = ("plain", "sdpa", "tilewise")
CONTROLS = ("wrong-scale",)  # the time is for one of those that ``compare_kernels`` has
EVALUATIONS = 4
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
def gpu30(*, tokens: int = 40_000_000, steps: int = 20, tiny: bool = False) -> Study:
    """Kernels of GPT-2 small at two contexts, and seven runs of 40 M tokens: 28 minutes of an H100.

    All in bfloat16, on the Python packages of the machine that runs it. ``kernels-1k`` and
    ``kernels-4k``: plain, sdpa and tilewise attention, three seeds each; some 4 minutes. ``noise``:
    AdamW with two seeds. ``choices``: WSD, Lion, Muon and dropout with one seed, against the first
    of these. These seven runs take some 20 minutes, compiled. With one seed there is no verdict:
    ``noise`` says how far apart two seeds are. Micro-batches are as large as the chip has room for,
    by counting (``need.py``). Run it with ``--one-process``, which compiles twice: for the runs
    without dropout, and for the one with it.

    Args:
        tokens: that each of the seven runs learns from.
        steps: of the runs that compare kernels.
        tiny: a model and a text for trying it out, on any machine.
    """
    contexts = (CONTEXT, LONG_CONTEXT)
    learnt = _base(CONTEXT, "choices", tokens)
    compared = [_base(each, "kernels", steps * STEP_TOKENS["kernels"]) for each in contexts]
    learnt = change(learnt, {"training.compile": True})
    if tiny:
        learnt = _tiny(learnt, 32, 12)
        compared = [_tiny(each, 32 * (at + 1), 4) for at, each in enumerate(compared)]
    else:
        learnt = in_parts(learnt, STEP_TOKENS["choices"], ARMS.values())
        changes = [{"attention.implementation": each} for each in KERNELS]
        compared = [in_parts(each, STEP_TOKENS["kernels"], changes) for each in compared]
    smallest = {"smallest_effect": 0.02}
    return Study(
        name="gpu30-tiny" if tiny else "gpu30",
        question=QUESTION,
        experiments=(
            *(
                _kernels(f"kernels-{name}", config)
                for name, config in zip(("1k", "4k"), compared, strict=True)
            ),
            Experiment(
                name="noise",
                question="How far apart are two seeds?",
                baseline=learnt,
                baseline_name="adamw+linear",
                arms=(),
                seeds=(0, 1),
                **smallest,
            ),
            Experiment(
                name="choices",
                question="Which optimizer, schedule and dropout, at one seed?",
                baseline=learnt,
                baseline_name="adamw+linear",
                arms=one_at_a_time(ARMS),
                seeds=(0,),
                **smallest,
            ),
        ),
        correction="experiment",  # each asks a question of its own
        chip="" if tiny else CHIP,
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
        training=Training(precision="bf16"),
        budget=Budget(steps=steps),
        evaluation=Evaluation(
            every=max(1, steps // EVALUATIONS),
            windows=64 * CONTEXT // context,
            attention_windows=0,
        ),
    )
    if part == "kernels":  # gentle, as in the recipe kernels
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
            "training.batch": 2,
            "training.accumulation": 2,
            "budget.steps": steps,
            "evaluation.every": max(1, steps // 2),
            "evaluation.windows": 4,
        },
    )


def _kernels(name: str, config: RunConfig) -> Experiment:
    context = f"{config.model.context:,}"
    question = f"At context {context}: the same with each kernel, faster and in less memory?"
    fields: dict[str, Any] = {"smallest_effect": 0.02, "metric": "loss"}
    made = compare_kernels(name, question, config, (0, 1, 2), KERNELS, **fields)
    kept = tuple(each for each in made.arms if each.name in (*KERNELS, *CONTROLS))
    return change(made, {"arms": kept})
