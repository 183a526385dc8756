"""Operations, goals, and what follows from samples."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.lab.gpu_check.records import ceilings, speed_row, timed_case
from tilelab.cases.case import Case
from tilelab.cases.variants import uneven
from tilelab.gpu_check import speed
from tilelab.gpu_check.record import Goal, best, fraction, goal_for, met, rate, summary
from tilelab.gpu_check.setting import REAL, TINY, Setting
from tilelab.peers.methods import flex_mask
from tilelab.peers.work import window_pairs
from tilewise import visible_pairs

SELF_TEST = Setting(self_test=True)


@pytest.mark.parametrize(("length", "width"), [(64, 8), (64, 64), (5, 9), (1, 1), (100, 1)])
def test_pairs_of_a_window_are_counted(length: int, width: int) -> None:
    m, n = torch.arange(length)[:, None], torch.arange(length)
    assert window_pairs(length, width) == int(((n <= m) & (m - n < width)).sum())


@pytest.mark.parametrize("case", speed.cases(TINY), ids=lambda case: case.name)
def test_the_amount_is_that_of_the_visible_pairs(case: Case) -> None:
    """Causal parts count as half of their square; everything else pair by pair."""
    work = SELF_TEST.work(case, passes="forward")
    found = speed.amount(work)
    if case.kind == "decode":
        assert found == 2 * 8 * TINY.decode_keys * case.head_dim * 2  # bytes of k and v, float16
        return
    heads, batch = TINY.hidden // case.head_dim, TINY.tokens // case.keys
    m, n = torch.arange(case.keys)[:, None], torch.arange(case.keys)
    seen = flex_mask(work) if case.mask else None
    pairs = float(case.keys**2) if seen is None else float(seen(0, 0, m, n).sum())
    if seen is not None:
        shown = visible_pairs(work.drawn_mask, case.keys, case.keys)[0, 0]
        assert torch.equal(shown, seen(0, 0, m, n)), "FlexAttention is given the same mask"
    if case.kind in ("causal", "alibi", "document", "varlen"):
        pairs -= case.keys / 2  # the diagonal, half of which the convention leaves out
    assert found == 4 * pairs * batch * heads * case.head_dim
    assert speed.amount(SELF_TEST.work(case, passes="backward")) == 2.5 * found


def test_every_case_is_there_once() -> None:
    for sizes in (REAL, TINY):
        names = [case.name for case in speed.cases(sizes)]
        assert len(set(names)) == len(names)
        assert all(speed.find(sizes, name).name == name for name in names)
    kinds = {case.kind for case in speed.with_goals(REAL)}
    assert kinds == {"full", "causal", "alibi", "document", "window", "varlen", "decode", "fp8"}
    plain = [case for case in speed.cases(REAL) if case.kind in ("full", "causal")]
    assert {case.keys for case in plain} == {512, 1024, 2048, 4096, 8192, 16384}
    assert {case.head_dim for case in plain} == {64, 128, 256}
    assert len(plain) == 2 * 6 * 3


def test_documents_cover_the_length() -> None:
    ends = uneven(64)
    assert (ends[0], ends[-1]) == (0, 64)
    assert len({last - first for first, last in pairwise(ends)}) > 1


def test_goals_are_those_of_long_problems() -> None:
    assert goal_for("forward", "full", 128, 16384) == Goal(450.0)
    assert goal_for("backward", "causal", 128, 8192) == Goal(290.0, 1.0)
    assert goal_for("backward", "causal", 256, 8192) == Goal(None, 1.0)
    assert goal_for("forward", "alibi", 64, 16384) == Goal(None, 1.0)
    assert goal_for("forward", "full", 128, 4096) == Goal()
    assert goal_for("forward", "decode", 128, 32768) == Goal(3.6)


def test_rates_and_fractions() -> None:
    row = speed_row(
        timed_case("full", 128, 8192), rates={"ours": 400.0, "table": 410.0, "flex": 300.0}
    )
    ours = best(row)
    assert ours is not None
    assert ours.median == pytest.approx(410)
    assert ours.low == pytest.approx(410 * 0.98)
    assert ours.high == pytest.approx(410 * 1.02)
    assert rate(row, "cudnn") is None
    assert fraction([row, *ceilings(matrix=820.0)], row) == pytest.approx(0.5)
    assert fraction([row], row) is None
    decode = speed_row(timed_case("decode", 128, 32768), rates={"ours": 3.0})
    assert fraction(ceilings(copy=4.0), decode) == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("direction", "kind", "rates", "expected"),
    [
        ("forward", "full", {"ours": 460.0}, "yes"),
        ("forward", "full", {"ours": 440.0}, "no: rate"),
        ("backward", "full", {"ours": 330.0, "flex": 320.0}, "yes"),
        ("backward", "full", {"ours": 330.0, "flex": 340.0}, "no: flex"),
        ("backward", "full", {"ours": 310.0, "flex": 340.0}, "no: rate, flex"),
        ("backward", "full", {"ours": 330.0}, "yes"),
        ("forward", "alibi", {"ours": 330.0, "flex": 100.0}, "yes"),
        ("forward", "alibi", {"ours": 330.0}, ""),
        ("forward", "document", {"ours": 1.0, "table": 200.0, "flex": 100.0}, "yes"),
        ("forward", "full", {"flex": 100.0}, ""),
    ],
)
def test_goals_met(direction: str, kind: str, rates: dict[str, float], expected: str) -> None:
    assert met(speed_row(timed_case(kind, 128, 16384), direction, rates)) == expected


def test_the_summary_says_it_in_numbers() -> None:
    row = speed_row(timed_case("causal", 128, 16384))
    (said,) = summary([*ceilings(), row])
    assert said["name"] == "forward D128 causal 16384"
    assert said["rates"]["cudnn"].median == pytest.approx(590)
    assert said["fraction"] == pytest.approx(410 / 800)
    assert said["goal"] == {"rate": 400.0, "over_flex": None}
    assert said["met"] == "yes"
