"""Runs that are forked: the bits of a fresh process, a life and a death of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.conduct.test_process import all_children
from tests.lab.study.records_of import experiment_of, known
from tests.lab.study.train.toys import bits_of, run_of_file
from tilelab.study.ask.config import Study, change
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.conduct.forks import Forker, Forks, can_be_forked
from tilelab.study.conduct.pool import Pool, RunError
from tilelab.study.conduct.process import Local
from tilelab.study.plan import Agenda
from tilelab.study.recipes.own import own_study
from tilelab.study.records.events import RunRecord
from tilelab.study.train.child import ORPHANED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")

_WAIT_S = 120.0


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Forks]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    before = all_children()
    with closing(Forks()) as found:
        yield found
    assert all_children() <= before


def _execution(folder: Path, **fields: Any) -> Execution:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    return Execution(folder=folder, cache=folder.parent / "cache", **fields)


def _work(run: RunSpec, folder: Path, forks: Forks | None) -> dict[str, RunRecord]:
    experiment = experiment_of("same", baseline=run.config, seeds=(0,))
    agenda = Agenda(Study(name="toy", question="?", experiments=(experiment,)), {})
    Pool(Local(_execution(folder), forks=forks), 2, folder).work(agenda, [])
    return dict(agenda.records)


@pytest.mark.thorough
def test_forked_runs_have_the_bits_of_fresh_processes(tmp_path: Path, forks: Forks) -> None:
    run = run_of_file(tmp_path, {"model.dropout.residual": 0.1, "optimizer.name": "muon"})
    fresh, forked = (_work(run, tmp_path / name, by) for name, by in (("a", None), ("b", forks)))
    assert len(forked) == 2
    for name, record in fresh.items():
        assert bits_of(forked[name]) == bits_of(record)
        assert known(forked[name].memory).peak_bytes > 0
        # A clock of its own: it has not the time of whoever imported for it.
        taken = sum(each.cpu_s for each in forked[name].steps)
        assert 0 < taken < 2 * sum(each.wall_s for each in forked[name].steps)


SCRIPT = """
import json, os, sys
from pathlib import Path

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
(folder / "parents").write_text(f"{os.getppid()}")
print(json.dumps({"val": 1.5, "OMP": os.environ["OMP_NUM_THREADS"]}), flush=True)
if seed == 1:
    sys.exit("the disk is on fire")
if seed == 2:
    import time
    time.sleep(600)
"""


def _command(folder: Path) -> Study:
    file = folder / "train.py"
    file.write_text(SCRIPT)
    words = f"python {file} {{folder}} {{seed}}"
    decided: dict[str, Any] = {"metric": "val", "smallest_effect": 1, "baseline": {}}
    return own_study("own", words, **decided, arms={"a": {}}, seeds=3)


def test_commands_are_forked_and_import_torch_once(tmp_path: Path, forks: Forks) -> None:
    """No run of a script without torch starts with the import of torch, which takes seconds."""
    (experiment,) = _command(tmp_path).experiments
    runs = [RunSpec("own", arm, 0, experiment.baseline) for arm in ("a", "baseline")]
    local = Local(_execution(tmp_path), forks=forks)
    for run in runs:
        assert can_be_forked(run.executed(local.execution))
        worker = local.start(run, [])
        assert worker.outcome().code == 0  # type: ignore[attr-defined]
        worker.close()
        record = RunRecord.read(run.executed(local.execution).record)
        assert record.done
        assert 5e6 < known(record.memory).peak_bytes < 60e6
    assert len(forks._servers) == 1


def test_a_forked_command_fails_and_ends_with_its_run(tmp_path: Path, forks: Forks) -> None:
    (experiment,) = _command(tmp_path).experiments
    local = Local(_execution(tmp_path), forks=forks)
    worker = local.start(RunSpec("own", "a", 1, experiment.baseline), [])
    outcome = worker.outcome()  # type: ignore[attr-defined]
    worker.close()
    assert outcome.code == 1
    assert outcome.lines == ["the disk is on fire", "the command ended with status 1"]
    run = RunSpec("own", "a", 2, experiment.baseline)
    worker = local.start(run, [])
    parent = run.folder(tmp_path) / "files" / "parents"
    deadline = time.monotonic() + _WAIT_S
    while not parent.exists() or not parent.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    worker.stop()
    assert worker.outcome().code == -signal.SIGKILL  # type: ignore[attr-defined]
    worker.close()
    while Path(f"/proc/{parent.read_text()}").exists():
        assert time.monotonic() < deadline, "the command outlived its run"
        time.sleep(0.02)


def _started(forks: Forks, run: RunSpec, folder: Path) -> tuple[Any, int]:
    """The worker of a run that takes steps for hours, and the number of its process."""
    before = _forked()
    worker = Local(_execution(folder), forks=forks).start(run, [])
    deadline = time.monotonic() + _WAIT_S
    while not any(each["event"] == "step" for each in worker.new_events()):
        assert not worker.over, worker.outcome()  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, "it takes no steps"
        time.sleep(0.02)
    (process,) = _forked() - before
    return worker, process


def _forked() -> set[int]:
    """The children of our children."""
    found = set[int]()
    for child in all_children():
        listed = Path(f"/proc/{child}/task/{child}/children")
        found |= {int(each) for each in listed.read_text().split()} if listed.exists() else set()
    return found


@pytest.mark.thorough
def test_a_run_that_is_killed_takes_no_other_with_it(tmp_path: Path, forks: Forks) -> None:
    run = run_of_file(tmp_path, {"budget.steps": 1_000_000})
    (first, one), (second, other) = (
        _started(forks, run, tmp_path / name) for name in ("first", "second")
    )
    # A session and a core mask of its own, and nobody else's input.
    assert os.getsid(one) == one
    os.kill(one, signal.SIGKILL)
    assert first.outcome().code == -signal.SIGKILL
    with pytest.raises(RunError, match=r"was ended by signal 9: out of memory\?"):
        first.result()
    first.close()
    assert not second.over
    third, _ = _started(forks, run, tmp_path / "third")
    third.stop()  # its input closes, as it does where whoever started it is gone
    assert third.outcome().code == ORPHANED
    third.close()
    assert not second.over
    second.close()  # by force: no time is left
    assert not Path(f"/proc/{other}").exists()


@pytest.mark.thorough
def test_without_the_process_that_forks_a_run_is_lost_and_the_next_one_starts(
    tmp_path: Path, forks: Forks
) -> None:
    before, run = all_children(), run_of_file(tmp_path, {"budget.steps": 1_000_000})
    worker, process = _started(forks, run, tmp_path / "first")
    (server,) = all_children() - before
    os.kill(server, signal.SIGKILL)
    assert worker.outcome().code == -signal.SIGKILL
    worker.close()
    deadline = time.monotonic() + _WAIT_S
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not Path(f"/proc/{process}").exists()
    worker, _ = _started(forks, run, tmp_path / "second")
    worker.close()


@pytest.mark.thorough
def test_a_forked_run_that_fails_says_why(tmp_path: Path, forks: Forks) -> None:
    run = run_of_file(tmp_path, {"data.source": "/nowhere/at/all.txt"})
    with pytest.raises(RunError, match=r"optimizers/baseline/seed-0.*/nowhere/at/all.txt"):
        _work(run, tmp_path / "a", forks)


def test_what_is_forked(tmp_path: Path) -> None:
    run = run_of_file(tmp_path)
    assert can_be_forked(run)
    for fields in (
        {"threads": 2},
        {"processes": 2},
        {"device": "cuda"},
        {"module": "tests.lab.study.conduct.fake_child"},
    ):
        assert not can_be_forked(run.executed(Execution(**fields))), fields
    compiled = change(run.config, {"training.compile": True})
    assert not can_be_forked(RunSpec("e", "a", 0, compiled))


def test_a_process_with_a_second_thread_does_not_fork(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    done = threading.Event()
    second = threading.Thread(target=done.wait)
    second.start()
    try:
        job = json.dumps(run_of_file(tmp_path).executed(_execution(tmp_path / "a")).as_json())
        forker = Forker(ours)
        with pytest.raises(RuntimeError, match="threads in a process that forks"):
            forker._obey({"number": 1, "job": job}, [])
    finally:
        done.set()
        second.join()
        ours.close()
        theirs.close()
