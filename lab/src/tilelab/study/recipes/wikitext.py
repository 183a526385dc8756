"""GPT-2 on WikiText-103: the protocol that published perplexities come from."""

from __future__ import annotations

from typing import Any, Literal

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
    Training,
)
from tilelab.study.recipes.arms import one_at_a_time
from tilelab.study.recipes.registry import recipe
from tilewise.errors import InvalidArgument

__all__ = ["wikitext"]

# Rates follow the width: the small model of ``cpu`` takes larger ones than GPT-2.
FACTORS: dict[str, dict[str, dict[str, Any]]] = {
    "cpu": {
        "wsd": {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.2}},
        "muon": {"optimizer": {"name": "muon", "lr": 0.003}},
        "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    },
    "h200": {
        "wsd": {"schedule": {"name": "wsd", "warmup": 0.01, "decay": 0.2}},
        "muon": {"optimizer": {"name": "muon", "lr": 0.0006}},
        "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    },
}


@recipe
def wikitext(*, preset: Literal["cpu", "h200"] = "cpu", seeds: int = 3) -> Study:
    """GPT-2 on WikiText-103: schedule, optimizer and dropout by word perplexity.

    The held-out text is scored whole, and perplexity counts original words. ``cpu`` is a model of
    width 128 on whatever part of WikiText-103 is at hand, with windows that move on by their whole
    context. ``h200`` is GPT-2 small: 12 layers of width 768 at context 1,024. It trains for five
    epochs (590 million tokens), with windows that move on by 32. Its 12 runs take some 25 minutes
    each on one H200, five hours in all at an estimated 400,000 tokens a second.

    Args:
        preset: ``"cpu"`` or ``"h200"``.
        seeds: how many, paired.
    """
    presets = {"cpu": _cpu, "h200": _h200}
    if preset not in presets:
        raise InvalidArgument("preset", repr(preset), " or ".join(map(repr, presets)))
    question = "On WikiText-103, what do a schedule, an optimizer and dropout bring?"
    experiment = Experiment(
        name="wikitext-103",
        question=question,
        baseline=presets[preset](),
        baseline_name="adamw+linear",
        arms=one_at_a_time(FACTORS[preset]),
        seeds=tuple(range(seeds)),
        smallest_effect=0.01,
        metric="bits_per_byte",
    )
    chip = "h200" if preset == "h200" else ""
    return Study(name=f"wikitext-{preset}", question=question, experiments=(experiment,), chip=chip)


def _cpu() -> RunConfig:
    return RunConfig(
        model=Model(layers=4, heads=4, width=128, context=256),
        data=Data(source="wikitext-103", tokenizer="gpt2"),
        attention=Attention(implementation="tilewise"),
        optimizer=Optimizer(name="adamw", lr=0.001),
        schedule=Schedule(name="linear", warmup=0.1),
        # At this width nearly all of a step is the 50,257 logits of each token: few tokens, then.
        training=Training(batch=4),
        budget=Budget(steps=100),
        evaluation=Evaluation(every=50, windows=8, final_stride=256),
    )


def _h200() -> RunConfig:
    """512 sequences a step, as GPT-2 was trained in the FlashAttention paper's section 4.1."""
    return RunConfig(
        model=Model(layers=12, heads=12, width=768, context=1024),
        data=Data(source="wikitext-103", tokenizer="gpt2", size_cap_bytes=1024**3),
        # On GPUs the study runs torch's fused attention.
        attention=Attention(implementation="sdpa"),
        optimizer=Optimizer(name="adamw", lr=0.0006),
        schedule=Schedule(name="linear", warmup=0.01),
        training=Training(batch=32, accumulation=16, precision="bf16"),
        budget=Budget(tokens=5 * 117_920_140),
        evaluation=Evaluation(every=100, windows=64, final_stride=32),
    )
