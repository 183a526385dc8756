"""The gate of the suites: what is right passes, what is wrong does not, for masks and scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilelab.bench.goals import DTYPES
from tilelab.bench.steps import Budget, time_all
from tilelab.cases.variants import window
from tilelab.common.memory import too_large
from tilelab.peers import work as gate
from tilelab.peers.methods import Method, block_sparse, exact, ours, sdpa
from tilelab.peers.work import Given, Work, call_of, chunked, compare, draw, plain, sampled
from tilewise import masks, scores

WORK = Work("small", 1, 4, 2, 70, 70, 16, 16, suite="speed")
CAPPED = (lambda _: scores.softcap(2.0),)
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": ("causal",)},
    "window": {"mask": ("window_1k",)},
    "bias": {"score": ("bias_of_pairs",)},
    "padding": {"mask": ("padded",)},
    "padding and score": {"mask": ("padded",), "score": CAPPED},
    "score": {"mask": ("causal",), "score": CAPPED},
    "blind rows": {"mask": (lambda _: lambda b, h, m, n: m + n < 60,)},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("passes", ["forward", "backward", "both"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ours_passes(variant: str, passes: Any, dtype: str) -> None:
    work = replace(WORK, passes=passes, dtype=getattr(torch, dtype), **VARIANTS[variant])
    given = draw(work)
    measured = compare(work, given, ours().make(work, given))
    assert measured.complaint == ""
    assert measured.largest <= measured.allowed
    assert measured.relative < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("passes", ["forward", "backward"])
def test_long_ones_are_sampled_and_right(passes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_WHOLE", 32)
    assert [rows.start for rows in sampled(70)] == [0, 18, 36, 54]
    work = replace(WORK, passes=passes, mask=("causal",), score=CAPPED)
    given = draw(work)
    assert compare(work, given, ours().make(work, given)).complaint == ""


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (0.01, "out: largest error"),
        (float("nan"), "out: NaN in the wrong places, 1 of"),
        (float("inf"), "out: inf in the wrong places, 1 of"),
    ],
)
def test_what_is_wrong_is_found(value: float, says: str) -> None:
    given = draw(WORK)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = tilewise.attention(q, k, v).clone()
        out[-1, -1, -1, 0] += value
        return out

    assert says in compare(WORK, given, attend).complaint


def test_wrong_gradients_are_found() -> None:
    work = replace(WORK, passes="both")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = tilewise.attention(q, k, v)
        return out + (v.sum() - v.sum().detach()) * 0.01

    assert "dv" in compare(work, draw(work), attend).complaint


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "dropout"])
def test_plain_and_its_cures_agree(variant: str) -> None:
    work = replace(WORK, passes="both", **VARIANTS[variant])
    given = draw(work)
    expected = call_of(work, given, plain(work, given))()
    for again in (False, True):
        got = call_of(work, given, chunked(work, given, 32, again=again))()
        for one, other in zip(got, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_a_wrong_exact_method_is_not_timed() -> None:
    def make(work: Work, given: Given) -> Any:
        return lambda q, k, v: tilewise.attention(q, k, v) * 1.01

    methods = [ours(), Method("off", make), Method("near", make, exact=False)]
    found = {p.method: p for p in time_all(WORK, methods, Budget(1, (2, 2), 0.01))}
    assert found["off"].status == "wrong"
    assert found["off"].samples == ()
    assert "largest error" in found["off"].note
    assert len(found["tilewise"].samples) == 2
    assert found["tilewise"].error is None
    assert found["near"].error == pytest.approx(0.01, rel=0.01)
    assert len(found["near"].samples) == 2


def test_what_cannot_be_done_is_told() -> None:
    work = replace(WORK, score=CAPPED)

    def broken(work: Work, given: Given) -> Any:
        raise RuntimeError("no such kernel\nand a long story")

    methods = [sdpa("flash"), Method("broken", broken), Method("tilewise", broken)]
    points = list(time_all(work, methods, Budget(1, (2, 2), 0.01)))
    assert [(p.status, p.note) for p in points] == [
        ("skipped", "it takes no score function"),
        ("skipped", "no such kernel"),
        ("failed", "no such kernel"),
    ]


def test_what_does_not_fit_is_not_tried() -> None:
    budget = Budget(1)
    assert too_large(1e18, "cpu")
    assert not too_large(1.0, "cpu")
    budget.took(("a",), 100, 10.0)
    assert "s are left" in budget.too_long(("a",), 200)
    assert not budget.too_long(("b",), 200)
    budget.took(("a",), 100, 0.01, 100.0)
    assert budget.too_long(("a",), 200)
    budget.took(("a",), 100, 0.01)
    assert not budget.too_long(("a",), 200)


def test_only_what_needs_matrices_is_said_to() -> None:
    long = replace(WORK, queries=65536, keys=65536, mask=("causal",))
    found = {m.name: m.bytes(long) for m in exact("cpu")}
    assert {name for name, size in found.items() if not size} == {
        "tilewise", "sdpa flash", "plain, chunked", "plain, checkpointed",
    }  # fmt: skip
    assert sdpa("flash").bytes(replace(long, mask=("padded",))) > 0
    training = {m.name: m.bytes(replace(long, passes="both")) for m in exact("cpu")}
    assert training["plain"] > found["plain"] > 2 * long.matrix_bytes
    assert training["plain, chunked"] > 0 == training["plain, checkpointed"]


def test_every_method_of_a_cpu_is_exact() -> None:
    work = replace(WORK, mask=(window(5, 2),), passes="both")
    given = draw(work)
    for method in exact("cpu", with_flex=False):
        if not method.why_not(work):
            assert not compare(work, given, method.make(work, given)).complaint, method.name


def test_a_sparse_pattern_joins_the_mask() -> None:
    work = replace(WORK, mask=("padded",))
    given = draw(work)
    method = block_sparse("window", lambda n: masks.window(3, 3))
    assert not method.exact
    expected = tilewise.attention(
        *given.leaves, mask=masks.window(3, 3) & masks.lengths(torch.tensor([62]))
    )
    torch.testing.assert_close(method.make(work, given)(*given.leaves), expected)
