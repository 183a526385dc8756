"""What compute-sanitizer prints and refuses, and the problems that a wrong one is narrowed to."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tilelab.gpu_check import accuracy, sanitize
from tilelab.gpu_check.record import FAILURES
from tilelab.gpu_check.setting import Setting

SELF_TEST = Setting("tiled", self_test=True)
JOB = "memcheck bfloat16 causal D64"
CLEAN = "========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors"
FOUND = "========= Invalid __global__ read of size 2 bytes\\n========= ERROR SUMMARY: 3 errors"
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"


def fake_sanitizer(folder: Path, monkeypatch: pytest.MonkeyPatch, printed: str, ends: int) -> None:
    """A compute-sanitizer that is a shell script, and nothing else on the path but the shell."""
    program = folder / "compute-sanitizer"
    said = f"printf '%b\\n' '{printed}'"
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{said}\nexit {ends}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


@pytest.mark.parametrize(
    ("printed", "ends", "status", "note"),
    [
        (CLEAN, 0, "ok", ""),
        (FOUND, 9, "wrong", "3 found by memcheck"),
        (RACES, 0, "wrong", "2 found by memcheck"),
        (CLEAN, 1, "error", "compute-sanitizer ended with 1"),
        ("it never began", 0, "error", "it never began"),
    ],
)
def test_what_it_prints_is_read(
    printed: str,
    ends: int,
    status: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_sanitizer(tmp_path, monkeypatch, printed, ends)
    (row,) = sanitize.run(Setting("gpu"), JOB)
    assert (row.status, note in row.note) == (status, True)
    asked = (tmp_path / "asked").read_text()
    assert "--tool memcheck" in asked
    assert asked.endswith("bfloat16 causal D64\n")


def test_without_it_the_reason_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = sanitize.run(Setting("gpu"), JOB)
    assert row.status not in FAILURES
    assert row.note == "skipped: compute-sanitizer is not installed"


def test_what_it_watches_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs would keep the GPU from all that comes after."""
    fake_sanitizer(tmp_path, monkeypatch, "Invalid __global__ write", 0)
    program = tmp_path / "compute-sanitizer"
    child = f"sh -c 'sleep 300 & echo $! > {tmp_path}/watched; wait'"
    program.write_text(program.read_text().replace("exit 0", child))
    monkeypatch.setattr(sanitize, "_LIMIT_S", 1.0)
    (row,) = sanitize.run(Setting("gpu"), JOB)
    assert "not done after 1 s: Invalid __global__ write" in row.note
    watched = Path(f"/proc/{(tmp_path / 'watched').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while watched.exists() and " Z " not in watched.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not watched.exists() or " Z " in watched.read_text()


def test_the_self_test_runs_what_would_be_watched() -> None:
    (row,) = sanitize.run(SELF_TEST, "racecheck float16 grouped 8:2")
    assert row.status == "ok"


def test_a_wrong_problem_is_narrowed_by_one_thing_at_a_time() -> None:
    jobs = accuracy.narrowed(SELF_TEST, "float16 alibi")
    less = [job.removeprefix("float16 alibi, ") for job in jobs]
    assert less == ["all", "no mask", "no score", "width 64", "few rows and keys"]
    for job in jobs:
        rows = list(accuracy.narrow(SELF_TEST, job))
        assert [row.name for row in rows] == [job, f"{job}, gradients"]
        assert all(row.status == "ok" for row in rows), rows


def test_what_is_no_problem_is_done_again() -> None:
    assert accuracy.narrowed(SELF_TEST, "statistics") == ["statistics"]
    (row,) = accuracy.narrow(SELF_TEST, "statistics")
    assert (row.step, row.name, row.status) == ("narrow", "statistics", "ok")
