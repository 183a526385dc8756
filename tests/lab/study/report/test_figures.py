"""Figures: what lines average and leave out, Kaplan-Meier by hand, and the front."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, judged, records_of, study_of
from tilelab.study.records.events import RunRecord
from tilelab.study.report.costs import Point, front, kaplan_meier
from tilelab.study.report.lines import Series, curve, difference, loss_chart


def _arms(**behaviours: Behaviour) -> dict[str, dict[int, RunRecord]]:
    """Arm -> seed -> record, of an experiment with the arm ``lion``."""
    records = records_of(study_of(experiment_of("lion")), behaviours)
    return {
        arm: {
            seed: record
            for seed in (0, 1, 2)
            if (record := records.get(f"optimizers/{arm}/seed-{seed}")) is not None
        }
        for arm in ("baseline", "lion")
    }


def test_a_curve_is_the_mean_and_the_outermost_seeds() -> None:
    finals = {0: 2.0, 1: 2.3, 2: 2.9}
    runs = _arms(lion=Behaviour(finals=finals))["lion"]
    found = curve("lion", 1, runs, "bits_per_byte", "tokens")
    assert found.x == (0.0, 2560.0, 5120.0, 7680.0, 10240.0)
    assert (found.mean[-1], found.low[-1], found.high[-1]) == pytest.approx((2.4, 2.0, 2.9))
    assert (found.seeds, found.broken, found.place) == (3, False, 1)
    by_loss = curve("lion", 1, runs, "loss", "time")
    assert by_loss.mean[-1] == pytest.approx(2.4 * 0.6931472)
    assert by_loss.x[-1] == pytest.approx(0.05 * (40 + 6))  # the first steps are slower


def test_a_difference_is_paired_by_seed() -> None:
    arms = _arms(
        lion=Behaviour(finals={0: 2.0, 1: 2.3, 2: 2.9}),
        baseline=Behaviour(finals={0: 2.1, 1: 2.5, 2: 2.8}),
    )
    found = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    ends = (found.mean[-1], found.low[-1], found.high[-1])
    assert ends == pytest.approx((-0.2 / 3, -0.2, 0.1))
    assert found.mean[0] == pytest.approx(0.0, abs=1e-12)  # the same weights


def test_runs_that_are_behind_do_not_cut_the_line_off() -> None:
    arms = _arms(lion=Behaviour(stopped={0: 12, 1: 0}))
    found = curve("lion", 1, arms["lion"], "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds) == (10240.0, 1)
    pair = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (pair.x[-1], pair.seeds) == (10240.0, 1)
    begun = _arms(lion=Behaviour(stopped={0: 12, 1: 25, 2: 25}))["lion"]
    found = curve("lion", 1, begun, "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds) == (5120.0, 2)


def test_a_run_that_diverged_is_never_left_out() -> None:
    arms = _arms(lion=Behaviour(diverged={1: 22}))
    found = curve("lion", 1, arms["lion"], "bits_per_byte", "tokens")
    assert (found.x[-1], found.seeds, found.broken) == (5120.0, 3, True)
    pair = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (pair.x[-1], pair.seeds, pair.broken) == (5120.0, 3, True)


def test_nothing_is_nothing() -> None:
    assert curve("lion", 1, {}, "loss", "time").x == ()
    assert curve("lion", 1, {0: RunRecord()}, "loss", "time").x == ()
    assert difference("lion", 1, {}, _arms()["baseline"], "loss").x == ()


def test_arms_of_other_tokens_a_step_are_compared_at_the_same_steps() -> None:
    arms = _arms(
        lion=Behaviour(finals={0: 2.0, 1: 2.3, 2: 2.9}),
        baseline=Behaviour(finals={0: 2.1, 1: 2.5, 2: 2.8}),
    )
    same = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    for seed, record in arms["lion"].items():  # it pads, and no seed as much as another
        record.evaluations = [
            replace(each, tokens=each.tokens * (7 - seed) // 10) for each in record.evaluations
        ]
    found = difference("lion", 1, arms["lion"], arms["baseline"], "bits_per_byte")
    assert (found.mean, found.low, found.seeds) == (same.mean, same.low, 3)
    assert found.x == pytest.approx([0.6 * each for each in same.x], abs=1)


@pytest.mark.parametrize("loss", [5.5, 0.0])
def test_losses_that_are_all_one_number_have_a_frame(loss: float) -> None:
    same = (loss, loss)
    series = Series("baseline", 0, (0.0, 10.0), same, same, same, 1, broken=False)
    assert loss_chart([series], "tokens", "bits_per_byte", "curve") is not None


def test_the_names_of_sixteen_arms_do_not_touch() -> None:
    ends = (1.0, 1.001, 1.002)  # all at one height
    drawn = [
        Series(f"arm-{place}", place, (0.0, 10.0), *((5.0, ends[place % 3]),) * 3, 1, False)
        for place in range(16)
    ]
    chart = loss_chart(drawn, "tokens", "bits_per_byte", "curve")
    assert chart is not None
    names = re.findall(r'<text[^>]*y="([\d.]+)"[^>]*>arm-\d+<', chart.svg)
    heights = sorted(map(float, names))
    assert len(heights) == 16
    assert min(b - a for a, b in pairwise(heights)) > 18.5  # a line is 16


@pytest.mark.parametrize("seed", range(6))
def test_it_is_the_product_of_the_shares_that_are_left(seed: int) -> None:
    random = Random(seed)
    reached = [float(random.randint(1, 6)) for _ in range(random.randint(1, 8))]
    censored = [float(random.randint(1, 7)) for _ in range(random.randint(0, 6))]
    found = kaplan_meier(reached, censored, 0.9)
    assert found.at == tuple(sorted(set(reached)))
    share, variance = 1.0, 0.0
    for at, seen, interval in zip(found.at, found.share, found.intervals, strict=True):
        there = sum(each >= at for each in (*reached, *censored))
        share *= 1 - reached.count(at) / there
        assert seen == pytest.approx(share)
        if share == 0:
            assert interval is None
            continue
        variance += reached.count(at) / (there * (there - reached.count(at)))
        half = 1.6448536 * math.sqrt(variance) / abs(math.log(share))
        assert interval is not None
        ends = (share ** math.exp(half), share ** math.exp(-half))
        assert (interval.low, interval.high) == pytest.approx(ends)


def test_by_hand() -> None:
    found = kaplan_meier([2, 4, 4], [3, 5], 0.95)
    # 4 of 5 are left after 2; then 3 at risk, of which 2 get there at 4.
    assert (found.at, found.censored) == ((2, 4), (3, 5))
    assert found.share == pytest.approx((0.8, 0.8 / 3))
    assert found.median == 4
    nobody = kaplan_meier([], [5, 5], 0.95)
    assert (nobody.at, nobody.median, nobody.censored) == ((), None, (5, 5))
    assert kaplan_meier([1, 1], [], 0.95).intervals == (None,)


def test_a_miss_is_censored_at_its_budget_and_so_is_a_run_that_diverged() -> None:
    behaviours = {"late": Behaviour(effect=1.0), "hot": Behaviour(diverged={1: 3})}
    late, hot = judged(experiment_of("late", "hot", target=2.5), behaviours).arms
    assert late.target is not None
    assert late.target.censored == (40 * 256,) * 3
    assert hot.target is not None
    assert (hot.target.reached, hot.target.censored) == (2, (40 * 256,))


def test_the_front_is_what_nothing_beats_in_both() -> None:
    rows = {"cheap": (1, 5), "dear": (9, 1), "middle": (4, 3), "beaten": (5, 3), "equal": (4, 4)}
    points = [
        Point(name, at, float(cost), float(rank), float(rank))
        for at, (name, (cost, rank)) in enumerate(rows.items())
    ]
    best = [each.arm for each in front(points)]
    assert best == ["cheap", "middle", "dear"]
    for each in points:
        beaten = any(
            one.cost <= each.cost and one.rank <= each.rank and one != each for one in points
        )
        assert (each.arm in best) == (not beaten)
