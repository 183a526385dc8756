"""The command: what it refuses, what it writes and when, and the self-test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, ran
from tests.lab.gpu_check.test_self_test import MISSING
from tests.lab.tune.team import CHIP, FAMILY, FakeTeam, gain
from tilelab.gpu_check.record import Row
from tilelab.tune import command
from tilelab.tune.command import main
from tilelab.tune.worker import Job, table_blocks
from tilewise import cli
from tilewise.errors import InvalidArgument
from tilewise.kernels.gpu.backend import why_unfit
from tilewise.kernels.gpu.config import KINDS, PASSES, Blocks
from tilewise.plan import tuned
from tilewise.plan.tuned import Entry, Store, Tuned, read, write

ONE = ["--passes", "forward", "--dtypes", "float16", "--widths", "64", "--kinds", "plain"]
FASTER = gain({"128x64/8/2": 0.8, "64x128/8/1": 0.7})


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder of the user's, and Triton in some version."""
    monkeypatch.delenv("TILEWISE_TUNED", raising=False)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    for module in (tuned, command):
        monkeypatch.setattr(module, "installed_triton", lambda: "3.6.0")
    return tmp_path / "cache" / "tuned" / "nvidia-h200.json"


Start = Callable[[FakeTeam], FakeTeam]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Start:
    """Makes the command believe in a GPU, on which a team works."""

    def start(team: FakeTeam) -> FakeTeam:
        monkeypatch.setattr(command, "_chip", lambda setting: command._Chip(CHIP, FAMILY))
        monkeypatch.setattr(command, "Team", lambda setting: team)
        return team

    return start


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_without_a_gpu(
    more: list[str],
    user: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for found, reason in ((None, "Triton is not installed"), (True, "torch sees no GPU here")):
        monkeypatch.setattr(command, "find_spec", lambda name, found=found: found)
        assert cli.main(["tune", *more]) == 1
        said = capsys.readouterr()
        assert reason in said.err
        assert "--self-test" in said.err
        assert said.out == ""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["tune", *more]) == 1
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err
    assert not user.parent.exists()


def test_a_chip_of_no_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "find_spec", lambda name: True)
    monkeypatch.setattr(command, "chip_of", lambda device: "Old 1")
    monkeypatch.setattr(command, "family_of", lambda device: None)
    assert cli.main(["tune"]) == 1
    assert "no family of chips is known that Old 1 is of" in capsys.readouterr().err


def test_a_dry_run_lists_and_does_nothing(
    on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team = on_a_gpu(FakeTeam(FASTER))
    assert main(["--dry-run", "--passes", "dq", "--dtypes", "bfloat16", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("tilewise tune: NVIDIA H200 (sm_90), torch ")
    assert len(lines) == 1 + 2 * 3 * 3
    assert "tries" in lines[1]
    assert team.measured == []
    assert not user.parent.exists()


def test_what_is_faster_is_written_where_calls_look(
    on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    team = on_a_gpu(FakeTeam(FASTER))
    assert main(["--passes", "forward", "dkdv", "--dtypes", "float16", "--widths", "64"]) == 0
    assert team.closed
    found = Store().find(CHIP, FAMILY, why_unfit)
    kept = {(place.pass_name, place.kind): str(e.blocks) for place, e in found.entries.items()}
    assert kept == {
        **{("forward", kind): "128x64/8/2" for kind in ("plain", "+", "*")},
        **{("dkdv", kind): "64x128/8/1" for kind in ("plain", "+", "*")},
    }
    assert found.path == user
    text = capsys.readouterr().out
    assert "6 of 6 have faster blocks" in text
    assert read(user).torch == torch.__version__


@pytest.mark.parametrize("folder", [False, True])
def test_out_names_a_file_or_a_folder(
    folder: bool, on_a_gpu: Start, user: Path, tmp_path: Path
) -> None:
    on_a_gpu(FakeTeam(FASTER))
    out = tmp_path if folder else tmp_path / "new" / "mine.json"
    assert main([*ONE, "--out", str(out)]) == 0
    assert len(read(out / user.name if folder else out).entries) == 1
    assert not user.exists()


def test_it_writes_to_the_user_s_folder_where_reading_is_off(
    on_a_gpu: Start, user: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_gpu(FakeTeam(FASTER))
    monkeypatch.setenv("TILEWISE_TUNED", "off")
    assert main(ONE) == 0
    assert user.exists()


def old_entry(job: Job, blocks: Blocks) -> Entry:
    return Entry(job.place, blocks, 1e-3, 0.0, table_blocks(FAMILY, job), 2e-3, 0.0)


def test_a_second_run_keeps_what_it_does_not_ask_about(on_a_gpu: Start, user: Path) -> None:
    """And takes back what is no longer faster."""
    other = Job("dq", "float16", 128, "*")
    again = Job("forward", "float16", 64, "plain")
    mine = Blocks(16, 16, 4, 1)
    before = (old_entry(other, mine), old_entry(again, mine))
    write(user, Tuned(CHIP, FAMILY, "2.11.0", "3.6.0", "2026-01-01", before))
    on_a_gpu(FakeTeam(gain({})))
    assert main(ONE) == 0
    places = {entry.place for entry in read(user).entries}
    assert places == {other.place}


def test_a_file_of_another_triton_is_begun_anew(
    on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (old_entry(Job("dq", "float16", 128, "*"), Blocks(16, 16, 4, 1)),)
    write(user, Tuned(CHIP, FAMILY, "2.10.0", "3.5.1", "2026-01-01", before))
    on_a_gpu(FakeTeam(FASTER))
    assert main(ONE) == 0
    assert "what was in it is not kept: it is of Triton 3.5.1" in capsys.readouterr().out
    assert len(read(user).entries) == 1
    user.write_text("{")
    assert main(ONE) == 0
    assert "what was in it is not kept: it is no JSON" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_said_at_once(on_a_gpu: Start, tmp_path: Path) -> None:
    team = on_a_gpu(FakeTeam(FASTER))
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="--out"):
        main(["--out", str(tmp_path / "file" / "mine.json")])
    assert team.measured == []


@pytest.mark.parametrize("stop_at", ["width", "kind"])
def test_an_interruption_keeps_what_is_done(
    stop_at: str, on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of widths that were done before, and of the one that was under way."""
    last = {"width": Job("forward", "float16", 128, "plain"),
            "kind": Job("forward", "float16", 64, "+")}[stop_at]  # fmt: skip

    def before(job: Job) -> None:
        if job == last:
            raise KeyboardInterrupt

    team = on_a_gpu(FakeTeam(FASTER, before=before))
    assert cli.main(["tune", "--passes", "forward", "--dtypes", "float16"]) == 130
    assert team.closed
    done = ["plain", "+", "*"] if stop_at == "width" else ["plain"]
    assert [entry.place.kind for entry in read(user).entries] == done
    assert "interrupted" in capsys.readouterr().out


def test_it_is_written_after_every_width(on_a_gpu: Start, user: Path) -> None:
    """A process that is killed leaves the widths before."""
    there: list[int] = []

    def before(job: Job) -> None:
        there.append(len(read(user).entries) if user.exists() else 0)

    on_a_gpu(FakeTeam(gain({"128x64/8/3": 0.5, "32x32/8/1": 0.5}), before=before))
    main(["--passes", "dq", "--dtypes", "float16", "--kinds", "plain"])
    assert there == [0, 1, 2]


def test_no_time(on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    team = on_a_gpu(FakeTeam(FASTER))
    assert main(["--minutes", "0", "--passes", "dq", "--dtypes", "float16"]) == 0
    assert "9 not done for want of time: dq float16 64 plain;" in capsys.readouterr().out
    assert team.measured == []
    assert not user.exists()


def test_a_job_whose_time_ran_out_is_left(
    on_a_gpu: Start, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is ended where it is, and did not fail."""
    table = str(table_blocks(FAMILY, Job("dq", "float16", 64, "plain")))
    slow = {table: Row("check", "", "error", "ended after 1 s: it had no more time")}
    team = on_a_gpu(FakeTeam(FASTER, slow, before=lambda _: time.sleep(0.1)))
    assert main(["--minutes", "0.001", "--passes", "dq", "--dtypes", "float16"]) == 0
    assert "9 not done for want of time: dq float16 64 plain;" in capsys.readouterr().out
    assert team.until < time.monotonic()
    assert not user.exists()


def test_the_interpreter_has_no_bfloat16() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    with pytest.raises(InvalidArgument, match="bfloat16"):
        main(["--self-test", "--dtypes", "bfloat16"])


def call(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The command from the bare source tree, with what a bare GPU machine has."""
    missing = tuple(name for name in MISSING if name != "triton")
    bare = folder / "sitecustomize.py"
    bare.write_text(f"import sys\nfor name in {missing}: sys.modules[name] = None\n")
    hidden = ("TRITON_INTERPRET", "TILEWISE_TUNED")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment["PYTHONPATH"] = os.pathsep.join((str(folder), str(ROOT / "src")))
    environment["TILEWISE_CACHE"] = str(folder / "cache")
    words = (sys.executable, "-m", "tilewise", "tune", "--self-test", *arguments)
    return ran(*words, timeout=None, cwd=folder, env=environment)


def checked(done: subprocess.CompletedProcess[str], jobs: int, folder: Path) -> None:
    assert done.stderr == ""
    assert f"{jobs} of {jobs} have faster blocks" in done.stdout
    assert done.stdout.endswith("self-test: nothing here is a measurement\n")
    assert not (folder / "cache").exists(), "nothing is written to the user's folder"


@pytest.mark.slow
def test_the_whole_self_test(tmp_path: Path) -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed (pip install triton)")
    out = tmp_path / "mine.json"
    checked(call("--out", str(out), folder=tmp_path), len(PASSES) * len(KINDS), tmp_path)
    values: Any = json.loads(out.read_text())
    assert (values["chip"], values["triton"]) == ("interpreter", metadata.version("triton"))
    assert {entry["dtype"] for entry in values["entries"]} == {"float16"}
    found = [(entry["pass"], entry["kind"]) for entry in values["entries"]]
    assert sorted(found) == sorted(product(PASSES, KINDS))
