"""Schedules: their ends, their forms, and that they stay in [0, 1]."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilelab.study.ask.config import RunConfig, Schedule, change
from tilelab.study.ask.values import names
from tilelab.study.choices.schedules import factor
from tilewise.errors import InvalidArgument

NAMES = names("schedule")
WARMUPS = st.floats(0.0, 0.79)
STEPS = st.integers(1, 200)


def rates(name: str, steps: int, **options: Any) -> list[float]:
    schedule = Schedule.model_validate({"name": name, **options})
    return [factor(schedule, step, steps) for step in range(steps)]


@given(st.sampled_from(NAMES), STEPS, WARMUPS)
def test_every_factor_is_a_share_and_the_full_rate_is_reached_once_warm(
    name: str, steps: int, warmup: float
) -> None:
    values = rates(name, steps, warmup=warmup)
    ramp = min(round(warmup * steps), steps - 1)
    assert all(0.0 <= value <= 1.0 for value in values)
    assert values[ramp] == 1.0
    assert values[: ramp + 1] == sorted(values[: ramp + 1])
    assert values[ramp:] == sorted(values[ramp:], reverse=True)


@given(st.sampled_from([name for name in NAMES if name != "one-cycle"]), STEPS, WARMUPS)
def test_warmup_is_a_straight_line_that_wastes_no_step(
    name: str, steps: int, warmup: float
) -> None:
    ramp = min(round(warmup * steps), steps - 1)
    expected = [(step + 1) / (ramp + 1) for step in range(ramp)]
    assert rates(name, steps, warmup=warmup)[:ramp] == expected


def test_linear_goes_down_in_equal_parts_to_zero_after_the_last_step() -> None:
    assert rates("linear", 5, warmup=0.0) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    assert rates("linear", 10, warmup=0.2) == pytest.approx(
        [1 / 3, 2 / 3, *(1 - k / 8 for k in range(8))]
    )


def test_cosine_is_halfway_in_the_middle_and_ends_at_its_floor() -> None:
    values = rates("cosine", 1000, warmup=0.0, floor=0.2)
    assert values[500] == pytest.approx(0.6)
    assert values[250] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert 0.2 < values[-1] < 0.2 + 1e-4


@given(STEPS, WARMUPS, st.sampled_from(["sqrt", "linear"]))
def test_wsd_is_flat_and_then_decays(steps: int, warmup: float, shape: str) -> None:
    values = rates("wsd", steps, warmup=warmup, decay=0.2, shape=shape)
    ramp = min(round(warmup * steps), steps - 1)
    decay = min(round(0.2 * steps), steps - ramp)
    assert set(values[ramp : steps - decay]) <= {1.0}
    assert set(rates("constant", steps, warmup=warmup)[ramp:]) == {1.0}
    tail = [k / decay for k in range(decay)]
    expected = [1.0 - (math.sqrt(y) if shape == "sqrt" else y) for y in tail]
    assert values[steps - decay :] == pytest.approx(expected)


@given(st.sampled_from(["constant", "linear", "cosine"]), STEPS, st.integers(1, 250))
def test_a_warmup_of_steps_is_that_of_the_share_that_gives_as_many(
    name: str, steps: int, ramp: int
) -> None:
    share = min(ramp, steps - 1) / steps
    assert rates(name, steps, warmup_steps=ramp, warmup=0.7) == rates(name, steps, warmup=share)


def test_runs_of_different_lengths_share_their_trunk() -> None:
    short, long = (rates("wsd", steps, warmup_steps=10, decay=0.25) for steps in (40, 400))
    assert short[:30] == long[:30]
    for name in ("constant", "linear", "cosine"):
        short, long = (rates(name, steps, warmup_steps=10) for steps in (11, 400))
        assert short[:11] == long[:11]
    # A decay does not begin before the warm-up ends, however long that is.
    values = rates("wsd", 20, warmup_steps=12, decay=0.9, shape="linear")
    assert values == [(t + 1) / 13 for t in range(12)] + [1.0 - y / 8 for y in range(8)]


def test_inverse_sqrt_halves_when_the_steps_are_four_times_as_many() -> None:
    values = rates("inverse-sqrt", 100, warmup=0.09)
    assert values[9] == 1.0
    assert values[39] == pytest.approx(0.5)
    assert rates("inverse-sqrt", 9, warmup=0.0)[8] == pytest.approx(1 / 3)


def test_one_cycle_starts_and_ends_low() -> None:
    values = rates("one-cycle", 1000, warmup=0.25, start=0.1, end=0.02)
    assert values[0] == pytest.approx(0.1)
    assert values[125] == pytest.approx(0.55)
    assert values[250] == 1.0
    assert values[625] == pytest.approx(0.51)
    assert values[-1] == pytest.approx(0.02, abs=1e-4)


@pytest.mark.parametrize(("step", "steps"), [(-1, 5), (5, 5), (0, 0)])
def test_a_step_outside_the_run_is_refused(step: int, steps: int) -> None:
    with pytest.raises(InvalidArgument, match="step"):
        factor(Schedule(name="linear"), step, steps)


def test_warmup_and_decay_fit_into_the_run() -> None:
    wsd = {"name": "wsd", "warmup": 0.5, "decay": 0.6}
    with pytest.raises(InvalidArgument, match=r"schedule\.decay: got 0\.6 with warmup 0\.5"):
        change(RunConfig(), {"schedule": wsd})
    with pytest.raises(InvalidArgument, match=r"schedule\.shape: got 'cube'"):
        change(RunConfig(), {"schedule": {"name": "wsd", "shape": "cube"}})
