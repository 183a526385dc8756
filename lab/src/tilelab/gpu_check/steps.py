"""The steps, the most important first: each is a list of jobs with a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting

__all__ = ["STEPS", "Step", "find"]


class Step(NamedTuple):
    """A part of the check.

    Args:
        name: of the step and of its module, which has ``jobs`` and ``run``.
        budget_s: what it may take; what has not begun by then is skipped.
        job_s: what one job may take before its process is ended.
        parallel: several processes at once: for what compiles much and times nothing.
    """

    name: str
    budget_s: float
    job_s: float
    parallel: bool = False

    def jobs(self, setting: Setting) -> list[str]:
        """Return the names of its jobs, the most important first."""
        found: Callable[[Setting], list[str]] = self._module().jobs
        return found(setting)

    def run(self, setting: Setting, job: str) -> Iterator[Row]:
        """Do one job."""
        found: Callable[[Setting, str], Iterator[Row]] = self._module().run
        return found(setting, job)

    def _module(self) -> ModuleType:
        return import_module(f"tilelab.gpu_check.{self.name}")


# Together they may take more than there is: what one does not use is there for the next.
STEPS = (
    Step("smoke", 60, 60),
    Step("ceilings", 25, 20),
    Step("accuracy", 130, 60, parallel=True),
    Step("prepare", 100, 60, parallel=True),
    Step("speed", 150, 30),
    Step("training", 60, 40),
    Step("host", 30, 20),
    Step("memory", 30, 20),
    Step("repeat", 30, 15),
    Step("long", 60, 30),
    Step("traffic", 60, 40),
    Step("lengths", 200, 30),
)


def find(name: str) -> Step:
    """Return the step of that name."""
    return next(step for step in STEPS if step.name == name)
