"""The bench's parts: the table of cases, the gate, the clock, what follows from samples, tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tilelab.bench.goals import (
    DTYPES,
    CaseResult,
    GoalRecord,
    Memory,
    Overhead,
    Scaling,
    cases,
    key_of,
)
from tilelab.bench.tables import heading, tables
from tilelab.cases.case import Case, Goal
from tilelab.common.clock import Samples, Spread, interleave, once, plan, repeats_for
from tilelab.common.files import COMPLETE
from tilelab.common.tables import markdown, plain
from tilelab.peers.work import flops
from tilewise.errors import InvalidArgument
from tilewise.inspect import peaks

SMALL = Case("small", 2, 4, 2, 70, 70, 16, 16, goal=Goal(1.5, 0.8))
CASES = cases()
MACHINE = {
    "chip": "Chip 9",
    "slug": "chip-9",
    "family": "1",
    "model": "2",
    "cores": 2,
    "isa": "avx512_bf16",
    "system": "Linux x86_64",
    "versions": {"python": "3.11", "torch": "2.13", "tilewise": "0.1"},
    "load_average": [0.5, 1.5],
}


@pytest.mark.parametrize("isa", ["avx512_bf16", "avx512_amx", "avx2", "neon_bf16", "portable"])
def test_goals_are_those_of_the_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the table are for AVX-512 with BF16; elsewhere torch is not to be faster."""
    monkeypatch.setattr(peaks, "absence", lambda: "")
    monkeypatch.setattr(peaks, "isa", lambda: isa)
    found = [case.goal for case in cases() if case.goal is not None]
    assert len(found) == 75
    assert (set(found) == {Goal(1.0)}) == (not isa.startswith("avx512"))


def result(ours: list[float], torch_s: list[float], goal: Goal | None = SMALL.goal) -> CaseResult:
    case = replace(SMALL, goal=goal)
    return CaseResult.describing(
        case,
        "cpu",
        ours=Samples(ours, ours),
        torch=Samples(torch_s, torch_s),
        peak_flops_s=[float(f"{flops(case) / 0.9:.6g}")] * len(ours),
        repeats=[1, 1],
    )


def record() -> GoalRecord:
    return GoalRecord(
        MACHINE,
        1,
        COMPLETE,
        12.5,
        [
            result([1.0, 1.1, 0.9], [2.0, 2.2, 2.1]),
            CaseResult.describing(SMALL, "cpu", wrong="NaN", repeats=[], peak_flops_s=[]),
        ],
        [Overhead("attention", [3e-6], [2e-6], 2.0)],
        [Scaling("small", "float32", [2.0, 2.2], [1.1, 1.0], [10.0], [19.0], [2.0], [1.3], True)],
        [Memory("forward 16k D64", "float32", "ours", 9_000_000, 8_000_000)],
    )


def test_every_row_of_the_goals_is_there() -> None:
    assert len({key_of(case) for case in CASES}) == len(CASES)
    by_dtype = {dtype: [case for case in CASES if case.type_name == dtype] for dtype in DTYPES}
    assert [case.name for case in by_dtype["float32"]] == [
        case.name for case in by_dtype["bfloat16"]
    ]
    halves = {case.name for case in by_dtype["float16"]}
    assert halves == {
        case.name
        for case in CASES
        if case.name.startswith(("forward", "backward", "decode 4 rows", "decode 16 x"))
    }
    assert all(case.goal is not None for case in CASES)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [
        ((), 4096 * 4096),
        (("causal",), 4096 * 4096 / 2),
        (("window_256",), 256 * 4096 - 256 * 255 / 2),
        (("prefix_eighth",), 4096 * 4097 / 2 + 512 * 511 / 2),
    ],
)
def test_operations_are_counted_on_visible_pairs(mask: tuple[str, ...], pairs: float) -> None:
    case = Case("long", 2, 3, 3, 4096, 4096, 32, 32, mask=mask)
    assert flops(case) == 4 * 2 * 3 * 32 * pairs
    assert flops(replace(case, passes="backward")) == 2.5 * flops(case)


def test_calls_are_timed_in_turn() -> None:
    order: list[str] = []
    found = interleave(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b")},
        {"a": 2, "b": 1},
        rounds=2,
        sample=once,
        between=lambda: order.append("p"),
    )
    # Back and forth; behind "p" the repeats of the first call once untimed, for warm caches.
    assert order == ["p", "a", "a", "a", "a", "b", "p", "b", "a", "a"]
    samples = Samples.of(found["a"])
    assert len(samples.cpu_s) == len(samples.wall_s) == len(found["b"]) == 2


def test_rounds_and_repeats() -> None:
    assert repeats_for(1.0) == 1
    assert repeats_for(1e-3) == 10
    assert repeats_for(0.0) > 1
    assert repeats_for(0.0, "cuda") == 20
    rounds = [plan({"a": seconds}, 2.0, (3, 9))[1] for seconds in (10, 0.5, 0.01)]
    assert rounds == [3, 4, 9]


def test_spread() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 4.0, 5.0]) == Spread(3, 1, 5, 2, 4)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 7, 7)
    assert Spread.of([4.0, 1.0, 3.0, 2.0, 5.0]).noise == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (None, ""),
        (Goal(2.0), "yes"),
        (Goal(2.0, 0.85), "yes"),
        (Goal(3.0, 0.85), "no: ratio"),
        (Goal(2.0, 0.95), "no: peak"),
        (Goal(3.0, 0.95), "no: ratio, peak"),
    ],
)
def test_verdict(goal: Goal | None, met: str) -> None:
    assert result([1.0], [2.5], goal).met == met
    wrong = CaseResult.describing(replace(SMALL, goal=Goal(1.0)), "cpu", wrong="NaN")
    assert wrong.met == "no: wrong"


def test_scaling_is_judged_next_to_the_bare_loop() -> None:
    peaks = [10.0, 9.0], [18.0, 17.0]
    teams = [2.0, 2.1], [1.25, 1.3]
    found = Scaling("small", "float32", [2.0, 2.2], [1.2, 1.25], *peaks, *teams, True)
    assert found.ours == pytest.approx(2.0 / 2.4)
    assert found.bare_loop == pytest.approx(0.9)
    assert found.same_length == pytest.approx(0.8)
    assert found.met == "yes"
    assert replace(found, two_s=[1.3]).met == "no"
    assert replace(found, has_goal=False).met == ""


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    path = tmp_path / "chip" / "cpu.json"
    before = record()
    before.write(path)
    assert GoalRecord.read(path) == before
    values = json.loads(path.read_text())
    assert values["cases"][0]["summary"]["met"] == "yes"
    assert "summary" not in values["cases"][1]
    assert "[1.0, 1.1, 0.9]" in path.read_text()


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 99}'])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=r"--from.*format 2"):
        GoalRecord.read(path)
    with pytest.raises(InvalidArgument, match="--from"):
        GoalRecord.read(tmp_path / "absent.json")


def test_tables() -> None:
    cases, *others = tables(record())
    assert cases.rows[0] == (
        "small", "float32", "1000", "2100", "2.10x [2.00, 2.33]", "90%", "1.5x, 80%", "yes",
    )  # fmt: skip
    assert "WRONG" in cases.rows[1]
    assert "WRONG small float32: NaN" in cases.notes
    assert "Goals met: 1 of 2." in cases.notes
    assert len(others) == 3
    for each in (cases, *others):
        assert {len(row) for row in each.rows} == {len(each.head)}
        assert each.rows[0][0] in plain(each)
        assert markdown(each).count("|---") == 0  # cells are spaced, as people write them
        assert "| ---" in markdown(each)
    short, *_ = tables(record(), brief=True)
    assert short.head == ("case", "float32")
    below = result([1.0], [2.0], Goal(3.0))
    several = [
        replace(below, name=name, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for name in ("one", "two")
    ]
    short, *_ = tables(replace(record(), cases=[*record().cases, *several]), brief=True)
    assert [note.partition(":")[0] for note in short.notes if note.startswith("- ")] == [
        "- one float32", "- one bfloat16", "- two float32", "- two bfloat16"
    ]  # fmt: skip
    unfinished = replace(record(), status="stopped with Ctrl-C", memory=[])
    assert len(tables(unfinished)) == 3
    assert "stopped" in heading(unfinished)[1]
