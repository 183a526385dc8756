"""Kaplan-Meier against scipy and by hand, and misses as the targets censor them."""

from __future__ import annotations

import warnings
from random import Random

import numpy as np
import pytest
from scipy.stats import CensoredData, ecdf

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.report.pareto import Point, front
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.survival import kaplan_meier


@pytest.mark.parametrize("seed", range(6))
def test_it_is_scipys(seed: int) -> None:
    random = Random(seed)
    reached = [float(random.randint(1, 6)) for _ in range(random.randint(1, 8))]
    censored = [float(random.randint(1, 7)) for _ in range(random.randint(0, 6))]
    found = kaplan_meier(reached, censored, 0.9)
    oracle = ecdf(CensoredData(uncensored=reached, right=censored)).sf
    assert found.runs == len(reached) + len(censored)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # it has none where the share is 0
        ends = oracle.confidence_interval(0.9, method="log-log")
    for at, share, interval in zip(found.at, found.share, found.intervals, strict=True):
        assert share == pytest.approx(float(oracle.evaluate(at)))
        if interval is None:
            assert share == 0
            continue
        assert interval.low == pytest.approx(float(ends.low.evaluate(at)))
        assert interval.high == pytest.approx(float(ends.high.evaluate(at)))


def test_by_hand() -> None:
    found = kaplan_meier([2, 4, 4], [3, 5], 0.95)
    # 4 of 5 are left after 2; then 3 at risk, of which 2 get there at 4.
    assert (found.at, found.censored) == ((2, 4), (3, 5))
    assert found.share == pytest.approx((0.8, 0.8 / 3))
    assert found.median == 4
    nobody = kaplan_meier([], [5, 5], 0.95)
    assert (nobody.at, nobody.median, nobody.runs) == ((), None, 2)
    assert kaplan_meier([1, 1], [], 0.95).intervals == (None,)


def test_a_miss_is_censored_at_its_budget_and_so_is_a_run_that_diverged() -> None:
    study = study_of(experiment_of("late", "hot", target=2.5))
    behaviours = {"late": Behaviour(effect=1.0), "hot": Behaviour(diverged={1: 3})}
    late, hot = judge(study, records_of(study, behaviours)).experiments[0].arms
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
