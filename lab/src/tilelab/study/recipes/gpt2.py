"""GPT-2 on text: WikiText-103, longer contexts, and several training choices together."""

from __future__ import annotations

from typing import Any, Literal

from tilelab.study.ask.config import (
    Attention,
    Budget,
    Combine,
    Confirm,
    Data,
    Design,
    Evaluation,
    Experiment,
    Halving,
    Model,
    Optimizer,
    RunConfig,
    Schedule,
    Sequential,
    Study,
    Sweep,
    Training,
    change,
)
from tilelab.study.recipes import recipe
from tilelab.study.recipes.arms import (
    SCORED,
    Factors,
    attention,
    compare_kernels,
    factorial,
    faults,
    one_at_a_time,
    small_gpt2,
)
from tilelab.study.recipes.ladder import by_length
from tilelab.study.recipes.laptop import MUON, WSD
from tilewise.errors import InvalidArgument

# For GPT-2 small.
FACTORS: dict[str, dict[str, Any]] = {
    "wsd": {"schedule": {"name": "wsd", "warmup": 0.01, "decay": 0.2}},
    "muon": {"optimizer": {"name": "muon", "lr": 0.0006}},
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
}
LONGEST_MB = 10


@recipe
def wikitext(*, preset: Literal["cpu", "h200"] = "cpu", seeds: int = 3) -> Study:
    """GPT-2 on WikiText-103: schedules, optimizers and dropout, with word perplexity.

    The held-out text is scored whole, and perplexity counts original words. ``cpu`` is the ladder
    over the text read (recipe ``ladder``) from 0.3 to 10 MB, on whatever part of WikiText-103 is at
    hand: two hours on two cores. ``h200`` is GPT-2 small: 12 layers of width 768 at context 1,024.
    It trains for five epochs (590 million tokens), with windows that move on by 32. Its 12 runs
    take some 25 minutes each on one H200, five hours in all at an estimated 400,000 tokens a
    second.

    Args:
        preset: ``"cpu"`` or ``"h200"``.
        seeds: how many, paired.
    """
    numbers = tuple(range(seeds))
    if preset == "cpu":
        experiment, chip = by_length("wikitext-103", LONGEST_MB, numbers), ""
    elif preset == "h200":
        experiment, chip = _gpt2_small(numbers), "h200"
    else:
        raise InvalidArgument("preset", repr(preset), "'cpu' or 'h200'")
    return Study(
        name=f"wikitext-{preset}",
        question=experiment.question,
        experiments=(experiment,),
        chip=chip,
    )


def _gpt2_small(seeds: tuple[int, ...]) -> Experiment:
    # 512 sequences a step, as GPT-2 was trained in the FlashAttention paper's section 4.1.
    config = RunConfig(
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
    return Experiment(
        name="wikitext-103",
        question="On WikiText-103, what do a schedule, an optimizer and dropout bring?",
        baseline=config,
        baseline_name="adamw+linear",
        arms=one_at_a_time(FACTORS),
        seeds=seeds,
        smallest_effect=0.01,
    )


SHORTEST, LONGEST = 512, 8192
TOKENS_PER_STEP = LONGEST
EVALUATED_TOKENS = 2 * LONGEST  # as much text at every context
HELD_OUT = 0.02
SPENT_AT = 2048  # the context at which saved memory goes to a larger batch


@recipe
def longer_context(*, plain_up_to: int = 4096, steps: int = 100, seeds: int = 3) -> Study:
    """Contexts of 512 to 8,192 at equal tokens; plain attention until it cannot; memory for batch.

    There are three kinds of experiment:

    * ``context`` asks what a longer context learns from the same tokens, at as many tokens a step;
    * ``reach-512`` and on compare tilewise at one context with plain attention, or with
      ``scaled_dot_product_attention`` where plain attention is left out;
    * ``spend`` gives the memory saved at 2,048 (or at ``plain_up_to``) to a larger batch.

    Args:
        plain_up_to: the longest context that plain attention has the memory for: one of 512, 1024,
            2048, 4096, 8192. One sequence of 4,096 keeps 1 GiB of probabilities for the backward
            pass, one of 8,192 keeps 4 GiB; the peak of a step is about twice that.
        steps: of 8,192 tokens, of the runs of ``context``; those of ``spend`` get a quarter.
        seeds: how many, paired.
    """
    contexts = [SHORTEST << doubled for doubled in range(5)]
    if plain_up_to not in contexts:
        required = f"one of {', '.join(map(str, contexts))}"
        raise InvalidArgument("plain_up_to", str(plain_up_to), required)
    numbers = tuple(range(seeds))
    return Study(
        name="longer-context",
        correction="experiment",  # each asks a question of its own
        question="What does a longer context buy, and what else can its memory be spent on?",
        experiments=(
            _context(contexts, steps, numbers),
            *(_reach(each, each <= plain_up_to, numbers) for each in contexts),
            _spend(min(plain_up_to, SPENT_AT), steps, numbers),
        ),
    )


def _at(context: int, steps: int) -> RunConfig:
    return small_gpt2(
        steps,
        evaluations=3,
        windows=EVALUATED_TOKENS // context,
        model__context=context,
        attention__implementation="tilewise",
        training__batch=TOKENS_PER_STEP // context,
    )


def _context(contexts: list[int], steps: int, seeds: tuple[int, ...]) -> Experiment:
    longer: dict[str, dict[str, Any]] = {
        f"context-{each}": {
            "model.context": each,
            "training.batch": TOKENS_PER_STEP // each,
            "evaluation.windows": EVALUATED_TOKENS // each,
            "evaluation.final_stride": each,
        }
        for each in contexts[1:]
    }
    # Windows of other lengths are other samples of the text, which differ by more than contexts do:
    # what decides is the loss on all of it, a part that is small enough for every run to read.
    whole = {"evaluation.final_stride": SHORTEST, "data.held_out": HELD_OUT}
    return Experiment(
        name="context",
        question="At equal tokens, what does a longer context learn, and what does it cost?",
        baseline=change(_at(SHORTEST, steps), whole),
        baseline_name=f"context-{SHORTEST}",
        arms=one_at_a_time(longer),
        seeds=seeds,
        smallest_effect=0.02,
    )


def _reach(context: int, plain: bool, seeds: tuple[int, ...]) -> Experiment:
    """Tilewise against plain attention, or against what runs in its stead."""
    few = {"training.batch": 1, "evaluation.every": 10, "evaluation.windows": 4}
    question = f"At context {context}, what do speed and memory gain from tilewise?"
    kernels = ("plain" if plain else "sdpa", "tilewise")
    config = change(_at(context, steps=10), few)
    return compare_kernels(f"reach-{context}", question, config, seeds, kernels)


def _spend(context: int, steps: int, seeds: tuple[int, ...]) -> Experiment:
    plain = {
        **attention("plain"),
        "training.batch": 1,
        "budget.tokens": steps * TOKENS_PER_STEP // 4,  # plain attention is slow here
    }
    return Experiment(
        name="spend",
        question=f"At context {context} and equal tokens, is the saved memory better in the batch?",
        baseline=change(_at(context, steps), plain),
        baseline_name="plain",
        arms=(
            *one_at_a_time({"tilewise": attention("tilewise")}, kind="systems"),
            *one_at_a_time({"tilewise-batch-4": {**attention("tilewise"), "training.batch": 4}}),
            # One of the two controls: a run takes minutes.
            *(arm for arm in faults() if arm.name == "wrong-scale"),
        ),
        seeds=seeds,
        smallest_effect=0.02,
    )


# What is read twice can be learnt by heart: only then have dropout and weight decay a task.
# The last articles are for tuning: a share of 0.02, as elsewhere, would be one article.
SLICE_BYTES, SLICE_TUNING = 160_000, 0.25
COMBINED: dict[str, dict[str, Any]] = {
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
    "decay": {"optimizer.weight_decay": 1.0},
    "wsd": WSD,
    "muon": {"optimizer.name": "muon", "optimizer.lr": 0.003},
}
QUESTION = "Do dropout, weight decay, the schedule and the optimizer depend on one another?"


@recipe
def gpt2_factorial(*, steps: int = 120, seeds: int = 3, fresh_seeds: int = 6) -> Study:
    """Dropout, weight decay, schedule and optimizer on WikiText: all sixteen combinations.

    Forty minutes on two cores: as much as 124 runs of 250 thousand tokens, of which one takes 20 to
    35 seconds of a core, and 60 evaluations of the whole held-out text of 20 seconds each. A
    byte-level GPT-2 of 0.46 million parameters reads 120 kB of WikiText-103 twice. Every
    combination tunes its learning rate by successive halving, with the tokens of four runs. Then
    come the main effects and the interactions of two. The best of the sixteen meets the baseline
    once more on fresh seeds. ``TILEWISE_DATA`` names the folder with the text.

    Args:
        steps: of every run that counts.
        seeds: of every combination, paired.
        fresh_seeds: of the last comparison.
    """
    baseline = small_gpt2(
        steps,
        evaluations=6,
        windows=64,
        model__layers=2,
        data={
            "source": "wikitext-103",
            "size_cap_bytes": SLICE_BYTES,
            "tuning": SLICE_TUNING,
        },
        evaluation__final_stride=256,
        optimizer__weight_decay=0.1,
    )
    numbers, fresh = tuple(range(seeds)), tuple(range(100, 100 + fresh_seeds))
    experiment = combinations(baseline, COMBINED, numbers, fresh, smallest_effect=0.02)
    return Study(name="gpt2-factorial", question=QUESTION, experiments=(experiment,))


def combinations(
    baseline: RunConfig,
    factors: Factors,
    seeds: tuple[int, ...],
    fresh: tuple[int, ...],
    smallest_effect: float,
) -> Experiment:
    """All combinations of some factors with tuned rates, and the best once more on fresh seeds."""
    return Experiment(
        name="factorial",
        question=QUESTION,
        baseline=baseline,
        baseline_name="adamw+linear",
        arms=factorial(factors),
        seeds=seeds,
        smallest_effect=smallest_effect,
        sweep=Sweep(multiples=(0.5, 1, 2, 4), halving=Halving(eta=2, rungs=2)),
        design=Design(factors=tuple(factors)),
        confirm=Confirm(seeds=fresh),
    )


# Any of them can be combined with any other: no two change the same value.
SCREENED: dict[str, dict[str, Any]] = {
    "muon": MUON,
    "wsd": WSD,
    "rotary": {"model.positions": "rotary"},
    "rms": {"model.norm": "rms"},
    "qk-norm": {"model.qk_norm": True},
    "dropout": {"model.dropout.residual": 0.1, "model.dropout.embedding": 0.1},
}
SCREENING = "Of six choices, which are worth having alone, which together, and does the best last?"
FIRST_LOOK = 3  # seeds of every arm before any is decided
SMALLEST_BITS_PER_BYTE = 0.02


@recipe
def screening(*, steps: int = 160, seeds: int = 5, fresh_seeds: int = 6) -> Study:
    """Six choices one at a time, a factorial of those that survive, the winner on fresh seeds.

    An hour or so on two cores: at most as much as 101 runs of 330 thousand tokens, of which one
    takes 20 to 60 seconds of a core, and some 170 evaluations of 7 seconds of all the text for
    tuning, or all that is held out. A byte-level GPT-2 of 0.85 million parameters reads the source
    of Python's standard library. Muon, warmup-stable-decay, rotary positions, RMSNorm, QK-norm and
    dropout are each compared with AdamW and a linear decay: with three seeds, and with all
    ``seeds`` where three do not decide. Up to four factors that were not shown to be worse go on,
    on three seeds of their own. They run in all combinations of two or three, or half of those of
    four. The best of these meets the baseline once more. Until then every arm tunes its learning
    rate by successive halving, on a quarter and on half of the steps, with the tokens of two whole
    runs.

    Args:
        steps: of every run that counts.
        seeds: of the first stage at most, paired; 2 or more.
        fresh_seeds: of the last comparison.
    """
    experiment = Experiment(
        name="choices",
        question=SCREENING,
        baseline=change(small_gpt2(steps, evaluations=8, windows=64), SCORED),
        baseline_name="adamw+linear",
        arms=one_at_a_time(SCREENED),
        seeds=tuple(range(seeds)),
        smallest_effect=SMALLEST_BITS_PER_BYTE,
        sweep=Sweep(multiples=(0.5, 1, 2, 4), halving=Halving(eta=2, rungs=2, longest=0.5)),
        sequential=Sequential(looks=tuple(sorted({min(FIRST_LOOK, seeds), seeds}))),
        combine=Combine(seeds=(50, 51, 52), most=4, runs=8),
        confirm=Confirm(seeds=tuple(range(100, 100 + fresh_seeds))),
    )
    return Study(name="screening", question=SCREENING, experiments=(experiment,))
