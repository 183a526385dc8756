"""The rule of exactness on a device, and the accuracy step itself, on the reference backend."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilelab.cases.case import Case
from tilelab.cases.inputs import build
from tilelab.cases.table import find, rows
from tilelab.common.exactness import judge
from tilelab.gpu_check import accuracy, speed
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting, refer, sized
from tilelab.peers.methods import Method
from tilelab.peers.work import Attend, Given, Work
from tilewise.reference.philox import keep_mask

PROBLEMS = rows("accuracy")
TILED = Setting("tiled", self_test=True)


def test_wrong_shapes_nan_and_infinities_fail() -> None:
    truth = torch.tensor([1.0, -math.inf, 2.0], dtype=torch.float64)
    good = truth.float()
    assert judge(good, good, truth).passes
    for bad, word in (
        (good[:2], "shape"),
        (torch.tensor([1.0, math.nan, 2.0]), "NaN"),
        (torch.tensor([1.0, -math.inf, math.inf]), "inf"),
        (torch.tensor([1.0, 3.0, 2.0]), "-inf"),
    ):
        verdict = judge(bad, good, truth)
        assert not verdict.passes
        assert word in verdict.complaint
    nothing = torch.empty(0, 3)
    assert judge(nothing, nothing, nothing.double()).passes


def test_problems_are_many_and_named_once() -> None:
    names = [case.name for case in PROBLEMS]
    assert len(set(names)) == len(names) > 40
    assert {case.head_dim for case in PROBLEMS} >= {64, 128, 256, 80, 3, 192}
    real = [accuracy.long_case(Setting(), case.name) for case in rows("long")]
    assert {(case.queries, case.keys, case.head_dim) for case in real} == {(16384, 16384, 128)}
    tiny = [sized(TILED, case) for case in PROBLEMS]
    assert max(max(case.queries, case.keys) for case in tiny) <= 97


@pytest.mark.parametrize("case", PROBLEMS, ids=lambda case: case.name)
def test_the_reference_backend_is_exact(case: Case) -> None:
    """Every problem can be built, referred to and judged."""
    small = sized(TILED, case).of(torch.float32 if case.every_dtype else torch.float16)
    rows = list(accuracy.check(TILED, "accuracy", case.name, small))
    assert [row.status for row in rows] == ["ok", "ok"], rows
    assert rows[1].name == f"{case.name}, gradients"
    leaves = build(small).leaves
    assert set(rows[1].values["ratios"]) == {f"grad of {name}" for name in leaves}


def test_inputs_are_the_same_every_time() -> None:
    case = sized(TILED, find("accuracy", "everything")).of(torch.float16)
    first, second = (build(case) for _ in range(2))
    assert torch.equal(first.q, second.q)
    assert first.leaves.keys() == second.leaves.keys()
    for name, leaf in first.leaves.items():
        assert torch.equal(leaf, second.leaves[name])


def test_the_oracle_is_float64_and_the_plain_one_is_not() -> None:
    inputs = build(sized(TILED, find("accuracy", "causal D64")).of(torch.float16))
    assert refer(inputs, torch.float64)["out"].dtype == torch.float64
    assert refer(inputs, torch.float16)["out"].dtype == torch.float16


def _changed(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Make every output of a call of ours larger by a little."""
    call = tilewise.attention

    def attention(*arguments: Tensor, **keywords: object) -> object:
        found = call(*arguments, **keywords)  # type: ignore[arg-type]
        if isinstance(found, Tensor):
            return found * factor
        return found._replace(out=found.out * factor)

    monkeypatch.setattr(tilewise, "attention", attention)


def test_a_wrong_result_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _changed(monkeypatch, 1.02)
    case = sized(TILED, find("accuracy", "full D64"))
    forward, backward = accuracy.check(TILED, "accuracy", "x", case)
    assert forward.status == backward.status == "wrong"
    assert "out: " in forward.note
    assert "grad of v: " in backward.note


def test_other_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter(range(100))
    call = tilewise.attention

    def attention(*arguments: Tensor, **keywords: object) -> object:
        found = call(*arguments, **keywords)  # type: ignore[arg-type]
        return found._replace(lse=found.lse * (1 + 2e-7 * next(turns)))

    monkeypatch.setattr(tilewise, "attention", attention)
    case = sized(TILED, find("accuracy", "full D64")).of(torch.float16)
    forward, _ = accuracy.check(TILED, "accuracy", "x", case)
    assert forward.status == "wrong"
    assert "lse differs when it is done again" in forward.note
    assert not forward.values["same_bits"]


def test_pages_are_held_to_the_rule_and_to_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(accuracy.run(TILED, "pages"))
    assert [row.status for row in rows] == ["ok"] * 6, rows
    assert rows[0].name == "pages of 16, varlen"
    assert rows[-1].name == "pages of 128, few rows"
    call = tilewise.attention_paged

    def attention_paged(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **keywords: Any) -> Any:
        """One that reads a row too many."""
        table, lengths, starts = rest
        return call(q, k.nan_to_num(), v, table.clamp(min=0), lengths + 1, starts, **keywords)

    monkeypatch.setattr(tilewise, "attention_paged", attention_paged)
    assert {row.status for row in accuracy.run(TILED, "pages")} == {"wrong"}


def test_another_generator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.status for row in accuracy.run(TILED, "dropout bits")] == ["ok", "ok"]

    def shifted(seed: int, p: float, **ranges: range) -> Tensor:
        return keep_mask(seed + 1, p, **ranges)

    monkeypatch.setattr("tilelab.gpu_check.accuracy.keep_mask", shifted)
    rows = list(accuracy.run(TILED, "dropout bits"))
    assert [row.status for row in rows] == ["wrong", "wrong"]


def test_statistics_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = accuracy.run(TILED, "statistics")
    assert row.status == "ok"
    assert set(row.values["ratios"]) == {"max_logit", "entropy", "score of top1"}
    call = tilewise.attention

    def attention(*arguments: Tensor, **keywords: object) -> object:
        found = call(*arguments, **keywords)  # type: ignore[arg-type]
        top1 = (found.stats.top1 + 1) % arguments[1].shape[2]
        return found._replace(stats=found.stats._replace(top1=top1))

    monkeypatch.setattr(tilewise, "attention", attention)
    (row,) = accuracy.run(TILED, "statistics")
    assert row.status == "wrong"
    assert row.note.startswith("score of top1")


@pytest.mark.parametrize("kind", ["full", "causal", "alibi", "document", "window", "varlen"])
def test_a_wrong_case_is_not_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled rows of the output and the gradients from them are held to the rule."""
    name = next(case.name for case in speed.with_goals(TILED.sizes) if case.kind == kind)
    assert [row.status for row in speed.measure("speed", TILED, name)] == ["ok", "ok"]
    ours = speed.ours

    def wrong(case: Case) -> dict[str, Method]:
        def larger(method: Method) -> Method:
            def make(work: Work, given: Given) -> Attend:
                attend = method.make(work, given)
                return lambda q, k, v: 1.05 * attend(q, k, v)

            return replace(method, make=make)

        return {name: larger(method) for name, method in ours(case).items()}

    monkeypatch.setattr(speed, "ours", wrong)
    rows: list[Row] = list(speed.measure("speed", TILED, name))
    assert [row.status for row in rows] == ["wrong", "wrong"]
    assert "out: " in rows[0].note
    assert "dq: " in rows[1].note
    assert "dv: " in rows[1].note
    for row in rows:
        assert not set(row.values["samples_s"]) & {"ours", "table"}
    assert "flex" in rows[0].values["samples_s"], "the others are timed all the same"


def test_long_and_huge_problems_pass_on_the_reference() -> None:
    for job in ("causal", "past 2^31 elements"):
        assert {row.status for row in accuracy.run_long(TILED, job)} == {"ok"}
