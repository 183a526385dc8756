"""The study's command with real training, all of it in this process.

A process for each of some thirty runs would take minutes; how processes are started, watched and
ended is the subject of ``test_end_to_end.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.train.toys import Killed, killed_after
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.conduct import conductor, script
from tilelab.study.conduct.process import Follower
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child
from tilewise import cli


@contextmanager
def quickly(folder: Path) -> Iterator[None]:
    """Caches go into a folder; no forecast, no measured peak: they have tests of their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TILEWISE_CACHE", str(folder / "cache"))
        patch.setattr(conductor, "forecast_s", lambda *_: {})
        patch.setattr(child, "peak_flops_s", lambda *_: 1e9)
        yield


def run(
    recipe: str, out: Path, kill: str = "", options: Sequence[str] = ()
) -> tuple[int | None, list[str]]:
    """``tilewise study RECIPE``.

    Args:
        recipe: e.g. ``my_study.py:function``.
        out: folder of studies.
        kill: the name (a pattern) of a run that is to be killed half way.
        options: further words of the command.

    Returns:
        its exit status, None if it was killed, and the runs that it began, in order.
    """
    here: list[_Here] = []

    def local(execution: Execution, cores: object, forks: object) -> _Here:
        here.append(_Here(execution, kill))
        return here[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conductor, "Local", local)
        try:
            status = cli.main(["study", recipe, "--out", str(out), "--jobs", "1", *options])
        except Killed:
            return None, here[0].started
    return status, here[0].started if here else []


def records(out: Path) -> dict[str, RunRecord]:
    """Of the one study in a folder, by the names of its runs."""
    (folder,) = store.study_folders(out)
    return store.read_records(folder)


def verdicts(out: Path) -> list[dict[str, Any]]:
    """Of every stage of the one study in a folder."""
    (folder,) = store.study_folders(out)
    found: list[dict[str, Any]] = json.loads((folder / "verdict.json").read_text())["experiments"]
    return found


def page_of(out: Path) -> str:
    """The report of the one study in a folder."""
    (folder,) = store.study_folders(out)
    return (folder / "report.html").read_text()


class _Here:
    """A place whose runs are over when they have started; see ``conduct.pool.Place``."""

    def __init__(self, execution: Execution, kill: str) -> None:
        self.execution, self.kill = execution, kill
        self.started: list[str] = []

    def start(self, run: RunSpec, running: Sequence[object]) -> _Ended:
        run = run.executed(self.execution)
        self.started.append(run.name)
        if self.kill and re.fullmatch(self.kill, run.name):
            with killed_after(run.config.steps // 2):
                child.work(run.executed(self.execution, checkpoint_every_s=0.0))
        work = script.work if run.config.learning.external else child.work
        work(run)
        return _Ended(run)


class _Ended:
    """See ``conduct.pool.Worker``."""

    over = True

    def __init__(self, run: RunSpec) -> None:
        self.run = run
        self.new_events = Follower(run.record).new

    def result(self) -> RunRecord:
        return RunRecord.read(self.run.record)

    def stop(self) -> None:
        """It has."""

    def close(self, deadline: float = 0.0) -> None:
        """It is."""
