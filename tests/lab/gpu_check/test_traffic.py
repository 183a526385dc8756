"""The bytes that ncu counts: what it prints, what it refuses, and the rows that come of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.lab.gpu_check.records import whole
from tilelab.gpu_check import traffic
from tilelab.gpu_check.record import FAILURES
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.table import table
from tilelab.gpu_check.watched import CannotWatch

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


def fake_ncu(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """An ncu that is a shell script, and nothing else on the path but the shell."""
    (folder / "ncu").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")


def test_what_ncu_prints_is_read() -> None:
    read, write = traffic.METRICS
    assert traffic.bytes_of(PRINTED) == [
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
        traffic.bytes_of(printed)


def test_ncu_is_asked_for_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "printed").write_text(PRINTED)
    fake_ncu(tmp_path, monkeypatch, f'echo "$@" > {tmp_path}/asked; cat {tmp_path}/printed')
    found = traffic.count(["python", "child"], {"PATH": "/bin:/usr/bin"}, 20)
    assert len(found) == 2
    asked = (tmp_path / "asked").read_text().split()
    assert asked[:2] == ["--metrics", ",".join(traffic.METRICS)]
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
        traffic.count(["python"], {"PATH": "/bin:/usr/bin"}, 1)


def test_without_ncu_the_reason_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    model = traffic.predicted(SELF_TEST, "forward")
    monkeypatch.setattr(traffic, "predicted", lambda *_: model)
    (row,) = traffic.run(Setting("gpu"), "forward")
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
        return traffic.bytes_of(PRINTED)

    model = traffic.predicted(SELF_TEST, "backward")
    monkeypatch.setattr(traffic, "predicted", lambda *_: model)
    monkeypatch.setattr(traffic, "count", count)
    (row,) = traffic.run(Setting("gpu"), "backward")
    assert row.status == "ok"
    assert row.values == {
        "predicted_read": model.read,
        "predicted_written": model.written,
        "read": 50_331_712,
        "written": 1056,
        "kernels": 2,
    }
    assert asked[0][1:3] == ["-m", "tilelab.gpu_check.traffic"]
    assert asked[0][-1] == "backward"
    record = whole()
    record.rows.append(row)
    (line,) = [line for line in table(record).splitlines() if line.startswith("Bytes of memory")]
    assert line.startswith("Bytes of memory by ncu, backward: 50 MB read, predicted 0 (-")


def test_the_self_test_runs_what_would_be_counted() -> None:
    for job in traffic.JOBS:
        (row,) = traffic.run(SELF_TEST, job)
        assert row.status == "ok"
        assert row.values["predicted_read"] > 0
        assert row.values["predicted_written"] > 0
    plain, ours = (traffic.predicted(SELF_TEST, job) for job in ("plain forward", "forward"))
    matrix = 2 * 64 * 64 * 2
    operand = 2 * 64 * 64 * 2
    assert plain.bytes == 4 * matrix + 4 * operand
    assert ours.bytes != plain.bytes
