"""The process of a run: killed without warning, orphaned, refused, and out of room."""

from __future__ import annotations

import fcntl
import io
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lab.study.records_of import known
from tests.lab.study.train.toys import CPU, run_of, run_of_file, tokens_of
from tilelab.study.ask.run import RECORD, Execution, RunSpec
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child
from tilelab.study.train.child import EXPECTED_ERROR, ORPHANED, work
from tilewise.errors import TilewiseError

_WAIT_S = 120.0


def _line(run: RunSpec, tmp_path: Path, study: str = "study", **more: Any) -> str:
    execution = Execution(
        folder=tmp_path / study,
        cache=tmp_path / "cache",
        checkpoint_every_s=0.05,
        environment={"chip": "toy"},
        **more,
    )
    return json.dumps(run.executed(execution).as_json()) + "\n"


@contextmanager
def _process(line: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child that was told its job, its input still open."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tilelab.study.train.child"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        **options,
    )
    assert process.stdin is not None
    process.stdin.write(line)
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stderr):
            known(pipe).close()


def _wait_for_steps(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_bytes().count(b'"event":"step"') >= count:
            return
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.002)
    raise AssertionError("the child takes no steps")


def test_a_child_whose_parent_is_gone_ends_at_once(tmp_path: Path) -> None:
    run = run_of_file(tmp_path, {"budget.steps": 1_000_000})
    record = run.folder(tmp_path / "study") / RECORD
    core = min(os.sched_getaffinity(0))
    with _process(_line(run, tmp_path, core=core)) as process:
        _wait_for_steps(record, 2, process)
        assert os.sched_getaffinity(process.pid) == {core}
        environment = RunRecord.read(record).start.environment
        assert (environment["chip"], environment["threads"]) == ("toy", 1)
        assert (environment["core"], environment["device"]) == (core, "cpu")
        known(process.stdin).close()
        assert process.wait(5.0) == ORPHANED


@pytest.mark.thorough
def test_a_file_that_may_not_grow_is_said_and_loses_nothing(tmp_path: Path) -> None:
    run = run_of_file(tmp_path, {"budget.steps": 1_000_000})
    record = run.folder(tmp_path / "study") / RECORD

    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    with _process(_line(run, tmp_path), preexec_fn=small_files) as process:
        errors = known(process.stderr).read()  # to the end of the process
        assert process.wait() == EXPECTED_ERROR, errors
    assert "no room to write" in errors.splitlines()[-1]
    assert RunRecord.read(record).starts


@pytest.fixture
def started(tmp_path: Path) -> RunSpec:
    return RunSpec.from_json(json.loads(_line(run_of_file(tmp_path), tmp_path)))


def _told(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    """What ``main`` makes of a line, in this process."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(line))
    monkeypatch.setattr(child, "end_with_parent", lambda: None)
    return child.main()


def test_a_whole_run_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of_file(tmp_path)
    assert _told(monkeypatch, _line(run, tmp_path)) == 0
    record = RunRecord.read(run.folder(tmp_path / "study") / RECORD)
    assert record.done
    assert record.start.peak_flops_s > 1e6
    assert record.start.corpus["train_tokens"] > 0
    assert known(record.memory).peak_bytes > 0


def test_what_warms_a_process_up_knows_every_factor() -> None:
    changes = {
        "model.heads": 4,
        "model.kv_heads": 2,
        "model.positions": "rotary",
        "attention.variant": "bigbird",
        "training.length_warmup": {"start": 8, "steps": 2},
        "data.packing": "padded",
    }
    child._warm(run_of(changes).config, tokens_of(), CPU)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.source": "/nowhere/at/all.txt"}, "/nowhere/at/all.txt"),
        ({"model.context": 100_000}, "model.context"),
    ],
)
def test_what_the_user_can_put_right_is_one_line(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = run_of_file(tmp_path, changes)
    assert _told(monkeypatch, _line(run, tmp_path)) == EXPECTED_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TilewiseError("this\nthat"), "this that"),
        (OSError(28, "No space left on device", "x.bin"), "no room to write x.bin"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), "smaller training"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried\nmore"), "CUDA out of memory"),
        (OSError(13, "Permission denied"), ""),  # the others are crashes
        (RuntimeError("a bug"), ""),
    ],
)
def test_expected_errors_and_crashes(
    error: Exception,
    words: str,
    started: RunSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(_: RunSpec) -> None:
        raise error

    monkeypatch.setattr(child, "work", fail)
    if not words:
        with pytest.raises(type(error)):
            _told(monkeypatch, _line(started, tmp_path))
        return
    assert _told(monkeypatch, _line(started, tmp_path)) == EXPECTED_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_two_processes_do_not_work_on_one_run(
    started: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = started.record.parent
    folder.mkdir(parents=True)
    monkeypatch.setattr(child, "_LOCK_WAIT_S", 0.1)
    with (folder / child._LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TilewiseError, match="another process works on this run"):
            work(started)
    work(started)
    assert RunRecord.read(folder / RECORD).done
