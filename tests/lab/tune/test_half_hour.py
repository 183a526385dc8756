"""The first half hour on a GPU: what each command does, and what it makes of those before it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, ran
from tilelab.gpu_check import accuracy
from tilelab.gpu_check.record import Record, Row, Status
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import STEPS, Step
from tilelab.tune import half_hour
from tilelab.tune.half_hour import PARTS, chosen, main
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.inspect.gpu import PASSES


class Machine:
    """Stands for the jobs of all steps: each gives a row, and accuracy what it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.limits: list[float] = []
        self.tuned: list[Sequence[str]] = []
        self.scratch: list[str] = []
        self.accuracy: list[Row] = []

    def conduct(
        self,
        setting: Setting,
        steps: Sequence[Step],
        record: Record,
        limit_s: float,
        *,
        changed: Callable[[], None],
    ) -> None:
        self.limits.append(limit_s)
        self.scratch.append(setting.scratch)
        for step in steps:
            self.asked.append((step.name, tuple(step.jobs(setting))))
            rows = self.accuracy if step.name == "accuracy" else []
            record.rows += rows or [Row(step.name, "one")]
            record.seconds[step.name] = 1.0
            changed()

    def tune(self, arguments: Sequence[str]) -> int:
        self.tuned.append(arguments)
        return 0


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr("tilelab.gpu_check.conduct", found.conduct)
    monkeypatch.setattr(half_hour, "tune", found.tune)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return found


def stored(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "gpu_check.json").read_text())
    return values


def test_three_commands_write_one_record(machine: Machine, tmp_path: Path) -> None:
    """Each goes on from the folder alone; A again takes the place of what A found."""
    for part, status in (("A", "only parts A"), ("B", "only parts A, B"), ("C", "complete")):
        assert main([part, "--out", str(tmp_path)]) == 0
        assert stored(tmp_path)["status"] == status
    assert main(["A", "--out", str(tmp_path)]) == 0
    every = [name for part in PARTS.values() for name in part.steps]
    assert sorted(row["step"] for row in stored(tmp_path)["rows"]) == sorted(every)
    assert {step.name for step in STEPS} <= set(every), "a step of the check that nobody does"
    assert len(list(tmp_path.iterdir())) <= 8
    ((_, folder, _, minutes, *rest),) = machine.tuned
    assert folder == str(tmp_path / "measured")
    assert 0 < float(minutes) <= PARTS["B"].minutes
    passes = ["--passes", "fused", "grouped", "grouped8", *PASSES]
    dtypes, widths = ["bfloat16", "float8_e4m3fn"], ["64", "128", "256"]
    assert rest == [*passes, "--dtypes", *dtypes, "--widths", *widths, "--kinds", "plain"]


def test_the_steps_of_b_leave_time_for_its_blocks(machine: Machine, tmp_path: Path) -> None:
    main(["B", "--out", str(tmp_path), "--minutes", "6"])
    assert machine.limits[0] == pytest.approx(60 * (6 - PARTS["B"].tune), abs=5)


@pytest.mark.parametrize("status", ["wrong", "error"])
def test_after_a_wrong_result_b_looks_for_its_cause(
    machine: Machine, tmp_path: Path, status: Status
) -> None:
    machine.accuracy = [
        Row("accuracy", "bfloat16 full D64"),
        Row("accuracy", "bfloat16 varlen, gradients", status, "dq is far off"),
        Row("accuracy", "bfloat16 varlen", status, "out is far off"),
        Row("accuracy", "dropout bits", status),
        Row("accuracy", "pages of 16, varlen", status),
        Row("accuracy", "fp8 one row", status),
    ]
    assert main(["A", "--out", str(tmp_path)]) == 1
    machine.asked.clear()
    assert main(["B", "--out", str(tmp_path)]) == 0
    others = ("dropout bits", "pages", "fp8")
    less = ("all", "no mask", "a key head for each head", "few rows and keys")
    memory = tuple(f"memcheck {job}" for job in ("bfloat16 varlen", *others))
    narrowed = (*(f"bfloat16 varlen, {each}" for each in less), *others)
    assert machine.asked == [("narrow", narrowed), ("sanitize", memory)]
    assert not machine.tuned, "blocks of a kernel that is wrong are not measured"


def test_each_row_of_accuracy_is_of_a_job() -> None:
    """What a job prints has its name, and more where a job has several rows."""
    setting = Setting()
    for job in accuracy.jobs(setting):
        for name in (job, f"{job}, gradients"):
            assert accuracy.job_of(setting, name) == job
    assert accuracy.job_of(setting, "vocabulary float32 x float32, options") == "vocabulary"
    assert accuracy.job_of(setting, "a job of another version") == ""


def test_without_flex_where_it_was_not_compiled_beforehand(
    machine: Machine, tmp_path: Path
) -> None:
    """A compilation that is late may not take the time of ours: A compiles, and says for what."""
    for part in PARTS:
        main([part, "--out", str(tmp_path)])
    assert [bool(folder) for folder in machine.scratch] == [True, False, False]


def test_a_part_that_is_killed_is_not_finished(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["A", "--out", str(tmp_path)]) == 0

    def killed(*arguments: Any, changed: Callable[[], None]) -> None:
        changed()
        raise KeyboardInterrupt

    monkeypatch.setattr("tilelab.gpu_check.conduct", killed)
    with pytest.raises(KeyboardInterrupt):
        main(["B", "--out", str(tmp_path)])
    assert stored(tmp_path)["status"] == "not finished"


def test_a_chip_without_blocks_costs_the_blocks_alone(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuses(arguments: Sequence[str]) -> int:
        raise Unsupported("no family of chips is known", fix="none")

    monkeypatch.setattr(half_hour, "tune", refuses)
    assert main(["B", "--out", str(tmp_path)]) == 1
    found = capsys.readouterr()
    assert "no family of chips is known" in found.err
    assert found.out == (tmp_path / "gpu_check.txt").read_text()
    assert stored(tmp_path)["status"] == "only parts B"


def test_a_self_test_and_a_run_have_folders_of_their_own(machine: Machine, tmp_path: Path) -> None:
    assert main(["A", "--self-test", "--out", str(tmp_path)]) == 0
    with pytest.raises(InvalidArgument, match="of a self-test"):
        main(["B", "--out", str(tmp_path)])


def test_other_parts_do_as_ever_after_a_wrong_result() -> None:
    record = Record(False, "gpu", rows=[Row("accuracy", "bfloat16 full D64", "wrong")])
    steps, measures = chosen(PARTS["C"], record, Setting())
    assert [step.name for step in steps] == list(PARTS["C"].steps)
    assert not measures


def test_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["A"]) == 2
    assert "--self-test needs none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_self_test(tmp_path: Path) -> None:
    """All three commands as a user calls them, in Triton's interpreter."""
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    script = str(ROOT / "scripts" / "gpu_half_hour.py")
    for part in PARTS:
        ran(sys.executable, script, part, "--self-test", "--out", tmp_path, timeout=None)
    assert stored(tmp_path)["status"] == "complete"
