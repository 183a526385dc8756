"""The study's command with real training, all of it in this process.

A process for each of some thirty runs would take minutes; how processes are started, watched and
ended is the subject of ``test_end_to_end.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.train.toys import Killed, killed_after
from tilelab.study.conduct import conductor
from tilelab.study.conduct.follow import Follower
from tilelab.study.conduct.process import Setting
from tilelab.study.plan import Task
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child
from tilelab.study.train.child import Job
from tilewise import cli

__all__ = ["page_of", "quickly", "records", "run", "verdicts"]


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

    def local(setting: Setting, cores: object) -> _Here:
        here.append(_Here(setting, kill))
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

    def __init__(self, setting: Setting, kill: str) -> None:
        self.setting, self.kill = setting, kill
        self.started: list[str] = []

    def start(self, task: Task, running: Sequence[object]) -> _Ended:
        self.started.append(task.run.name)
        job = Job.from_json(self.setting.job(task.run))
        if self.kill and re.fullmatch(self.kill, task.run.name):
            job = replace(job, checkpoint_every_s=0.0)
            with killed_after(job.run.config.steps // 2):
                child.work(job)
        child.work(job)
        return _Ended(task, self.setting.record(task.run))


class _Ended:
    """See ``conduct.pool.Worker``."""

    core, over = None, True

    def __init__(self, task: Task, path: Path) -> None:
        self.task, self._path = task, path
        self.new_events = Follower(path).new

    def result(self) -> RunRecord:
        return RunRecord.read(self._path)

    def stop(self) -> None:
        """It has."""

    def close(self, deadline: float = 0.0) -> None:
        """It is."""
