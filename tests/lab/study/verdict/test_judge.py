"""The judge on made-up records: every label, and what is withheld."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, judged, known, records_of, study_of
from tilelab.stats.paired import paired, seeds_for_equivalence
from tilelab.study.ask.config import Arm, Experiment
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.measures import TIMES
from tilelab.study.verdict.result import ArmVerdict, ExperimentVerdict

SDPA = Arm(name="sdpa", changes={"attention.implementation": "sdpa"}, kind="systems")
FLAT = {0: 2.0, 1: 2.1, 2: 2.2}  # final metrics of the baseline where they are given by hand


def verdict(experiment: Experiment | None = None, **behaviours: Behaviour) -> ExperimentVerdict:
    return judged(experiment or experiment_of("lion"), behaviours)


def arm(*differences: float, kind: Any = "training", others: int = 0, **fields: Any) -> ArmVerdict:
    """The verdict of an arm with these differences, among others without any."""
    seeds = tuple(range(len(differences)))
    arms = [Arm(name="lion", kind=kind), *(Arm(name=f"o{at}") for at in range(others))]
    experiment = experiment_of(*arms, seeds=seeds, **fields)
    finals = {seed: 2.0 + 0.1 * seed + each for seed, each in zip(seeds, differences, strict=True)}
    base = Behaviour(finals={seed: 2.0 + 0.1 * seed for seed in seeds})
    rest = {f"o{at}": Behaviour(effect=0, noise=0.001) for at in range(others)}
    return verdict(experiment, baseline=base, lion=Behaviour(finals=finals), **rest).arms[0]


DOUBTFUL = (-0.09, -0.15, -0.11)  # p = 0.023 alone


@pytest.mark.parametrize(
    ("differences", "fields", "label", "reason"),
    [
        # Of the research; a difference that is small for sure though it is not zero; others.
        ((-0.099, -0.116, -0.12), {}, "better", "-0.112 bits per byte [-0.139, -0.084] (Holm p 0."),
        ((0.10, 0.11, 0.12), {}, "worse", "(Holm p 0.0027)."),
        ((0.004, 0.005, 0.006), {}, "no difference", "shown to be smaller than 0.02"),
        ((0.01, 0.02, 0.03, 0.035, 0.015), {}, "worse", "It may be smaller than 0.02, the small"),
        # A spread of 0.05 against 0.02: a standardised effect of 0.4, of the tables 52 seeds.
        ((0.05, -0.05, 0.0), {}, "undecided", "About 49 more seeds to decide it (power 80%"),
        ((-1.0,), {}, "undecided", "one seed has no error bar"),
        (DOUBTFUL, {}, "better", ""),
        (DOUBTFUL, {"confidence": 0.99}, "undecided", ""),
        (DOUBTFUL, {"others": 2}, "undecided", ""),
    ],
)
def test_what_the_differences_decide(
    differences: tuple[float, ...], fields: dict[str, Any], label: str, reason: str
) -> None:
    found = arm(*differences, **fields)
    assert found.label == label
    assert reason in found.reason
    expected = paired(differences, 0.95)
    assert found.effect == pytest.approx(expected.mean)
    assert found.p_value == pytest.approx(expected.p_value)
    assert found.measures["loss"] is not None
    if len(differences) == 1:
        assert (found.interval, found.p_value, found.more_seeds) == (None, None, 1)


def test_more_power_and_more_arms_need_more_seeds() -> None:
    values = (0.05, -0.05, 0.0)
    plain = arm(*values).more_seeds or 0
    assert (arm(*values, power=0.95).more_seeds or 0) > plain
    assert (arm(*values, others=3).more_seeds or 0) > plain
    assert (arm(*values, confidence=0.99).more_seeds or 0) > plain


def test_a_seed_that_diverged_decides_and_no_effect_of_the_others_is_shown() -> None:
    found = verdict(lion=Behaviour(effect=-1.0, diverged={1: 9})).arms[0]
    assert (found.label, found.diverged, found.n) == ("diverged", (1,), 2)
    assert (found.effect, found.interval, found.p_value, found.p_holm) == (None,) * 4
    assert found.reason == "Diverged with 1 of 3 seeds (seed 1)."
    assert [each.status for each in found.per_seed] == ["done", "diverged", "done"]
    assert found.cost.tokens == (40 + 9 + 40) * 256
    both = verdict(lion=Behaviour(diverged={1: 9}, absent=(2,))).arms[0]
    assert both.label == "diverged", "before incomplete"


def test_where_the_baseline_diverged_there_is_nothing_to_compare_with() -> None:
    broken = Behaviour(diverged={1: 9})
    found = verdict(baseline=broken)
    assert found.baseline.status == "diverged"
    assert found.baseline.diverged == (1,)
    assert (found.arms[0].label, found.arms[0].effect) == ("undecided", None)
    assert found.arms[0].reason == "The baseline diverged with seed 1: nothing to compare with."
    both = verdict(baseline=broken, lion=Behaviour(diverged={1: 3, 2: 3})).arms[0]
    assert both.reason == (
        "Diverged with 2 of 3 seeds (seeds 1 and 2); so did the baseline with seed 1."
    )


def test_a_study_under_way_shows_what_it_has() -> None:
    found = verdict(lion=Behaviour(effect=-0.1, stopped={2: 12}))
    lion = found.arms[0]
    assert (lion.label, lion.n, lion.p_holm, lion.p_equivalence) == ("incomplete", 2, None, None)
    assert lion.effect == pytest.approx(-0.1, abs=0.01)
    assert lion.reason.startswith("2 of 3 seeds are done; so far -0.10")
    assert len(known(lion.measures["tokens_per_s"]).values) == 3, "a run under way has a speed"
    late = verdict(baseline=Behaviour(absent=(0, 2)))
    assert (late.baseline.status, late.baseline.incomplete) == ("incomplete", (0, 2))
    assert late.arms[0].label == "incomplete"
    assert late.arms[0].reason == "The baseline has finished 1 of 3 seeds."
    study = study_of()
    nothing = judge(study, {})
    assert not nothing.complete
    assert nothing.experiments[0].arms[0].reason == "0 of 3 seeds are done."
    assert nothing.experiments[0].baseline.cost.runs == 0
    json.dumps(nothing.as_json(), allow_nan=False)
    assert judge(study, records_of(study, {"lion": Behaviour(diverged={0: 3})})).complete
    assert not judge(study, records_of(study, {"lion": Behaviour(stopped={0: 3})})).complete


def test_identical_weights_are_no_difference_even_with_one_seed() -> None:
    twins = {"baseline": Behaviour(twin=True), "sdpa": Behaviour(twin=True, pace=2.0)}
    for seeds, words in (((0,), "the one seed"), ((0, 1, 2), "all 3 seeds")):
        found = verdict(experiment_of(SDPA, seeds=seeds), **twins).arms[0]
        assert (found.label, found.identical, found.effect) == ("no difference", True, 0)
        assert found.reason == f"Identical weights, bit for bit, with {words}."
        assert found.speed_withheld == ""


def test_one_seed_with_other_weights_is_not_identical() -> None:
    study = study_of(experiment_of(SDPA))
    twins = {"baseline": Behaviour(twin=True), "sdpa": Behaviour(twin=True)}
    records = records_of(study, twins)
    records["optimizers/sdpa/seed-2"] = records_of(study, {})["optimizers/sdpa/seed-2"]
    found = judge(study, records).experiments[0].arms[0]
    assert [each.identical for each in found.per_seed] == [True, True, False]
    assert not found.identical
    assert "Identical" not in found.reason


@pytest.mark.parametrize(
    ("behaviour", "label"),
    [
        (Behaviour(effect=-0.5), "better"),
        (Behaviour(effect=0.5), "worse"),
        (Behaviour(noise=0.1), "undecided"),
        (Behaviour(diverged={0: 5}), "diverged"),
        (Behaviour(absent=(1,)), "incomplete"),
    ],
)
def test_the_speed_of_any_other_systems_arm_is_withheld(behaviour: Behaviour, label: str) -> None:
    experiment = experiment_of(SDPA, Arm(name="lion"), target=3.0)
    found = verdict(experiment, sdpa=behaviour, lion=behaviour)
    sdpa, lion = found.arms
    assert sdpa.label == lion.label == label
    assert label in sdpa.speed_withheld
    measures, target = sdpa.measures, sdpa.target
    assert target is not None
    speeds = {"tokens_per_s", "tokens_per_cpu_s", "mfu_full", "mfu_causal"}
    assert speeds | {"step_s", "step_low_s", "step_high_s"} == TIMES
    for value in (
        *(measures[name] for name in TIMES),
        *(measures.speed_ratio, measures.cpu_ratio),
        *(target.median_wall_s, target.median_cpu_s, target.wall_ratio),
        *(sdpa.cost.wall_s, sdpa.cost.cpu_s, sdpa.cost.sweep_wall_s, sdpa.cost.sweep_cpu_s),
    ):
        assert value is None
    assert (target.wall_s, target.cpu_s) == ((), ())
    assert measures.memory is not None, "memory is no speed"
    assert lion.speed_withheld == ""
    assert lion.measures["tokens_per_s"] is not None, "a training arm's speed is its own"
    assert lion.cost.wall_s is not None
    assert sdpa.cost.tokens == lion.cost.tokens


def test_an_undecided_systems_arm_asks_for_the_seeds_that_show_equivalence() -> None:
    values = (0.018, 0.002, 0.010)  # half of what matters: equivalence is the harder thing to show
    systems, training = arm(*values, kind="systems"), arm(*values)
    assert (systems.label, training.label) == ("undecided", "undecided")
    assert "to show that nothing changed" in systems.reason
    wanted = seeds_for_equivalence(0.008, 0.01, 0.05, 0.8)
    assert (systems.more_seeds, training.more_seeds) == (wanted - 3, 1)
    assert wanted - 3 > 1


def test_differences_that_do_not_vary_are_decided_and_doubted() -> None:
    for shift in (0.25, 0.3):  # with rounding and without
        found = arm(shift, shift, shift)
        assert found.label == "worse"
        assert found.notes == (
            "The difference is the same with every seed: do the seeds change anything?",
        )
    assert arm(0.25, 0.25, 0.250001).notes == ()
    found = arm(0.0, 0.0, 0.0)
    assert found.label == "no difference"
    assert found.notes == ("Every seed ended with the baseline's value: is the change in use?",)
    assert not set(found.notes) & set(arm(0.0, 0.0, 0.0, kind="systems").notes)


def test_the_loss_may_be_the_metric() -> None:
    experiment = experiment_of("lion", metric="loss")
    found = verdict(
        experiment, baseline=Behaviour(finals=FLAT), lion=Behaviour(effect=9, finals=FLAT)
    )
    assert found.arms[0].effect == 0
    seed = found.arms[0].per_seed[1]
    assert seed.metric == seed.baseline == pytest.approx(2.1)
    assert seed.difference == 0
    assert "nats per token" in found.arms[0].reason
    alone = verdict(experiment_of())
    assert (alone.arms, alone.baseline.n) == ((), 3)
    assert alone.baseline.measures["tokens_per_s"] is not None


def test_a_miss_is_censored_and_not_left_out() -> None:
    experiment = experiment_of("lion", target=2.5)
    base = Behaviour(finals=dict.fromkeys((0, 1, 2), 2.0))
    one = verdict(experiment, baseline=base, lion=Behaviour(finals={0: 2.0, 1: 2.0, 2: 3.0}))
    target = one.arms[0].target
    assert target is not None
    assert (target.reached, target.tokens[2]) == (2, None)
    assert target.median_tokens == max(each for each in target.tokens if each is not None)
    assert target.tokens_ratio is None
    two = verdict(experiment, baseline=base, lion=Behaviour(finals={0: 2.0, 1: 3.0, 2: 3.0}))
    target = two.arms[0].target
    assert target is not None
    assert (target.reached, target.median_tokens, target.median_wall_s) == (1, None, None)
    running = verdict(experiment, baseline=base, lion=Behaviour(absent=(1,), stopped={2: 5}))
    target = running.arms[0].target
    assert len(known(target).tokens) == 1, "a run that is not over has not missed yet"


def test_the_verdict_is_json() -> None:
    experiment = experiment_of("lion", "wsd", "lion+wsd", SDPA, target=2.5)
    study = study_of(experiment)
    found = judge(study, records_of(study, {"lion": Behaviour(finals=dict.fromkeys(FLAT, 2e3))}))
    values = json.loads(json.dumps(found.as_json(), allow_nan=False))
    lion = values["experiments"][0]["arms"][0]
    assert lion["arm"] == "lion"
    assert lion["measures"]["perplexity"]["mean"] is None, "infinite"
    assert values["experiments"][0]["interactions"][0]["arms"] == ["lion", "wsd"]


def test_other_records_are_ignored_and_the_order_does_not_count() -> None:
    study = study_of()
    records = records_of(study, {"lion": Behaviour(effect=-0.1)})
    expected = judge(study, records)
    others = records_of(study_of(experiment_of("muon", name="other")))
    assert judge(study, dict(reversed([*records.items(), *others.items()]))) == expected
