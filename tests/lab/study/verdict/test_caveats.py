"""What makes a comparison doubtful is said, and nothing else is: notes and the kernel guard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    judged,
    known,
    records_of,
    study_of,
)
from tilelab.study.ask.config import Arm, Experiment
from tilelab.study.records.events import PROBED, Kernels, LayerKernel, RunRecord
from tilelab.study.verdict.caveats import kernel_flags, kernel_uses
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import ExperimentVerdict, KernelUse

Spoil = Callable[[RunRecord], None]
LION = "optimizers/lion/seed-1"


def verdict(
    experiment: Experiment | None = None, spoil: Spoil = lambda _: None, **behaviours: Behaviour
) -> ExperimentVerdict:
    """The verdict after the record of the arm's seed 1 was spoilt."""
    study = study_of(experiment or experiment_of("lion"))
    records = records_of(study, behaviours)
    if LION in records:
        spoil(records[LION])
    return judge(study, records).experiments[0]


def of_start(**changes: Any) -> Spoil:
    def spoil(record: RunRecord) -> None:
        record.starts[0] = replace(record.start, **changes)

    return spoil


def start_loss(value: float) -> Spoil:
    def spoil(record: RunRecord) -> None:
        record.evaluations[0] = replace(record.evaluations[0], bits_per_byte=value)

    return spoil


def test_a_study_in_order_has_no_notes_and_one_seed_is_noted() -> None:
    found = verdict(lion=Behaviour(effect=-0.1))
    assert found.notes == found.arms[0].notes == ()
    (note,) = verdict(experiment_of("lion", seeds=(0,))).notes
    assert "One seed only" in note


def test_other_text_is_noted() -> None:
    other = of_start(corpus={"sha256": "1" * 64})
    only = Behaviour(absent=(0, 2))
    (note,) = verdict(spoil=other, lion=only).notes
    assert "The text was not the same" in note
    arm = Arm(name="lion", changes={"data.size_cap_bytes": 500_000})
    assert verdict(experiment_of(arm), other, lion=only).notes == (), "the arm asks for other text"


def test_another_machine_or_version_is_noted_also_after_a_resume() -> None:
    environment = {"chip": "another chip", "threads": 1}
    (note,) = verdict(spoil=of_start(environment=environment)).notes
    assert note.startswith("The runs were not all made alike (chip differ)")

    def resumed(record: RunRecord) -> None:
        record.starts.append(replace(record.start, from_step=5, environment={"threads": 2}))

    (note,) = verdict(spoil=resumed).notes
    assert "(threads differ)" in note
    flops = {"full": 1e30, "causal": 1e30}
    (note,) = verdict(spoil=of_start(flops_per_token=flops)).notes
    assert "above 100 %" in note


def test_an_arm_that_started_from_other_weights_is_noted() -> None:
    (note,) = verdict(spoil=start_loss(7.0)).arms[0].notes
    assert note == ("Not paired: the loss before the first step is not the baseline's with seed 1.")
    assert verdict(spoil=start_loss(8.0 * (1 + 1e-4))).arms[0].notes == (), "rounding"


def test_first_weights_are_compared_to_the_bit() -> None:
    def notes(of_arm: str, changes: dict[str, Any]) -> tuple[str, ...]:
        study = study_of(experiment_of(Arm(name="lion", changes=changes)))
        records = records_of(study, {})
        for name, record in records.items():
            first = of_arm if name == LION else "a" * 64
            record.starts[0] = replace(record.start, weights_sha256=first)
        return judge(study, records).experiments[0].arms[0].notes

    same: list[dict[str, Any]] = [{"optimizer.name": "lion"}, {"model.dropout.attention": 0.1}]
    for changes in same:
        (note,) = notes("b" * 64, changes)
        assert note == "Not paired: the first weights are not the baseline's with seed 1."
        assert notes("a" * 64, changes) == ()
        assert notes("", changes) == (), "a record that does not tell"
    other: list[dict[str, Any]] = [{"model.width": 64}, {"model.nudge": True}]
    for changes in (*other, {"data.tokenizer": "gpt2"}):
        assert not any("Not paired" in note for note in notes("b" * 64, changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.source": "other.txt"}, "of another held-out text"),
        ({"data.held_out": 0.1}, "of another held-out text"),
        (
            {"evaluation.documents": True},
            "of the held-out text read otherwise (evaluation.documents)",
        ),
        ({"evaluation.windows": 7}, "of other windows of the held-out text"),
        ({"model.context": 128}, "of other windows of the held-out text"),
        ({"evaluation.final_stride": 8}, "of other windows of the held-out text"),
        ({"data.tokenizer": "gpt2"}, "per token of another tokenizer"),
        ({"optimizer.lr": 0.1, "evaluation.every": 3}, ""),
    ],
)
def test_a_final_loss_of_another_text_is_noted(changes: dict[str, Any], words: str) -> None:
    experiment = experiment_of(Arm(name="lion", changes=changes), metric="loss")
    notes = verdict(experiment).arms[0].notes
    whole = f"The final loss is {words} than the baseline's: the effect is that of both changes."
    assert notes == ((whole,) if words else ())


def test_the_whole_text_is_the_same_at_every_context() -> None:
    whole = config_of(**{"evaluation.final_stride": 64})
    longer = Arm(name="lion", changes={"model.context": 128, "evaluation.final_stride": 128})
    assert verdict(experiment_of(longer, baseline=whole)).arms[0].notes == ()


@pytest.mark.parametrize(
    ("changes", "noted"),
    [
        ({"evaluation.final_stride": 64}, True),
        ({"evaluation.final_stride": 4}, True),
        ({"model.context": 128}, True),
        ({"model.context": 128, "evaluation.final_stride": 128}, True),
        ({"evaluation.windows": 7}, False),
    ],
)
def test_another_stride_is_other_windows(changes: dict[str, Any], noted: bool) -> None:
    """A smaller stride lowers the loss: it puts more text before each token that is scored."""
    overlapping = config_of(**{"evaluation.final_stride": 8})
    experiment = experiment_of(Arm(name="lion", changes=changes), baseline=overlapping)
    notes = verdict(experiment).arms[0].notes
    assert any("of other windows of the held-out text" in note for note in notes) == noted


def test_another_model_or_evaluation_cannot_start_with_the_same_loss() -> None:
    same: list[dict[str, Any]] = [{"model.dropout.residual": 0.1}, {"model.nudge": True}]
    other: list[dict[str, Any]] = [{"model.width": 64}, {"training.precision": "bf16"}]
    for changes in (*same, *other, {"evaluation.windows": 8}):
        experiment = experiment_of(Arm(name="lion", changes=changes))
        notes = verdict(experiment, start_loss(9.0)).arms[0].notes
        assert any("Not paired" in note for note in notes) == (changes in same)


def test_a_target_nobody_reached_is_noted_when_all_is_over() -> None:
    experiment = experiment_of("lion", target=0.5)
    (note,) = verdict(experiment).notes
    assert note.startswith("No run reached the target of 0.5 bits per byte; the best evaluation")
    assert verdict(experiment, lion=Behaviour(stopped={0: 5})).notes == ()
    assert verdict(experiment_of("lion", target=7.0)).notes == ()


TILEWISE = Arm(name="tilewise", changes={"attention.implementation": "tilewise"}, kind="systems")
ROUNDING = Arm(name="rounding", changes={"model.nudge": True}, kind="systems")


PLAIN = config_of(**{"attention.implementation": "plain"})


def drifts(*arms: Arm, precision: str = "float32", **drift: float) -> dict[str, tuple[str, ...]]:
    """The notes of these arms, where at step 7 the loss of seed 1 is off by a share of its value.

    At step 21 it is off by much more, and there is no loss at step 3.
    """
    baseline = config_of(**{"attention.implementation": "plain", "training.precision": precision})
    study = study_of(experiment_of(*arms, baseline=baseline))
    records = records_of(study, {each.name: Behaviour(noise=0.0) for each in arms})
    for arm in arms:
        for seed in (0, 1, 2):
            name = f"optimizers/{arm.name}/seed-{seed}"
            theirs = records[f"optimizers/baseline/seed-{seed}"].steps
            record = records[name]
            record.steps[:] = theirs
            record.steps[2] = replace(record.steps[2], loss=None)
            if seed == 1:
                for step, share in ((7, drift.get(arm.name, 0.0)), (21, 0.5)):
                    loss = record.steps[step - 1].loss
                    assert loss is not None
                    record.steps[step - 1] = replace(
                        record.steps[step - 1], loss=loss * (1 - share)
                    )
    found = judge(study, records).experiments[0]
    return {arm.arm: arm.notes for arm in found.arms}


def test_the_drift_of_a_kernel_stands_beside_that_of_rounding() -> None:
    notes = drifts(TILEWISE, ROUNDING, tilewise=1e-6, rounding=2e-6)
    first = "The training loss of the first 20 steps differs from the baseline's by at most"
    assert notes["tilewise"] == (f"{first} 1.0e-06 of its value (rounding alone: 2.0e-06).",)
    assert notes["rounding"] == (
        f"{first} 2.0e-06 of its value: this is what rounding alone does.",
    )
    assert drifts(TILEWISE, tilewise=3e-7)["tilewise"] == (f"{first} 3.0e-07 of its value.",)
    assert "More than rounding explains" in drifts(TILEWISE, tilewise=6e-7)["tilewise"][0]
    same = "The training loss of the first 20 steps is the baseline's, to the last bit"
    assert drifts(TILEWISE)["tilewise"] == (f"{same}.",)
    notes = drifts(TILEWISE, ROUNDING, rounding=2e-6)
    assert notes["tilewise"] == (f"{same} (rounding alone: 2.0e-06).",)
    notes = drifts(TILEWISE, ROUNDING, tilewise=1e-3, rounding=2e-6)
    assert "More than rounding explains" in notes["tilewise"][0]
    # It is told of systems arms in float32 alone.
    assert drifts(Arm(name="tilewise", changes=TILEWISE.changes), tilewise=1e-6)["tilewise"] == ()
    assert drifts(TILEWISE, precision="bf16", tilewise=1e-6)["tilewise"] == ()


def test_drift_is_not_told_before_all_runs_are_over() -> None:
    for unfinished in ("tilewise", "baseline"):
        found = judged(experiment_of(TILEWISE), {unfinished: Behaviour(stopped={2: 10})})
        assert found.arms[0].notes == ()
    assert "training loss" in verdict(experiment_of(TILEWISE)).arms[0].notes[0]


def agreeing(gap: float, control: float, drift: float = 0.0) -> list[tuple[bool | None, bool]]:
    """What is said of a kernel and of a control whose final losses are off by such shares."""
    study = study_of(experiment_of(TILEWISE, ROUNDING, baseline=PLAIN))
    records = records_of(study, {each.name: Behaviour(noise=0.0) for each in (TILEWISE, ROUNDING)})
    for arm, share in ((TILEWISE.name, gap), (ROUNDING.name, control)):
        for seed in (0, 1, 2):
            theirs = records[f"optimizers/baseline/seed-{seed}"]
            record = records[f"optimizers/{arm}/seed-{seed}"]
            record.steps[:] = theirs.steps
            record.evaluations[:] = theirs.evaluations
            loss = theirs.evaluations[-1].loss
            assert loss is not None
            record.evaluations[-1] = replace(theirs.evaluations[-1], loss=loss * (1 + share))
    first = records["optimizers/tilewise/seed-1"].steps
    first[6] = replace(first[6], loss=known(first[6].loss) * (1 + drift))
    found = judge(study, records).experiments[0].arms
    return [(arm.agrees, arm.changed_what_is_learnt) for arm in found]


@pytest.mark.parametrize(
    ("gap", "control", "drift", "agrees"),
    [
        (1e-6, 2e-6, 0.0, True),
        (1e-7, 0.0, 0.0, True),  # one spacing of float32 is nothing
        (0.0, 0.0, 4e-7, True),
        (3e-6, 2e-6, 0.0, False),
        (0.0, 0.0, 6e-7, False),
    ],
)
def test_a_kernel_agrees_that_differs_by_no_more_than_rounding(
    gap: float, control: float, drift: float, agrees: bool
) -> None:
    assert agreeing(gap, control, drift) == [(agrees, not agrees), (None, False)]


FLASH, MATH = "sdpa flash (cpu)", "sdpa math"
DROPOUT = Arm(name="arm", changes={"model.dropout.attention": 0.1})
WINDOW = Arm(name="arm", changes={"attention.variant": {"name": "window"}})
OTHER = Arm(name="arm", changes={"attention.implementation": "plain"})
COMPILED = Arm(name="arm", changes={"training.compile": True})
ASKED = "All layers ran plain, where the baseline ran sdpa flash (cpu), as the arm asks."
UNASKED = (
    "All layers ran sdpa math, where the baseline ran sdpa flash (cpu). The arm did not ask "
    "for that: its speed and memory are those of both changes together."
)
UNNAMED = (
    "All layers ran sdpa: unknown, where the baseline ran sdpa flash (cpu). A record does not name "
    "its kernel: they may be the same."
)


@pytest.mark.parametrize(
    ("arm", "ran", "layers", "words"),
    [
        (DROPOUT, (FLASH,) * 2, [], ""),
        (DROPOUT, (MATH,) * 2, [(0, 1)], UNASKED),
        (WINDOW, (MATH,) * 2, [(0, 1)], UNASKED),
        # Who asks for another attention is told and not accused.
        (OTHER, ("plain",) * 2, [(0, 1)], ASKED),
        (Arm(name="arm", kind="systems"), ("plain",) * 2, [(0, 1)], ASKED),
        # How the kernel of a compiled arm was seen is no other kernel.
        (COMPILED, (FLASH + PROBED,) * 2, [], ""),
        (COMPILED, (MATH + PROBED,) * 2, [(0, 1)], UNASKED),
        (DROPOUT, (FLASH, MATH, MATH, FLASH, MATH, FLASH), [(1, 2, 4)], "Layers 1 to 2 and 4 ran "),
        (DROPOUT, ("plain", MATH, MATH), [(0,), (1, 2)], "Layer 0 ran plain"),
        (DROPOUT, ("sdpa: unknown",) * 2, [(0, 1)], UNNAMED),
    ],
)
def test_a_layer_that_ran_another_kernel_is_flagged(
    arm: Arm, ran: tuple[str, ...], layers: list[tuple[int, ...]], words: str
) -> None:
    config = config_of(**{"attention.implementation": "sdpa", "model.layers": len(ran)})
    experiment = experiment_of(arm, baseline=config)
    flash, other = Behaviour(kernels=(FLASH,)), Behaviour(kernels=ran)
    found = judged(experiment, {"baseline": flash, "arm": other}).arms[0].kernel_flags
    assert [each.layers for each in found] == layers
    assert {each.baseline for each in found} <= {FLASH}
    assert {each.arm for each in found} <= {MATH, "plain", "sdpa: unknown"}
    assert all(each.words.startswith(words) for each in found[:1])
    assert {each.expected for each in found} <= {words == ASKED}
    # Nothing is flagged before both have run.
    absent = Behaviour(absent=(0, 1, 2))
    for behaviours in ({"baseline": absent, "arm": other}, {"baseline": flash, "arm": absent}):
        assert judged(experiment, behaviours).arms[0].kernel_flags == ()


TWO = (KernelUse(FLASH, (0, 1), 12),)


@pytest.mark.parametrize(
    ("layers", "ran", "named", "kernels"),
    [
        # A layer that ran two kernels differs from one that ran one.
        (2, (KernelUse(FLASH, (0, 1), 10), KernelUse(MATH, (1,), 2)), (1,), f"{FLASH} and {MATH}"),
        # More layers than the baseline's are compared with all of its kernels.
        (4, (KernelUse(FLASH, (0, 1, 2, 3), 24),), (), ""),
        (4, (*TWO, KernelUse(MATH, (2, 3), 12)), (2, 3), MATH),
    ],
)
def test_kernels_are_compared_layer_by_layer(
    layers: int, ran: tuple[KernelUse, ...], named: tuple[int, ...], kernels: str
) -> None:
    deep = experiment_of(Arm(name="deep", changes={"model.layers": layers}))
    found = [(each.layers, each.arm) for each in kernel_flags(deep, "deep", ran, TWO)]
    assert found == ([(named, kernels)] if named else [])


def test_uses_are_summed_over_seeds_and_sorted_by_calls() -> None:
    one = RunRecord(kernels=Kernels([LayerKernel(0, MATH, 5), LayerKernel(1, FLASH, 5)]))
    two = RunRecord(kernels=Kernels([LayerKernel(0, FLASH, 4), LayerKernel(1, FLASH, 4)]))
    assert kernel_uses([one, RunRecord(), two]) == (
        KernelUse(FLASH, (0, 1), 13),
        KernelUse(MATH, (0,), 5),
    )
