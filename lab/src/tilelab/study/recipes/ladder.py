"""The ladder: schedules and optimizers on a GPT-2 that learns, from 0.3 to 30 MB of text read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tilelab.study.ask.config import (
    Budget,
    Data,
    Evaluation,
    Experiment,
    Ladder,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Study,
    Sweep,
    Training,
)
from tilelab.study.recipes import recipe
from tilelab.study.recipes.arms import factorial, one_at_a_time
from tilewise.errors import InvalidArgument

QUESTION = "Which schedule and which optimizer, and does the answer change with the text read?"
SIZES = "Do the answers change with the size of the model?"
BYTES_A_TOKEN = {"stdlib": 3.07, "wikitext-103": 2.98}  # with 2,048 tokens; others about 3
EVALUATIONS = 4
EFFECT_BITS_PER_BYTE = 0.01
# What the designs can detect, by stored reports: rung -> the spread of paired differences that was
# seen, and the smallest effect, which the design finds with power 80 % for that spread. With 0.01
# at every rung, no short one could say "no difference".
# From benchmarks/studies/ladder/report.md and benchmarks/studies/wikitext/report.md. WikiText's
# variances differed at 10 MB. Own errors then detect 0.12, and the plan says so.
SEEN = {
    "stdlib": {
        "0.3MB": (0.011, 0.035),
        "1MB": (0.01, 0.035),
        "3MB": (0.0046, 0.015),
        "10MB": (0.0036, 0.012),
        "30MB": (0.0036, 0.01),
    },
    "wikitext-103": {
        "0.3MB": (0.025, 0.075),
        "1MB": (0.0097, 0.03),
        "3MB": (0.0097, 0.03),
        "10MB": (0.0071, 0.02),
    },
}
SEEN_SIZES = {
    "0.3M": (0.011, 0.035),
    "1M": (0.0031, 0.01),
    "3M": (0.007, 0.02),
    "10M": (0.0031, 0.01),
}
PRECISION_SPREAD, PRECISION_EFFECT = 0.0065, 0.02
SIZES_SEEDS, PRECISION_SEEDS = 5, 7  # at least: with 3 and 5 they detected 0.07 and 0.03 at worst
PRECISION = "bf16"  # 1.45 times as fast on two makers' processors; the last experiment checks it
RUNGS_MB = (0.3, 1, 3, 10, 30)
TUNED_MB = (1, 10)
SWEEP = Sweep(multiples=(0.5, 1, 2))
SIZES_AT_MB = 3
# AdamW's best rate falls as the width grows, and the last size is 6 times as wide as the first.
SIZES_SWEEP = Sweep(multiples=(0.5, 1, 2, 4, 8))
WIDE_MULTIPLES = (0.125, 0.25, 0.5, 1, 2)
# Layers and width of about 0.3, 1, 3 and 10 million parameters.
MODELS = {"0.3M": (1, 64), "1M": (2, 128), "3M": (5, 192), "10M": (5, 384)}
HEAD_WIDTH = 32
WIDTH, STD = 128, 0.08  # of the ladder by length
TUNING = 0.02  # of the text: rates are chosen on it, and the held-out text only judges
_WARMUP_STEPS = 10


def _schedule(name: str, **options: Any) -> dict[str, Any]:
    return {"schedule": {"name": name, "warmup": 0.0, "warmup_steps": _WARMUP_STEPS, **options}}


WSD = _schedule("wsd", decay=0.2)
COSINE = _schedule("cosine", floor=0.0)
# Embeddings want larger rates than matrices: shares and rates by a pilot with one seed at 1 and
# 10 MB. A sweep of ``lr`` moves both.
LION = {"optimizer": {"name": "lion", "lr": 0.001, "embedding_lr_share": 8.0, "weight_decay": 0.3}}
MUON = {"optimizer": {"name": "muon", "lr": 0.01, "embedding_lr_share": 4.0}}
ARMS: dict[str, dict[str, Any]] = {
    "adamw+cosine": COSINE,
    "adamw+wsd": WSD,
    "lion+linear": LION,
    "lion+wsd": {**LION, **WSD},
    "muon+linear": MUON,
    "muon+wsd": {**MUON, **WSD},
}
# Only where the text is read again and again has a regulariser a task.
REREAD: dict[str, dict[str, Any]] = {
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    "decay": {"optimizer.weight_decay": 0.5},
    "smoothing": {"training.label_smoothing": 0.1},
}


@recipe
def ladder(*, seeds: int = 3, longest: float = 30.0, source: str = "stdlib") -> Study:
    """Seven schedules and optimizers at five lengths of training, and three at four sizes.

    Seven hours on two cores. A GPT-2 of 0.9 million parameters, with 2,048 tokens of its own text,
    rotary positions, RMSNorm and QK-norm, reads 0.3, 1, 3, 10 and 30 MB. Every arm tunes its
    learning rate at 1 and 10 MB; the other rungs take the rate on the line through both. At the
    last rung, where the text is read a third time, dropout, weight decay and label smoothing come
    in. A second ladder goes from 0.3 to 10 million parameters at 3 MB. Products are in bfloat16,
    which is slow on a processor that lacks it; a small experiment compares it with float32.

    Args:
        seeds: of every arm, paired; of the smaller experiments 5 and 7 at least.
        longest: MB of text at the last rung: one of 3, 10, 30.
        source: of the text; ``data.source`` of a config.
    """
    numbers = tuple(range(seeds))
    few = ("adamw+wsd", "muon+linear")
    by_size = Experiment(
        name="size",
        question=SIZES,
        baseline=learns_well(source, SIZES_AT_MB),
        baseline_name="adamw+linear",
        arms=one_at_a_time({name: ARMS[name] for name in few}),
        seeds=tuple(range(max(seeds, SIZES_SEEDS))),
        smallest_effect=EFFECT_BITS_PER_BYTE,
        sweep=SIZES_SWEEP,
        error="pooled",
        ladder=Ladder(
            rungs={name: _model(*each) for name, each in MODELS.items()},
            axis="parameters",
            # The ends: a rate for 10M on the line through 0.3M and 3M was too large.
            tuned=("0.3M", "10M"),
            multiples={"10M": WIDE_MULTIPLES},
            **_detected(SEEN_SIZES if source == "stdlib" else {}, MODELS),
        ),
    )
    by_precision = Experiment(
        name="precision",
        question="Does bfloat16 change what is learnt, or what Muon brings?",
        baseline=learns_well(source, TUNED_MB[0]),
        baseline_name="adamw+linear",
        arms=factorial({"float32": {"training.precision": "float32"}, "muon": MUON}),
        # The spreads of its arms differ too much to be pooled, so it needs more seeds.
        seeds=tuple(range(max(seeds, PRECISION_SEEDS))),
        smallest_effect=PRECISION_EFFECT,
        spread=PRECISION_SPREAD if source == "stdlib" else None,
    )
    experiments = (by_precision, by_length(source, longest, numbers), by_size)
    return Study(name="ladder", question=QUESTION, experiments=experiments)


def by_length(source: str, longest: float, seeds: tuple[int, ...]) -> Experiment:
    """Return the ladder over the text read, up to ``longest`` MB."""
    if longest not in RUNGS_MB[2:]:
        raise InvalidArgument("longest", f"{longest:g}", "one of 3, 10, 30")
    rungs = {f"{each:g}MB": _budget(source, each) for each in RUNGS_MB if each <= longest}
    return Experiment(
        name="length",
        question=QUESTION,
        baseline=learns_well(source, SIZES_AT_MB),
        baseline_name="adamw+linear",
        arms=one_at_a_time({**ARMS, **REREAD}),
        seeds=seeds,
        smallest_effect=EFFECT_BITS_PER_BYTE,
        sweep=SWEEP,
        error="pooled",
        ladder=Ladder(
            rungs=rungs,
            tuned=tuple(f"{each:g}MB" for each in TUNED_MB if each <= longest),
            shared=tuple(name for name in ARMS if name.endswith("wsd")),
            last=dict.fromkeys(REREAD, "adamw+linear"),
            **_detected(SEEN.get(source, {}), rungs),
        ),
    )


def _detected(
    seen: Mapping[str, tuple[float, float]], rungs: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Return the fields of a ladder that say what its rungs can detect; none for other texts."""
    known = {rung: seen[rung] for rung in rungs if rung in seen}
    return {
        "spread": {rung: spread for rung, (spread, _) in known.items()},
        "smallest_effect": {rung: effect for rung, (_, effect) in known.items()},
    }


def learns_well(source: str, megabytes: float) -> RunConfig:
    """Return a run of a small GPT-2 that learns much in little time, on some MB of text."""
    budget = _budget(source, megabytes)
    return RunConfig(
        model=Model(
            layers=2,
            heads=WIDTH // HEAD_WIDTH,
            width=WIDTH,
            context=128,
            positions="rotary",
            norm="rms",
            qk_norm=True,
            bias=False,
            tied=False,
            std=STD,
        ),
        data=Data(source=source, tokenizer="bpe", tuning=TUNING),
        optimizer=Optimizer(name="adamw", lr=0.004, embedding_lr_share=8.0),
        schedule=Schedule(**_schedule("linear")["schedule"]),
        training=Training(batch=16, precision=PRECISION),
        budget=Budget(steps=budget["budget.steps"]),
        evaluation=Evaluation(
            every=budget["evaluation.every"], windows=32, final_stride=64, attention_windows=0
        ),
    )


def _budget(source: str, megabytes: float) -> dict[str, Any]:
    """Return the changes that make a run read so much text."""
    steps = round(megabytes * 1e6 / BYTES_A_TOKEN.get(source, 3.0) / (16 * 128))
    return {"budget.steps": steps, "evaluation.every": max(1, steps // EVALUATIONS)}


def _model(layers: int, width: int) -> dict[str, Any]:
    return {
        "model.layers": layers,
        "model.width": width,
        "model.heads": width // HEAD_WIDTH,
        # As wide sums as at the ladder's width.
        "model.std": round(STD * (WIDTH / width) ** 0.5, 3),
    }
