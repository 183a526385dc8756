"""Lines with bands: what is averaged, what is left out, and the frame."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of
from tilelab.study.records.events import RunRecord
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
