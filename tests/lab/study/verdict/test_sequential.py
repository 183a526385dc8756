"""Sequential seeds: the levels, the error rates by simulation, and the runs that are asked for."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from pydantic import ValidationError
from scipy import stats as oracle

from tests.lab.study.records_of import Behaviour, experiment_of, known, study_of, work
from tilelab.stats.decide import Comparison, Judged, look_by_look
from tilelab.study.ask.config import Experiment, Sequential, Study
from tilelab.study.plan import Agenda
from tilelab.study.verdict.detect import alone
from tilelab.study.verdict.judge import judge, rules_of, wanted_seeds
from tilelab.study.verdict.result import SeedResult

LOOKS = (3, 6, 9, 12)
RULE = Sequential(looks=LOOKS)


def planned(*arms: str, **fields: object) -> Experiment:
    return experiment_of(*arms, seeds=tuple(range(LOOKS[-1])), sequential=RULE, **fields)


def compared(differences: np.ndarray) -> Comparison:
    seeds = tuple(
        SeedResult(at, "done", 2 + float(each), 2.0, float(each), False)
        for at, each in enumerate(differences)
    )
    return Comparison("training", seeds)


def judged(differences: np.ndarray, smallest: float = 1.0) -> list[Judged]:
    """The decisions of an experiment whose arms (rows) have these differences by seed."""
    arms = [f"a{at}" for at in range(len(differences))]
    rules = rules_of(planned(*arms, smallest_effect=smallest), len(arms))
    levels = RULE.levels(rules.alpha)
    return look_by_look([compared(row) for row in differences], rules, LOOKS, levels)


def test_the_levels_add_up_to_alpha() -> None:
    levels = RULE.levels(0.05)
    assert levels == pytest.approx([0.05 * each / 16 for each in (1, 3, 5, 7)])
    for rho in (1.0, 3.0):
        assert sum(Sequential(looks=(2, 5, 8), rho=rho).levels(0.05)) == pytest.approx(0.05)
    assert Sequential(looks=(3, 6), rho=1.0).levels(0.1) == pytest.approx((0.05, 0.05))


def rate(drawn: int, shift: tuple[float, ...], smallest: float, labels: set[str]) -> float:
    """How often any arm of an experiment has one of the labels."""
    random = np.random.default_rng(5)
    hits = 0
    for _ in range(drawn):
        shared = random.normal(size=LOOKS[-1])  # the baseline's own noise: arms are not independent
        rows = random.normal(size=(len(shift), LOOKS[-1])) + shared + np.array(shift)[:, None]
        hits += any(each.decision.label in labels for each in judged(rows, smallest))
    return hits / drawn


@pytest.mark.thorough
def test_no_more_than_alpha_is_found_where_there_is_nothing() -> None:
    """At most 5 % of the experiments are wrong, up to three standard errors."""
    one, three = (0.05 + 3 * (0.05 * 0.95 / drawn) ** 0.5 for drawn in (800, 400))
    # A smallest effect next to nothing: equivalence never ends a comparison early.
    assert 0.01 < rate(800, (0.0,), 1e-9, {"better", "worse"}) < one
    assert 0.01 < rate(400, (0.0, 0.0, 0.0), 1e-9, {"better", "worse"}) < three


def test_a_difference_at_the_margin_is_seldom_called_none() -> None:
    limit = 0.05 + 3 * (0.05 * 0.95 / 600) ** 0.5
    assert rate(600, (2.0,), 2.0, {"no difference"}) < limit


def test_the_interval_is_at_the_level_of_the_look() -> None:
    row = np.random.default_rng(7).normal(-2, 1, size=LOOKS[-1])
    (only,) = judged(row[None], smallest=0.5)
    assert only.look is not None
    assert only.look.level == pytest.approx(RULE.levels(0.05)[only.look.number - 1])
    seen = row[: LOOKS[only.look.number - 1]]
    ends = oracle.ttest_1samp(seen, 0).confidence_interval(1 - only.look.level)
    assert only.test.paired.interval is not None
    assert only.test.paired.interval.low == pytest.approx(ends.low)
    assert only.test.paired.interval.high == pytest.approx(ends.high)


def test_an_arm_that_was_found_leaves_its_level_to_the_others() -> None:
    """The second arm's p-value is between the third and the half of the level of its look."""
    clear = np.array([-9.0, -9.01, -9.02] * 4)
    random = np.random.default_rng(8)
    for _ in range(2000):
        row = random.normal(-0.8, 1, size=12)
        p = [oracle.ttest_1samp(row[:count], 0).pvalue for count in LOOKS]
        levels = RULE.levels(0.05)
        early = any(each <= level for each, level in zip(p[:3], levels[:3], strict=True))
        if not early and levels[3] / 2 < p[3] <= levels[3]:
            break
    first, second = judged(np.array([clear, row]), smallest=0.01)
    assert (first.decision.label, len(first.compared.seeds)) == ("better", 3)
    assert second.decision.label == "better"
    (nothing, _) = judged(np.array([row, np.zeros(12) + random.normal(0, 5, 12)]), smallest=0.01)
    assert nothing.decision.label == "undecided"


BEHAVIOURS = {
    "clear": Behaviour(effect=-0.2, noise=0.004),
    "same": Behaviour(effect=0.0, noise=0.004),
    "noisy": Behaviour(effect=-0.03, noise=0.06),
    "hot": Behaviour(diverged={1: 5}),
}


def study(**fields: object) -> Study:
    return study_of(planned(*BEHAVIOURS, **fields))


def test_arms_that_are_decided_get_no_further_seeds() -> None:
    agenda = work(study(), BEHAVIOURS)
    (verdict,) = judge(study(), agenda.records).experiments
    arms = {each.arm: each for each in verdict.arms}
    assert arms["clear"].label == "better"
    assert arms["same"].label == "no difference"
    assert arms["hot"].label == "diverged"
    assert arms["noisy"].label == "undecided"
    assert {name: len(each.per_seed) for name, each in arms.items()} == {
        "clear": 3, "same": len(arms["same"].per_seed), "noisy": 12, "hot": 3,
    }  # fmt: skip
    assert len(arms["same"].per_seed) < 12
    assert known(arms["noisy"].look).number == 4
    assert "Look 1 of 4, 3 seeds, level 0.0031." in arms["clear"].reason
    assert verdict.baseline.n == 12
    runs = {name.split("/")[1] for name in agenda.records if name.endswith("seed-11")}
    assert runs == {"baseline", "noisy"}
    assert agenda.finished
    assert judge(study(), agenda.records).complete


@pytest.mark.parametrize("stop", [1, 13, 16, 30])
def test_it_goes_on_after_any_stop_with_the_same_runs(stop: int) -> None:
    whole = work(study(), BEHAVIOURS)
    before = work(study(), BEHAVIOURS, most=stop)
    after = work(study(), BEHAVIOURS, before.records, order=Random(stop))
    assert after.records == whole.records
    assert judge(study(), after.records) == judge(study(), whole.records)


def test_a_look_is_not_taken_before_all_its_seeds_are_there() -> None:
    agenda = work(study(), BEHAVIOURS, most=13)
    (verdict,) = judge(study(), agenda.records).experiments
    open_arms = [each for each in verdict.arms if each.label != "diverged"]
    assert {each.label for each in open_arms} == {"incomplete"}
    assert all("Look 1 of 4" in each.reason for each in open_arms)
    assert all(each.p_holm is None for each in open_arms)
    assert {
        len(each)
        for each in wanted_seeds(
            study().experiments[0], agenda.records, alone(study().experiments[0])
        ).values()
    } == {3}
    assert not agenda.finished


def test_what_ran_beyond_a_look_is_not_looked_at() -> None:
    experiment = planned(*BEHAVIOURS)
    records = work(study(), BEHAVIOURS).records
    more = {
        **work(study_of(experiment_of(*BEHAVIOURS, seeds=experiment.seeds)), BEHAVIOURS).records
    }
    assert len(more) > len(records)
    assert judge(study(), more) == judge(study(), records)


def test_at_most_is_expected() -> None:
    agenda = Agenda(study(), {})
    assert agenda.total == 5 * 12
    assert len(agenda.ready()) == 5 * 3


def test_a_baseline_that_diverged_ends_it() -> None:
    behaviours = {"baseline": Behaviour(diverged={2: 4})}
    agenda = work(study(), behaviours)
    assert {record.start.seed for record in agenda.records.values()} == {0, 1, 2}
    (verdict,) = judge(study(), agenda.records).experiments
    assert {each.label for each in verdict.arms} == {"undecided"}


@pytest.mark.parametrize("looks", [(1, 12), (3, 3, 12), (6, 3, 12), (3, 6), (3, 24)])
def test_looks_that_do_not_fit_are_refused(looks: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=r"sequential\.looks"):
        experiment_of("lion", seeds=tuple(range(12)), sequential=Sequential(looks=looks))


def test_effects_of_a_design_need_every_run() -> None:
    with pytest.raises(ValidationError, match="a design and sequential"):
        planned("a", "b", "a+b", design={"factors": ("a", "b")})


def test_a_difference_is_found_with_fewer_seeds_than_all() -> None:
    """Two standard deviations of the differences: nearly always, after half of the seeds."""
    random = np.random.default_rng(6)
    found, seeds = 0, 0
    for _ in range(400):
        (only,) = judged(random.normal(-2, 1, size=(1, LOOKS[-1])), smallest=0.5)
        found += only.decision.label == "better"
        seeds += len(only.compared.seeds)
    assert found / 400 > 0.99
    assert seeds / 400 < 7
    # One standard deviation: a test of all twelve seeds at once would find 88 %.
    power = sum(
        judged(random.normal(-1, 1, size=(1, LOOKS[-1])), 0.1)[0].decision.label == "better"
        for _ in range(400)
    )
    assert power / 400 > 0.7
