"""The steps, the most important first: each is a list of jobs with a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting


class Step(NamedTuple):
    """A part of the check.

    Args:
        name: of the step.
        budget_s: what it may take; what has not begun by then is skipped.
        job_s: what one job may take before its process is ended.
        parallel: several processes at once: for what compiles much and times nothing.
        module: whose functions ``jobs_of_NAME`` and ``run_NAME`` are its; where there is none,
            ``jobs`` and ``run`` of the module of its name.
    """

    name: str
    budget_s: float
    job_s: float
    parallel: bool = False
    module: str = ""

    def jobs(self, setting: Setting) -> list[str]:
        """Return the names of its jobs, the most important first."""
        found: Callable[[Setting], list[str]] = self._function("jobs_of_")
        return found(setting)

    def run(self, setting: Setting, job: str) -> Iterator[Row]:
        """Do one job."""
        found: Callable[[Setting, str], Iterator[Row]] = self._function("run_")
        return found(setting, job)

    def _function(self, prefix: str) -> Callable[..., Any]:
        module = import_module(f"tilelab.gpu_check.{self.module or self.name}")
        name = prefix + self.name if self.module else prefix.partition("_")[0]
        function: Callable[..., Any] = getattr(module, name)
        return function


# Together they may take more than there is: what one does not use is there for the next.
STEPS = (
    Step("smoke", 60, 60),
    Step("ceilings", 25, 20, module="smoke"),
    Step("accuracy", 130, 60, parallel=True),
    Step("prepare", 100, 60, parallel=True, module="speed"),
    Step("speed", 150, 30),
    Step("training", 60, 40),
    Step("host", 30, 20),
    Step("memory", 30, 20),
    Step("repeat", 30, 15, module="speed"),
    Step("long", 60, 30, module="accuracy"),
    Step("traffic", 60, 40),
    Step("lengths", 200, 30, module="speed"),
)


def find(name: str) -> Step:
    """Return the step of that name."""
    return next(step for step in STEPS if step.name == name)
