"""The demo's judgement: it passes what agrees, fails what does not, says when it cannot tell."""

from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import pytest

from tilewise.lab.demo import longtable
from tilewise.lab.demo.contest import WARMUP, Arm, line_up
from tilewise.lab.demo.longtable import Cell, plain_estimate_bytes
from tilewise.lab.demo.settings import Settings
from tilewise.lab.demo.verdict import FLOAT32_SPACING, checks, final_gap, gaps, pace
from tilewise.nn import Implementation

STEPS = 30


def _arms(
    tilewise: list[float], *controls: list[float], plain: list[float] | None = None
) -> list[Arm]:
    arms = line_up(Settings(steps=STEPS))
    for arm, factors in zip(arms, [plain or [1.0] * STEPS, tilewise, *controls], strict=True):
        arm.losses = [2.0 * factor for factor in factors]
    return arms


def _flat(gap: float, steps: int = STEPS) -> list[float]:
    return [1.0 + gap] * steps


def test_the_arms_differ_in_one_thing_each() -> None:
    plain, tilewise, *controls = line_up(Settings(seed=4))
    jobs = [arm.job(Settings(), "text") for arm in (plain, tilewise, *controls)]
    assert [job.implementation for job in jobs] == ["plain", "tilewise", "plain", "plain"]
    assert [job.nudge_seed is None for job in jobs] == [True, True, False, False]
    assert jobs[2].nudge_seed != jobs[3].nudge_seed
    assert len({str(job.settings) for job in jobs}) == 1


def test_equal_losses_pass() -> None:
    assert [check.passed for check in checks(_arms(*[_flat(0.0)] * 3), STEPS)] == [True, True]


def test_an_early_gap_fails_whatever_the_controls_do() -> None:
    early = [1.0] * 7 + [1.0 + 2e-5] + [1.0] * (STEPS - 8)
    first, last = checks(_arms(early, _flat(1e-2), _flat(1e-2)), STEPS)
    assert (first.passed, last.passed) == (False, True)
    assert first.value == pytest.approx(2e-5)


def test_a_final_gap_is_judged_by_the_larger_control() -> None:
    def last(gap: float, *controls: float) -> bool | None:
        arms = _arms(*[[1.0] * 20 + [1.0 + g] * 10 for g in (gap, *controls)])
        return checks(arms, STEPS)[1].passed

    assert last(3e-4, 1e-4, 4e-4) is True
    assert last(5e-4, 1e-4, 4e-4) is False
    # Below one float32 spacing of the loss nothing can be seen, so nothing is held against it.
    assert last(0.9 * FLOAT32_SPACING, 0.0, 0.0) is True
    assert last(3 * FLOAT32_SPACING, 0.0, 0.0) is False


def test_the_final_gap_is_a_root_mean_square_over_the_last_steps() -> None:
    tilewise, plain = Arm("tilewise", "tilewise"), Arm("plain", "plain")
    plain.losses = [4.0] * 100
    tilewise.losses = [4.0] * 90 + [4.0 + 0.4, 4.0 - 0.4] * 5
    assert final_gap(tilewise, plain, 100) == pytest.approx(0.1)
    assert final_gap(tilewise, plain, 100) > final_gap(plain, plain, 100) == 0.0
    assert gaps(tilewise, plain)[-1] == pytest.approx(0.1)


def test_an_unfinished_run_is_neither_passed_nor_failed() -> None:
    arms = _arms(_flat(0.0, 6), _flat(0.0, 5), _flat(0.0, 5))
    assert [check.passed for check in checks(arms, STEPS)] == [None, None]
    arms = _arms(_flat(2e-5, 6), _flat(0.0, 5), _flat(0.0, 5))
    assert checks(arms, STEPS)[0].passed is False  # it can only get worse
    assert [check.passed for check in checks(line_up(Settings()), STEPS)] == [None, None]


def test_the_pace_leaves_the_warm_up_out() -> None:
    arm = Arm(
        "plain", "plain", wall_s=[99.0] * WARMUP + [1.0, 2.0, 4.0], cpu_s=[9.0] * WARMUP + [3.0] * 3
    )
    found = pace(arm, tokens=60)
    assert found is not None
    assert (found.wall_s, found.cpu_s, found.tokens_per_s) == (2.0, 3.0, 30.0)
    assert (found.low_s, found.high_s) == (1.0, 4.0)
    assert pace(Arm("plain", "plain", wall_s=[1.0] * WARMUP), 60) is None


def test_the_estimate_counts_matrices() -> None:
    settings = Settings(layers=3, heads=5)
    matrix = 5 * 1000 * 1000 * 4
    estimate = plain_estimate_bytes(settings, 1000, fused_peak_bytes=7)
    assert estimate == 7 + 5 * matrix + 3 * 1000 * 1000


class FakeChild:
    """Answers as a worker would, and takes memory as a fused step does."""

    asked: ClassVar[list[str]] = []

    def __init__(self, job: object, title: str) -> None:
        self.title = title

    def __enter__(self) -> FakeChild:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def hear(self) -> None:
        self.asked.append(self.title)

    def ask(self, **_: object) -> dict[str, object]:
        context = int(self.title.split()[-1].replace(",", ""))
        seconds = [40 * (context / 4096) ** 2]
        return {
            "wall_s": seconds,
            "cpu_s": seconds,
            "peak_bytes": 1000 * context,
            "saved_bytes": 1,
            "loss": 5.5,
        }


@pytest.mark.parametrize("free", [None, 10**12, 10**9])
def test_plain_runs_only_where_it_fits(monkeypatch: pytest.MonkeyPatch, free: int | None) -> None:
    monkeypatch.setattr(longtable, "Child", FakeChild)
    monkeypatch.setattr(longtable, "available_bytes", lambda: free)
    monkeypatch.setattr(FakeChild, "asked", [])
    settings = Settings(long_contexts=(2048, 4096, 8192))
    cells: list[Cell] = []
    told: list[Cell] = []
    longtable.fill(settings, 10**9, str(Path("text")), cells, told.append)
    assert cells == told
    assert len(cells) == 9
    found = {(cell.context, cell.implementation): cell for cell in cells}
    memory_reason = found[4096, "plain"].reason
    if free == 10**9:
        assert "needs 1.7 GB, 1.0 GB free" in memory_reason
        assert "plain at 4,096" not in FakeChild.asked
    else:
        assert memory_reason == ""
        assert found[4096, "plain"].wall_s == 40.0
    every: tuple[Implementation, ...] = ("plain", "sdpa", "tilewise")
    assert all("would take about 160 s" in found[8192, name].reason for name in every[1:])
    estimate = found[4096, "plain"].estimate_bytes
    assert estimate == plain_estimate_bytes(settings, 4096, 4096 * 1000)
    assert math.isclose(found[2048, "tilewise"].wall_s or 0.0, 10.0)


def test_contexts_that_the_text_is_too_short_for_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(longtable, "Child", FakeChild)
    cells: list[Cell] = []
    longtable.fill(Settings(long_contexts=(256, 4096)), 20_000, "text", cells, lambda _: None)
    assert {cell.context for cell in cells} == {256}
