"""The kernel guard: what is flagged, and in which words."""

from __future__ import annotations

from tests.lab.study.records_of import Behaviour, config_of, experiment_of, records_of, study_of
from tilelab.study.ask.config import Arm, Experiment
from tilelab.study.records.events import PROBED, Kernels, LayerKernel, RunRecord
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.kernels import kernel_flags, kernel_uses
from tilelab.study.verdict.result import KernelFlag, KernelUse

FLASH, MATH = "sdpa flash (cpu)", "sdpa math"
DROPOUT = Arm(name="dropout", changes={"model.dropout.attention": 0.1})


def flags(arm: Arm, layers: int = 2, **behaviours: Behaviour) -> tuple[KernelFlag, ...]:
    config = config_of(**{"attention.implementation": "sdpa", "model.layers": layers})
    study = study_of(experiment_of(arm, baseline=config))
    return judge(study, records_of(study, behaviours)).experiments[0].arms[0].kernel_flags


def test_dropout_that_switches_the_kernel_is_flagged_as_unasked() -> None:
    (flag,) = flags(
        DROPOUT, baseline=Behaviour(kernels=(FLASH,)), dropout=Behaviour(kernels=(MATH,))
    )
    assert (flag.arm, flag.baseline, flag.layers, flag.expected) == (MATH, FLASH, (0, 1), False)
    assert flag.words == (
        "All layers ran sdpa math, where the baseline ran sdpa flash (cpu). The arm did not ask "
        "for that: its speed and memory are those of both changes together."
    )


def test_a_variant_that_switches_the_kernel_is_unasked_too() -> None:
    arm = Arm(name="window", changes={"attention.variant": {"name": "window"}})
    (flag,) = flags(arm, baseline=Behaviour(kernels=(FLASH,)), window=Behaviour(kernels=(MATH,)))
    assert not flag.expected


def test_an_arm_that_asks_for_another_attention_is_told_and_not_accused() -> None:
    changes = {"attention.implementation": "plain"}
    for arm in (Arm(name="plain", changes=changes), Arm(name="plain", kind="systems")):
        (flag,) = flags(
            arm, baseline=Behaviour(kernels=(FLASH,)), plain=Behaviour(kernels=("plain",))
        )
        assert flag.expected
        assert flag.words == (
            "All layers ran plain, where the baseline ran sdpa flash (cpu), as the arm asks."
        )


def test_the_same_kernels_are_no_flag() -> None:
    same = Behaviour(kernels=(FLASH,))
    assert flags(DROPOUT, baseline=same, dropout=same) == ()


def test_a_compiled_arm_is_not_accused_of_how_its_kernel_was_seen() -> None:
    arm = Arm(name="compiled", changes={"training.compile": True})
    eager, probed = Behaviour(kernels=(FLASH,)), Behaviour(kernels=(FLASH + PROBED,))
    assert flags(arm, baseline=eager, compiled=probed) == ()
    (flag,) = flags(arm, baseline=eager, compiled=Behaviour(kernels=(MATH + PROBED,)))
    assert (flag.arm, flag.baseline) == (MATH, FLASH)


def test_nothing_is_flagged_before_both_have_run() -> None:
    absent = Behaviour(absent=(0, 1, 2))
    math = Behaviour(kernels=(MATH,))
    assert flags(DROPOUT, baseline=absent, dropout=math) == ()
    assert flags(DROPOUT, baseline=math, dropout=absent) == ()


def test_only_the_layers_that_differ_are_named() -> None:
    (flag,) = flags(
        DROPOUT,
        layers=6,
        baseline=Behaviour(kernels=(FLASH,)),
        dropout=Behaviour(kernels=(FLASH, MATH, MATH, FLASH, MATH, FLASH)),
    )
    assert flag.layers == (1, 2, 4)
    assert flag.words.startswith("Layers 1 to 2 and 4 ran sdpa math")


def test_different_differences_are_different_flags() -> None:
    first, second = flags(
        DROPOUT,
        layers=3,
        baseline=Behaviour(kernels=(FLASH,)),
        dropout=Behaviour(kernels=("plain", MATH)),
    )
    assert (first.layers, second.layers) == ((0,), (1, 2))
    assert first.words.startswith("Layer 0 ran plain")


def experiment(layers: int = 2) -> Experiment:
    return experiment_of(Arm(name="deep", changes={"model.layers": layers}))


def test_a_layer_that_ran_two_kernels_differs_from_one_that_ran_one() -> None:
    ran = (KernelUse(FLASH, (0, 1), 10), KernelUse(MATH, (1,), 2))
    (flag,) = kernel_flags(experiment(), "deep", ran, (KernelUse(FLASH, (0, 1), 12),))
    assert flag.layers == (1,)
    assert flag.arm == "sdpa flash (cpu) and sdpa math"


def test_more_layers_than_the_baseline_are_compared_with_all_of_its_kernels() -> None:
    baseline = (KernelUse(FLASH, (0, 1), 12),)
    same = (KernelUse(FLASH, (0, 1, 2, 3), 24),)
    assert kernel_flags(experiment(4), "deep", same, baseline) == ()
    other = (KernelUse(FLASH, (0, 1), 12), KernelUse(MATH, (2, 3), 12))
    (flag,) = kernel_flags(experiment(4), "deep", other, baseline)
    assert flag.layers == (2, 3)


def test_uses_are_summed_over_seeds_and_sorted_by_calls() -> None:
    one = RunRecord(kernels=Kernels([LayerKernel(0, MATH, 5), LayerKernel(1, FLASH, 5)]))
    two = RunRecord(kernels=Kernels([LayerKernel(0, FLASH, 4), LayerKernel(1, FLASH, 4)]))
    assert kernel_uses([one, RunRecord(), two]) == (
        KernelUse(FLASH, (0, 1), 13),
        KernelUse(MATH, (0,), 5),
    )
