"""Interactions of choices that were tried alone and together, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import Interaction
from tilelab.study.verdict.stats import paired

BASE = {0: 2.0, 1: 2.2, 2: 2.1}


def found(
    *names: str, seeds: tuple[int, ...] = (0, 1, 2), **behaviours: Any
) -> tuple[Interaction, ...]:
    study = study_of(experiment_of(*names, seeds=seeds))
    named = {name.replace("_", "+"): each for name, each in behaviours.items()}
    return judge(study, records_of(study, named)).experiments[0].interactions


def at(*shifts: float) -> Behaviour:
    """Runs whose seeds end so far from the baseline's."""
    rows = zip(BASE.items(), shifts, strict=True)
    return Behaviour(finals={seed: value + shift for (seed, value), shift in rows})


def two(both: Behaviour) -> Interaction:
    (only,) = found(
        *("lion", "wsd", "lion+wsd"),
        baseline=at(0, 0, 0),
        lion=at(-0.10, -0.11, -0.12),
        wsd=at(-0.05, -0.05, -0.06),
        lion_wsd=both,
    )
    return only


def test_the_contrast_is_what_is_beyond_the_sum() -> None:
    only = two(at(-0.20, -0.24, -0.25))
    expected = paired([-0.05, -0.08, -0.07], 0.95)
    assert (only.arms, only.together, only.n) == (("lion", "wsd"), "lion+wsd", 3)
    assert only.effect == pytest.approx(expected.mean)
    assert only.p_value == only.p_holm == pytest.approx(expected.p_value)
    assert only.interval is not None
    assert expected.interval is not None
    assert only.interval.low == pytest.approx(expected.interval.low)
    assert only.label == "better together"
    assert only.reason.startswith("-0.067 bits per byte [-0.105, -0.029] beyond the sum")


def test_less_than_the_sum_is_worse_together() -> None:
    only = two(at(-0.05, -0.05, -0.08))
    assert only.effect == pytest.approx(0.1033, abs=1e-4)
    assert only.label == "worse together"


def test_choices_that_add_up_are_additive() -> None:
    only = two(at(-0.150, -0.161, -0.179))
    assert only.label == "additive"
    assert "they add up, to within 0.02" in only.reason


def test_a_wide_interval_is_undecided() -> None:
    only = two(at(-0.35, 0.05, -0.25))
    assert only.label == "undecided"


def test_one_seed_is_undecided() -> None:
    (only,) = found("a", "b", "a+b", seeds=(0,))
    assert (only.label, only.n, only.p_value) == ("undecided", 1, None)


def test_a_run_that_diverged_or_is_missing_is_said() -> None:
    broken = two(Behaviour(diverged={1: 5}))
    assert (broken.label, broken.effect, broken.p_holm, broken.n) == ("diverged", None, None, 0)
    partial = two(Behaviour(absent=(1,)))
    assert (partial.label, partial.n, partial.p_holm) == ("incomplete", 2, None)
    assert partial.effect is not None
    nothing = two(Behaviour(absent=(0, 1, 2)))
    assert (nothing.label, nothing.effect) == ("incomplete", None)
    (lost,) = found("a", "b", "a+b", baseline=Behaviour(diverged={0: 4}))
    assert lost.label == "diverged"


def test_three_choices_have_three_pairs_and_one_triple() -> None:
    names = ("a", "b", "c", "a+b", "a+c", "b+c", "a+b+c")
    shifts = dict(zip(names, (1, 2, 4, 3, 5, 6, 7.5), strict=True))  # only the triple adds 0.5
    behaviours: dict[str, Any] = {
        name.replace("+", "_"): at(shift, shift + 0.001, shift - 0.001)
        for name, shift in shifts.items()
    }
    result = found(*names, baseline=at(0, 0, 0), **behaviours)
    assert [each.together for each in result] == ["a+b", "a+c", "b+c", "a+b+c"]
    assert [each.effect for each in result] == pytest.approx([0, 0, 0, 0.5], abs=1e-9)
    assert [each.label for each in result][:3] == ["additive"] * 3
    triple = result[3]
    assert triple.arms == ("a", "b", "c")
    assert triple.p_value is not None
    assert triple.p_holm == pytest.approx(4 * triple.p_value), "Holm over the four"


def test_the_order_of_the_parts_does_not_matter() -> None:
    assert [each.arms for each in found("wsd", "lion", "lion+wsd")] == [("lion", "wsd")]
    assert len(found("a", "b", "c", "b+a", "c+a", "c+b", "a+b+c")) == 4


def test_only_whole_designs_are_interactions() -> None:
    assert found("lion", "wsd") == ()
    assert found("lion", "lion+wsd") == (), "wsd alone is missing"
    assert found("a", "b", "c", "a+b+c", "a+b") != ()
    assert len(found("a", "b", "c", "a+b+c", "a+b")) == 1, "a+c and b+c are missing"
    assert found("a", "a+a") == ()
    assert found("a", "a+") == ()
