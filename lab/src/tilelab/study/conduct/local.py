"""Runs as processes on this machine, one a run."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilelab.study.conduct.cores import Cores
from tilelab.study.conduct.follow import Follower
from tilelab.study.conduct.pool import RunError, Worker
from tilelab.study.conduct.process import Process, Setting, record_after
from tilelab.study.plan import Task
from tilelab.study.records.events import RunRecord

__all__ = ["Local"]


@dataclass(frozen=True)
class Local:
    """This machine.

    Args:
        setting: of the runs.
        cores: to pin runs of one thread to; None for no pinning.
    """

    setting: Setting
    cores: Cores | None = None

    def start(self, task: Task, running: Sequence[Worker]) -> Worker:
        """Start the process of a run; see ``pool.Place``."""
        core = None
        if self.cores is not None and self.setting.threads == self.setting.processes == 1:
            core = self.cores.choose([worker.core for worker in running])
        return _LocalWorker(task, self.setting, core)


class _LocalWorker:
    """One process and the record that it writes; see ``pool.Worker``."""

    def __init__(self, task: Task, setting: Setting, core: int | None) -> None:
        self.task, self.core, self._setting = task, core, setting
        self._follower = Follower(setting.record(task.run))
        self._process = Process(setting, setting.job(task.run, core))
        self.stop, self.close = self._process.stop, self._process.close

    @property
    def over(self) -> bool:
        return self._process.over

    def new_events(self) -> list[dict[str, Any]]:
        return self._follower.new()

    def result(self) -> RunRecord:
        """The record; a process that was killed here is no loss but a failure: the machine is."""
        outcome = self._process.outcome()
        if outcome.code < 0:
            ended = f"the process of {self.task.run.name} was ended by signal {-outcome.code}"
            if outcome.code == -signal.SIGKILL:
                ended += ": out of memory? The same command goes on; fewer --jobs need less"
            raise RunError("\n".join([ended, *outcome.lines]))
        return record_after(self._setting, self.task.run, outcome)
