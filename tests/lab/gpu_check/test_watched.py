"""What ncu and compute-sanitizer print and refuse, and the rows that come of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.lab.gpu_check.records import whole
from tilelab.gpu_check import accuracy, watched
from tilelab.gpu_check.record import FAILURES, table
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.watched import CannotWatch
from tilelab.peers.work import Attend, Given, Work, call_of
from tilewise.plan.traffic.count import Operand, Pass, Traffic

HEAD = '"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"'
PRINTED = f"""==PROF== Connected to process 7
==PROF== Profiling "forward" - 0: 0%....100% - 1 pass
{HEAD}
"0","7","forward(int, ""x"")","Command line","dram__bytes_read.sum","byte","50,331,648"
"0","7","forward(int, ""x"")","Command line","dram__bytes_write.sum","byte","1,024"
"1","7","merge","Command line","dram__bytes_read.sum","byte","64"
"1","7","merge","Command line","dram__bytes_write.sum","byte","32"
"""
SELF_TEST = Setting("tiled", self_test=True)
JOB = "memcheck bfloat16 causal D64"
CLEAN = "========= COMPUTE-SANITIZER\\n========= ERROR SUMMARY: 0 errors"
FOUND = "========= Invalid __global__ read of size 2 bytes\\n========= ERROR SUMMARY: 3 errors"
RACES = "========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)"


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An ncu that is a shell script, and nothing else on the path but the shell."""
    (folder / "ncu").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_what_ncu_prints_is_read() -> None:
    read, write = watched.METRICS
    assert watched.bytes_of(PRINTED) == [
        {read: 50_331_648, write: 1024},
        {read: 64, write: 32},
    ]


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("==WARNING== No kernels were profiled.\n", "no kernel ran"),
        (HEAD + "\n", "lacks"),
        (PRINTED.rpartition('"1"')[0], "lacks"),
        (PRINTED.replace('"byte"', '"Mbyte"'), "in Mbyte, not in bytes"),
    ],
)
def test_what_is_no_count_is_refused(printed: str, words: str) -> None:
    with pytest.raises(CannotWatch, match=words):
        watched.bytes_of(printed)


def test_ncu_is_asked_for_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    fake_ncu(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/printed')
    found = watched.count(["python", "child"], {"PATH": "/bin:/usr/bin"}, 20)
    assert len(found) == 2
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["--metrics", ",".join(watched.METRICS)]
    assert asked[-4:] == ["--clock-control", "none", "python", "child"]
    assert "--print-units base" in " ".join(asked)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'; exit 1", "cannot be read here"),
        ("echo boom >&2; exit 9", "ended with 9: boom"),
        ("exec sleep 20", "not done after"),
    ],
)
def test_what_ncu_refuses(
    body: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_ncu(tmp_path, monkeypatch, body)
    with pytest.raises(CannotWatch, match=words):
        watched.count(["python"], {"PATH": "/bin:/usr/bin"}, 1)


def test_without_ncu_the_reason_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model = watched.predicted(SELF_TEST, "forward")
    monkeypatch.setattr(watched, "predicted", lambda *_: model)
    (row,) = watched.traffic(Setting("gpu"), "forward")
    assert row.status == "unsupported"
    assert row.status not in FAILURES
    assert row.note == "skipped: ncu (Nsight Compute) is not installed"
    record = whole()
    record.rows.append(row)
    assert "unsupported traffic, forward: skipped: ncu" in table(record)


def test_counts_stand_beside_predictions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Sequence[str]] = []

    def count(command: Sequence[str], environment: Mapping[str, str], limit_s: float) -> object:
        asked.append(command)
        assert "PYTHONPATH" in environment
        return watched.bytes_of(PRINTED)

    # Given, as the prediction for the self-test depends on this processor's tiles.
    model = Traffic((Pass("backward", (Operand("k", read=40_000_000, written=7_000_000),)),))
    monkeypatch.setattr(watched, "predicted", lambda *_: model)
    monkeypatch.setattr(watched, "count", count)
    (row,) = watched.traffic(Setting("gpu"), "backward")
    assert row.status == "ok"
    assert row.values == {
        "predicted_read": model.read,
        "predicted_written": model.written,
        "read": 50_331_712,
        "written": 1056,
        "kernels": 2,
    }
    assert asked[0][1:4] == ["-m", "tilelab.gpu_check.watched", "traffic"]
    assert asked[0][-1] == "backward"
    record = whole()
    record.rows.append(row)
    (line,) = [line for line in table(record).splitlines() if line.startswith("Bytes of memory")]
    assert line == (
        "Bytes of memory by ncu, backward: 50 MB read, predicted 40 (-21%); 0 written, predicted 7"
    )


def test_the_self_test_runs_what_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []

    def spy(work: Work, given: Given, attend: Attend) -> object:
        passes.append(work.passes)
        return call_of(work, given, attend)

    monkeypatch.setattr(watched, "call_of", spy)
    for job in watched.JOBS:
        (row,) = watched.traffic(SELF_TEST, job)
        assert row.status == "ok"
        assert row.values["predicted_read"] > 0
        assert row.values["predicted_written"] > 0
    assert passes == ["forward", "backward"]
    plain, ours = (watched.predicted(SELF_TEST, job) for job in ("plain forward", "forward"))
    matrix = 2 * 64 * 64 * 2
    operand = 2 * 64 * 64 * 2
    assert plain.bytes == 4 * matrix + 4 * operand
    assert ours.bytes != plain.bytes


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
def test_what_the_sanitizer_prints_is_read(
    printed: str,
    ends: int,
    status: str,
    note: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_sanitizer(tmp_path, monkeypatch, printed, ends)
    (row,) = watched.sanitize(Setting("gpu"), JOB)
    assert (row.status, note in row.note) == (status, True)
    asked = (tmp_path / "asked").read_text()
    assert "--tool memcheck" in asked
    assert asked.endswith("bfloat16 causal D64\n")


def test_without_the_sanitizer_the_reason_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (row,) = watched.sanitize(Setting("gpu"), JOB)
    assert row.status not in FAILURES
    assert row.note == "skipped: compute-sanitizer is not installed"


def test_what_it_watches_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs would keep the GPU from all that comes after."""
    fake_sanitizer(tmp_path, monkeypatch, "Invalid __global__ write", 0)
    program = tmp_path / "compute-sanitizer"
    child = f"sh -c 'sleep 300 & echo $! > {tmp_path}/watched; wait'"
    program.write_text(program.read_text().replace("exit 0", child))
    monkeypatch.setattr(watched, "_CHECKING_S", 1.0)
    (row,) = watched.sanitize(Setting("gpu"), JOB)
    assert "not done after 1 s: Invalid __global__ write" in row.note
    process = Path(f"/proc/{(tmp_path / 'watched').read_text().strip()}/stat")
    deadline = time.monotonic() + 10
    while process.exists() and " Z " not in process.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not process.exists() or " Z " in process.read_text()


def test_the_self_test_runs_what_would_be_watched() -> None:
    (row,) = watched.sanitize(SELF_TEST, "racecheck float16 grouped 8:2")
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
