"""Studies for a laptop: the kernels, and training choices on a small GPT-2.

``kernels`` trains the same through three implementations of attention; the others add choices to
it. Text is the source of Python's standard library, so that nothing is downloaded. ``laptop`` gives
the learning rates, those of the ladder at 1 MB; ``laptop-full`` sweeps those of a byte-level GPT-2.
"""

from __future__ import annotations

from typing import Any

from tilelab.study.ask.config import Arm, Experiment, RunConfig, Study, Sweep, change
from tilelab.study.recipes import ladder, recipe
from tilelab.study.recipes.arms import (
    SCORED,
    Factors,
    compare_kernels,
    factorial,
    one_at_a_time,
    small_gpt2,
)
from tilewise.inspect.peaks import isa, loop

QUESTION = "Which training choices, on top of efficient attention, are worth having?"
READ_MB = 1.0
SAMPLE_TOKENS = 160
EFFECT_BITS_PER_BYTE = 0.02  # some 1 % of what a model of this size learns in these steps
# Of ``laptop``, with the spreads of benchmarks/studies/laptop/report.md. Three seeds detect 0.042
# there: more of them would take more than five minutes.
LAPTOP_EFFECT, LAPTOP_SPREAD, KERNELS_SPREAD = 0.045, 0.0058, 6.4e-8
# The swept rates of each optimizer: doublings around the best of a coarser sweep.
ADAMW_RATES = (0.0005, 0.001, 0.002, 0.004)
LION_RATES = (0.00015, 0.0003, 0.0006, 0.0012)
MUON_RATES = (0.003, 0.006, 0.012, 0.024)


# Stored rates: of 0.0005 to 0.012 (AdamW) and 0.0003 to 0.002 (Lion), with both schedules and on
# seeds that no study here uses, the largest whose runs are free of spikes in the loss. AdamW's best
# mean was at 0.0014: 0.016 (linear) and 0.010 (WSD) bits per byte lower, less than seeds differ.
LION = {"optimizer": {"name": "lion", "lr": 0.0005, "weight_decay": 0.3}}
WSD = {"schedule": {"name": "wsd", "warmup": 0.1, "decay": 0.2}}
MUON = {"optimizer": {"name": "muon", "lr": 0.003}}
SCHEDULES: Factors = {
    "wsd": WSD,
    "cosine": {"schedule": {"name": "cosine", "warmup": 0.1, "floor": 0.1}},
    "constant": {"schedule": {"name": "constant"}},
}
REGULARISATION: dict[str, dict[str, Any]] = {
    "dropout-residual": {"model.dropout.residual": 0.1},
    "dropout-attention": {"model.dropout.attention": 0.1},
    "no-decay": {"optimizer.weight_decay": 0.0},
    "more-decay": {"optimizer.weight_decay": 0.5},
    "smoothing": {"training.label_smoothing": 0.1},
}


@recipe
def kernels(
    *,
    text: str = "stdlib",
    context: int = 1024,
    steps: int = 20,
    seeds: int = 3,
    long_context: int = 16384,
) -> Study:
    """Plain, sdpa and tilewise attention: do they learn the same, and what do they cost?

    Args:
        text: ``"stdlib"``, the name of a WikiText, or the path of a text file or a folder of them.
        context: tokens that attend to one another.
        steps: of every run.
        seeds: how many.
        long_context: of a few steps that plain attention has no memory for; 0 for none.
    """
    numbers = tuple(range(seeds))
    experiments = [kernels_experiment(context, steps, numbers, text, control=True)]
    if long_context:
        # The report tells what plain attention would need.
        few = {"evaluation.every": 3, "evaluation.windows": 1}
        question = (
            f"At context {long_context}, what does a step take that plain attention cannot make?"
        )
        config = change(_training(long_context, 3, text), few)
        fused = ("sdpa", "tilewise")
        experiments.append(compare_kernels("long", question, config, numbers, fused))
    return Study(
        name="kernels",
        question="What does attention that never writes the N x N matrix change in training?",
        experiments=tuple(experiments),
    )


def kernels_experiment(
    context: int,
    steps: int,
    seeds: tuple[int, ...],
    text: str = "stdlib",
    *,
    control: bool = False,
    layers: int = 4,
) -> Experiment:
    """Plain attention against the two fused ones, and with ``control`` against rounding alone."""
    question = f"At context {context}, do fused kernels learn the same, faster and in less?"
    config = change(_training(context, steps, text), {"model.layers": layers})
    return compare_kernels("kernels", question, config, seeds, control=control)


def _training(context: int, steps: int, text: str) -> RunConfig:
    """Return the run config of a byte-level GPT-2 of 0.9 million parameters, with any attention."""
    return small_gpt2(
        steps,
        # Losses of the steps and the last evaluation say whether kernels learn the same.
        evaluations=1,
        windows=2,
        evaluation__attention_windows=2,
        model__context=context,
        data={"source": text, "size_cap_bytes": 4 * 1024 * 1024},
        # Gentle: at 0.003 the loss of single steps jumps by several nats in the first twenty, and
        # what differs by rounding only is thrown far apart.
        optimizer__lr=0.0006,
        schedule={"name": "constant", "warmup": 0.25},
        training__batch=1,
    )


@recipe
def laptop(*, steps: int = 160, seeds: int = 3) -> Study:
    """Kernels, then AdamW or Muon and linear or warmup-stable-decay: five to seven minutes.

    A GPT-2 of 0.9 million parameters with 2,048 tokens of its own reads 1 MB: the lower end of the
    recipe ``ladder``, where it learns more than tables of bytes hold. Products are in bfloat16
    where the processor multiplies it, and in float32 elsewhere, which takes a minute more: the
    ladder shows that what is learnt is the same.

    Args:
        steps: of every run of the second experiment, of 2,048 tokens.
        seeds: how many, paired.
    """
    numbers = tuple(range(seeds))
    changes = {
        "budget.steps": steps,
        "evaluation.every": max(1, steps // 4),
        "training.precision": "bf16" if loop("bfloat16", isa()) == "bf16" else "float32",
        # 4 % faster than torch's loss of all logits; losses differ by rounding.
        "training.loss_tokens": 2048,
        "evaluation.final_stride": 128,
        "evaluation.sample_tokens": SAMPLE_TOKENS,
    }
    choices = Experiment(
        name="choices",
        question="Muon for AdamW, warmup-stable-decay for linear decay: alone and together?",
        baseline=change(ladder.learns_well("stdlib", READ_MB), changes),
        baseline_name="adamw+linear",
        arms=factorial({"muon": ladder.MUON, "wsd": ladder.WSD}),
        seeds=numbers,
        smallest_effect=LAPTOP_EFFECT,
        spread=LAPTOP_SPREAD,
    )
    # In fewer steps a scale that is 1 % off would look like rounding; with two layers it moves the
    # losses by 1.3e-6, with four by 2.0e-6. A process of plain attention is 5 % faster or slower
    # than the next, so it takes 8 for an interval of speed within 5 %.
    kernels = kernels_experiment(1024, 20, tuple(range(max(seeds, 8))), layers=2)
    kernels = change(kernels, {"spread": KERNELS_SPREAD})
    return Study(name="laptop", question=QUESTION, experiments=(kernels, choices))


@recipe
def laptop_full(*, steps: int = 150, seeds: int = 5) -> Study:
    """The same with Muon, cosine, dropout, weight decay, swept rates and more seeds: forty minutes.

    All of the held-out text judges. Sweeps choose rates on a text of their own.

    Args:
        steps: of every run but those of the kernels, trials of sweeps too.
        seeds: how many, paired.
    """
    numbers = tuple(range(seeds))
    optimizers = _choices(
        "optimizers",
        "Which optimizer, each at the best of four learning rates?",
        one_at_a_time({"lion": LION, "muon": MUON}),
        steps,
        numbers,
        baseline_name="adamw",
        sweep=Sweep(values={"adamw": ADAMW_RATES, "lion": LION_RATES, "muon": MUON_RATES}),
    )
    swept = _choices(
        "schedules",
        "Which schedule, each at the best of four learning rates?",
        one_at_a_time(SCHEDULES),
        steps,
        numbers,
        baseline_name="linear",
        sweep=Sweep(values=dict.fromkeys(("linear", *SCHEDULES), ADAMW_RATES)),
    )
    # Rates are those of the baseline: what is asked is whether to add a factor to it.
    regularisation = _choices(
        "regularisation",
        "Do dropout, weight decay or label smoothing help in less than one epoch?",
        one_at_a_time(REGULARISATION),
        steps,
        numbers,
    )
    # On fresh seeds, which the choice of arms has not seen.
    together = _choices(
        "together",
        "Do Muon and warmup-stable-decay add up?",
        factorial({"muon": MUON, "wsd": WSD}),
        steps,
        tuple(seed + 100 for seed in numbers),
        baseline_name="adamw+linear",
    )
    kernels = kernels_experiment(1024, 20, numbers)
    experiments = (kernels, optimizers, swept, regularisation, together)
    return Study(name="laptop-full", question=QUESTION, experiments=experiments)


def _choices(
    name: str, question: str, arms: tuple[Arm, ...], steps: int, seeds: tuple[int, ...], **more: Any
) -> Experiment:
    """Return some arms against the baseline, with further fields of the experiment."""
    fields = {"smallest_effect": EFFECT_BITS_PER_BYTE, "target": 3.6, **more}
    baseline = change(small_gpt2(steps, 6, 32, evaluation__sample_tokens=SAMPLE_TOKENS), SCORED)
    return Experiment(
        name=name, question=question, baseline=baseline, arms=arms, seeds=seeds, **fields
    )
