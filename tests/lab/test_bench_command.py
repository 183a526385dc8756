"""The ``tilewise bench`` command and its child processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilelab.bench import children, command, main, me
from tilelab.bench.goals import SCALING_GOAL, GoalRecord, Scaling, cases, key_of, measure
from tilelab.cases.case import Pass
from tilelab.common.worker import Child
from tilelab.peers.work import Measured
from tilewise import cli
from tilewise.errors import TilewiseError, Unsupported
from tilewise.inspect import peaks
from tilewise.kernels.cpu import absence

needs_core = pytest.mark.skipif(absence() is not None, reason="the compiled core is not built")
Stored = Callable[..., str]
SCALED = Scaling("short 33", "float32", [2.0], [1.0], [1.0], [2.0], [2.0], [1.0], True)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one short case, measured."""
    path = tmp_path_factory.mktemp("bench") / "cpu.json"
    code = main(
        ["cpu", "--cases", "short 33", "--dtype", "float32", "--rounds", "3", "--json", str(path)]
    )
    assert code == 0
    values: dict[str, Any] = json.loads(path.read_text())
    return values


@pytest.fixture
def stored(measured: dict[str, Any], tmp_path: Path) -> Stored:
    """Writes the measured JSON with changes, and gives its path."""

    def store(**changes: Any) -> str:
        path = tmp_path / "changed.json"
        path.write_text(json.dumps({**measured, **changes}))
        return str(path)

    return store


@needs_core
def test_a_measured_case(measured: dict[str, Any]) -> None:
    (case,) = measured["cases"]
    assert case["name"] == "short 33"
    assert case["clock"] == "cpu"
    assert measured["status"] == "complete"
    for side in ("ours", "torch"):
        assert len(case[side]["cpu_s"]) == len(case[side]["wall_s"]) == 3
        assert min(case[side]["cpu_s"]) > 0
    assert 0 < case["summary"]["peak_fraction"] < 1.1
    assert case["summary"]["ratio_range"][0] <= case["summary"]["ratio_range"][1]


@needs_core
def test_the_record_names_the_machine_but_not_the_host(measured: dict[str, Any]) -> None:
    machine = measured["machine"]
    assert machine["isa"] == peaks.isa()
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["slug"] == machine["slug"].lower()
    assert "/" not in machine["slug"]
    assert str(Path.home()) not in json.dumps(measured)
    assert str(Path.cwd()) not in json.dumps(measured)


@needs_core
def test_a_stored_run_is_printed(stored: Stored, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", stored()]) == 0
    text = capsys.readouterr().out
    assert "short 33" in text
    assert "% of peak" in text
    assert main(["--from", stored(), "--markdown"]) == 0
    assert "| short 33 | float32 |" in capsys.readouterr().out
    assert main(["--from", stored(), "--markdown", "--brief"]) == 0
    assert "| case | float32 |" in capsys.readouterr().out


@needs_core
def test_check(
    stored: Stored, measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = {**measured["machine"], "isa": "avx512"}
    assert main(["--from", stored(machine=machine), "--check", "0.001"]) == 0
    assert "at least 0.001x" in capsys.readouterr().out
    assert main(["--from", stored(machine=machine), "--check", "1000"]) == 1
    assert "below 1000x" in capsys.readouterr().out
    other = stored(machine={**machine, "isa": "avx2"})
    assert main(["--from", other, "--check", "1000"]) == 0
    assert "not checked" in capsys.readouterr().out


@needs_core
def test_a_wrong_case_is_not_timed_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Measured("out: largest error 1", 1.0, 0.1, 1.0)
    monkeypatch.setattr("tilelab.bench.goals.compare", lambda *_: wrong)
    assert main(["--cases", "short 33", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert "WRONG short 33 float32: out: largest error 1" in text
    assert "Goals met: 0 of 1" in text


@needs_core
def test_ctrl_c_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:

    begun: list[Any] = []

    def interrupted(case: Any, *rest: Any) -> Any:
        begun.append(case)
        if len(begun) > 1:
            raise KeyboardInterrupt
        return measure(case, *rest)

    monkeypatch.setattr(command, "measure", interrupted)
    path = tmp_path / "cpu.json"
    options = ["--cases", "short", "--dtype", "float32", "--rounds", "1", "--json", str(path)]
    assert cli.main(["bench", *options]) == 130
    assert "stopped with Ctrl-C" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["cases"]) == 1


@needs_core
def test_a_failure_late_keeps_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object) -> Any:
        raise TilewiseError(f"the memory process failed in {tmp_path}")

    monkeypatch.chdir(tmp_path)
    short = [case for case in cases() if key_of(case) == "short 33 float32"]
    monkeypatch.setattr(command, "cases", lambda: short)
    monkeypatch.setattr("tilelab.bench.children.memory", broken)
    monkeypatch.setattr("tilelab.bench.children.scaling", lambda *_: SCALED)
    assert main([]) == 1
    said = capsys.readouterr()
    assert "memory process failed" in said.err
    assert "a step failed" in said.out
    assert "held plan" in said.out
    (path,) = (tmp_path / "benchmarks").glob("*/cpu-partial.json")
    assert str(tmp_path) not in path.read_text()
    values = json.loads(path.read_text())
    judged = [each["met"] for each in values["scaling"]]
    assert judged == (["yes"] if values["machine"]["cores"] > 1 else [])


def test_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--cases", "no such case"], ["--rounds", "0"], ["gpu"], ["--dtype", "int8"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
    assert "no case of cpu matches" in capsys.readouterr().err


def test_without_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "absence", lambda: "it is not built")
    with pytest.raises(Unsupported, match="it is not built"):
        main(["--quick"])


@needs_core
def test_the_peak_is_positive_on_every_instruction_set(isa: str) -> None:
    assert peaks.loop("float16", isa) == "fma"
    for dtype in ("float32", "bfloat16"):
        assert peaks.measure(peaks.loop(dtype, peaks.isa()), 1, "cpu") > 1e8


@needs_core
def test_the_children() -> None:
    with Child(children.MODULE) as child:
        found = children.scaling(child, "short 33 float32", 0.1)
    assert len(found.one_s) == len(found.two_s) == len(found.peak_two) >= 3
    assert found.has_goal
    assert found.met == ("yes" if found.relative >= SCALING_GOAL else "no")


@pytest.mark.thorough
@needs_core
def test_memory_of_a_pass() -> None:
    passes: tuple[Pass, ...] = ("forward", "backward")
    ways = [(dtype, way) for dtype in ("float32", "bfloat16") for way in passes]
    found = [each for way in ways for each in children.memory(2048, *way)]
    names = [(f"{way} 2k D64", dtype) for dtype, way in ways for _ in range(2)]
    assert [(each.name, each.dtype) for each in found] == names
    assert [each.side for each in found] == ["ours", "torch"] * 4
    for each in found:
        outputs, itemsize = 1 + 2 * ("backward" in each.name), 4 if each.dtype == "float32" else 2
        assert each.result_bytes == 2 * 2048 * 64 * itemsize * outputs
        assert each.extra_bytes > 0.5 * each.result_bytes
        if each.side == "ours":
            assert each.extra_bytes < 2 * 2048 * 2048 * 4  # less than the scores in float32


@needs_core
def test_a_child_that_fails_says_why() -> None:
    said = r"process ended with 1 after .*StopIteration"
    with Child(children.MODULE) as child, pytest.raises(TilewiseError, match=said):
        children.scaling(child, "no such case", 0.1)


RECORDS = Path(__file__).parents[2] / "benchmarks"


def test_eight_cases_as_bars_and_as_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, picture = RECORDS / "amd-epyc-26-2" / "cpu.json", tmp_path / "bench.png"
    assert main(["me", "--from", str(stored), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    found = me.results(GoalRecord.read(stored))
    assert [f"{each.name} {each.dtype}" for each in found] == list(me.EIGHT)
    assert all(text.count(f"  {each.ratio:.2f}x  ") == 1 for each in found)
    ahead = sum(each.ratio > 1 for each in found)
    assert f"tilewise is faster in {ahead} of 8; geometric mean" in text
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_core
def test_me_measures_only_the_eight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where its picture goes
    short = ["--cases", "decode", "--rounds", "1", "--json", "me.json"]
    assert main(["me", *short]) == 0
    (case,) = json.loads(Path("me.json").read_text())["cases"]
    assert f"{case['name']} {case['dtype']}" in me.EIGHT
    assert me.PICTURE.exists()
    assert " of 1; geometric mean" in capsys.readouterr().out


def test_a_picture_that_cannot_be_drawn(tmp_path: Path) -> None:
    stored = RECORDS / "amd-epyc-26-2" / "cpu.json"
    with pytest.raises(TilewiseError, match=r"--picture.*bench\.nonsense"):
        main(["me", "--from", str(stored), "--picture", str(tmp_path / "bench.nonsense")])


@needs_core
def test_samples_are_kept_where_the_picture_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--cases", "decode", "--rounds", "1", "--json", "me.json"]
    with pytest.raises(TilewiseError, match="--picture"):
        main(["me", *short, "--picture", "bench.nonsense"])
    assert len(json.loads(Path("me.json").read_text())["cases"]) == 1


def test_the_picture_says_how_many_threads() -> None:
    record = GoalRecord.read(RECORDS / "amd-epyc-26-2" / "cpu.json")
    assert "(line), one thread of AMD" in me.label(record)
    assert "(line), 2 threads of AMD" in me.label(replace(record, threads=2))


def test_a_slower_case_is_named() -> None:
    found = me.results(GoalRecord.read(RECORDS / "amd-epyc-26-2" / "cpu.json"))
    slow = replace(found[0], torch=replace(found[0].torch, cpu_s=[1e-9]))
    assert me.sentence([slow, found[1]]).endswith(f"Slower: {slow.name} {slow.dtype}.")
    assert me.sentence([]) == "None of the eight cases was measured."
