"""What a design can detect, and the family whose error rate its comparisons share."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, known, records_of, study_of, work
from tilelab.stats.paired import critical_t, detectable, holm, pooled_spread
from tilelab.study.ask.config import Combine, Design, Experiment, Sequential, Study, change
from tilelab.study.recipes.arms import factorial
from tilelab.study.verdict.detect import Family, check_designs, families_of, plan_lines, sensitivity
from tilelab.study.verdict.judge import judge
from tilewise.errors import InvalidArgument

MANY = [f"a{at}" for at in range(16)]
FACTORS: dict[str, dict[str, Any]] = {
    "a": {"optimizer.lr": 0.002},
    "b": {"training.clip": 0.5},
    "c": {"training.label_smoothing": 0.1},
    "d": {"training.z_loss": 0.1},
}


def refusal(*experiments: Experiment) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check_designs(study_of(*experiments))
    return str(caught.value)


def test_three_seeds_and_sixteen_arms_are_refused_with_cures() -> None:
    said = refusal(experiment_of(*MANY))
    assert "the first of 16 tests needs |t| > 17" in said
    assert "Take 4 seeds" in said
    assert 'set error="pooled"' in said
    assert "compare 8 arms in all" in said
    assert "--underpowered" in said
    check_designs(study_of(experiment_of(*MANY, seeds=(0, 1, 2, 3))))
    check_designs(study_of(experiment_of(*MANY, error="pooled")))
    check_designs(study_of(experiment_of(*MANY[:8])))
    check_designs(study_of(experiment_of("lion", seeds=(0, 1))))
    check_designs(study_of(experiment_of(*MANY, seeds=(0,))))  # tests nothing, and says so


def test_a_design_is_judged_by_its_effects() -> None:
    """Four main effects, each the mean of eight pairs of runs."""
    crossed = experiment_of(*factorial(FACTORS), design=Design(factors=tuple(FACTORS)), spread=0.01)
    families = families_of(study_of(crossed))
    assert (families["optimizers"].size, families["optimizers"].interactions) == (4, 0)
    (line,) = plan_lines(study_of(crossed))
    smallest = detectable(0.01 * (2 / 16) ** 0.5, 3, 0.05 / 4, 0.8)
    assert f"detects {smallest:.2g} bits per byte" in line
    assert "the first of 4 tests needs |t| > 8.9" in line


def test_a_spread_says_what_is_detected_and_every_cure_cures() -> None:
    planned = experiment_of("lion", "wsd", "muon", spread=0.02)
    said = refusal(planned)
    found = detectable(0.02, 3, 0.05 / 3, 0.8)
    assert f"detects {found:.2g} bits per byte with power 80 %" in said
    cures: dict[str, Any] = {
        "seeds": tuple(range(int(known(re.search(r"take (\d+) seeds", said, re.IGNORECASE))[1]))),
        "smallest_effect": float(known(re.search(r"smallest_effect to ([\d.]+)", said))[1]),
    }
    for key, value in cures.items():
        check_designs(study_of(change(planned, {key: value})))
    fewer = change(planned, {"seeds": cures["seeds"][:-1]})
    refusal(fewer)
    refusal(change(planned, {"smallest_effect": 0.9 * cures["smallest_effect"]}))


def test_without_a_spread_the_effect_is_in_units_of_it() -> None:
    (line,) = plan_lines(study_of(experiment_of("lion", "wsd", smallest_effect=0.01)))
    times = detectable(1.0, 3, 0.05 / 2, 0.8)
    assert f"detects {times:.1f} times the spread of paired differences with power 80 %" in line
    said = known(re.search(r"it detects 0.01 bits per byte.* only if the spread is ([\d.]+)", line))
    assert float(said[1]) == pytest.approx(0.01 / times, rel=0.05)
    check_designs(study_of(experiment_of("lion", "wsd", smallest_effect=1e-6)))
    (line,) = plan_lines(study_of(experiment_of("lion", seeds=(0,))))
    assert line == "optimizers: One seed: nothing is tested."


def test_a_pooled_plan_says_what_own_errors_detect() -> None:
    pooled = experiment_of("lion", "wsd", "muon", error="pooled", spread=0.001)
    (line,) = plan_lines(study_of(pooled))
    one, other = (detectable(0.001, 3, 0.05 / 3, 0.8, arms) for arms in (3, 1))
    assert f"detects {one:.2g} bits per byte" in line
    own = f"needs |t| > {critical_t(3, 3, 0.05):.1f} and detects {other:.2g}."
    assert line.endswith(f"If the variances of the arms differ, it {own}")
    (line,) = plan_lines(study_of(change(pooled, {"error": "own"})))
    assert "variances" not in line


def test_spreads_of_any_size_have_a_mean() -> None:
    experiment = experiment_of("lion", "wsd")
    found = sensitivity(experiment, Family(2), [3e200, 4e200], pooled=False)
    assert found.spread == pytest.approx(5e200 / math.sqrt(2))
    spread, p_value = pooled_spread([[1e200, 2e200, 4e200], [0.0, 3e200, 1e200]])
    small = pooled_spread([[1.0, 2.0, 4.0], [0.0, 3.0, 1.0]])
    assert (spread / 1e200, p_value) == pytest.approx(small)


def test_the_verdict_says_what_could_have_been_detected() -> None:
    study = study_of(experiment_of("lion", "wsd"))
    (found,) = judge(study, records_of(study)).experiments
    seen = known(found.sensitivity)
    assert seen.comparisons == 2
    assert seen.critical_t == pytest.approx(critical_t(3, 2, 0.05))
    assert seen.detectable == detectable(known(seen.spread), 3, 0.05 / 2, 0.8)
    spreads = [
        sum((known(each.difference) - known(arm.effect)) ** 2 for each in arm.per_seed) / 2
        for arm in found.arms
    ]
    assert known(seen.spread) ** 2 == pytest.approx(sum(spreads) / 2)


def two(correction: str) -> Study:
    first = experiment_of("lion", "wsd", name="one")
    return study_of(first, experiment_of("muon", name="two")).model_copy(
        update={"correction": correction}
    )


EFFECTS = {"lion": Behaviour(effect=-0.1), "muon": Behaviour(effect=0.05)}


def test_holm_is_over_the_study_unless_it_says_otherwise() -> None:
    study = two("study")
    records = records_of(study, EFFECTS)
    one, other = judge(study, records).experiments
    arms = [*one.arms, *other.arms]
    assert [each.p_holm for each in arms] == holm([each.p_value for each in arms])
    assert known(one.sensitivity).comparisons == 3
    apart = judge(two("experiment"), records)
    assert apart.correction == "experiment"
    for each in apart.experiments:
        assert [arm.p_holm for arm in each.arms] == holm([arm.p_value for arm in each.arms])
    del records["two/muon/seed-1"]
    again = judge(study, records).experiments[0]
    expected = holm([*(each.p_value for each in one.arms), None])[:2]
    assert [each.p_holm for each in again.arms] == expected, "what is missing counts"


def test_stages_and_looks_decide_by_their_own_records() -> None:
    """Another experiment counts in the family, and never changes what is run next."""
    staged = experiment_of("a", "b", name="staged", seeds=(0, 1, 2, 3))
    staged = staged.model_copy(
        update={
            "sequential": Sequential(looks=(2, 4)),
            "arms": tuple(
                each.model_copy(update={"changes": FACTORS[each.name]}) for each in staged.arms
            ),
            "combine": Combine(seeds=(8, 9)),
        }
    )
    study = study_of(staged, experiment_of(*MANY[:4], name="other"))
    agenda = work(study, {"a": Behaviour(effect=-0.3), "b": Behaviour(effect=-0.3)})
    finished = agenda.records
    alone = {name: each for name, each in finished.items() if name.startswith("staged")}
    one, both = (judge(study, records).experiments for records in (alone, finished))
    assert one[0].arms == both[0].arms
    assert [each.experiment for each in both] == ["staged", "staged.combine", "other"]
    families = families_of(study)
    assert (families["staged"].size, families["staged.combine"].size) == (6, 2)
    look = known(both[0].arms[0].look)
    assert look.number >= 1


def test_pooled_error_is_used_where_it_may_be() -> None:
    study = study_of(experiment_of("lion", "wsd", "muon", error="pooled"))
    (found,) = judge(study, records_of(study)).experiments
    error = known(found.error)
    assert (error.kind, error.freedom) == ("pooled", 6)
    assert all(error.words in arm.reason for arm in found.arms)
    widths = {known(arm.interval).high - known(arm.interval).low for arm in found.arms}
    assert max(widths) == pytest.approx(min(widths)), "one error"
    lost = {"muon": Behaviour(diverged={1: 5})}
    (found,) = judge(study, records_of(study, lost)).experiments
    assert known(found.error) == replace(known(found.error), kind="own", freedom=None)
    assert "a run diverged or is missing" in found.arms[0].reason
    wild = {"muon": Behaviour(finals={0: 1.0, 1: 4.0, 2: 2.0})}
    study = change(
        study,
        {"experiments": [experiment_of(*MANY[:6], "muon", error="pooled").model_dump(mode="json")]},
    )
    (found,) = judge(study, records_of(study, wild)).experiments
    assert known(found.error).kind == "own"
    assert "the arms' variances differ" in found.arms[0].reason
