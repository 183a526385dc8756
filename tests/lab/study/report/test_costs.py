"""Kaplan-Meier by hand, and misses as the targets censor them."""

from __future__ import annotations

import math
from random import Random

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, judged
from tilelab.study.report.costs import Point, front, kaplan_meier


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
