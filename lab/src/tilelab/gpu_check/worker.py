"""The worker processes of the check: jobs one after the other, each with a limit of time.

``python -m tilelab.gpu_check.worker SETTING`` does jobs ``{"step": .., "job": ..}`` and ends itself
where its GPU context is lost.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import torch

from tilelab.common import worker
from tilelab.gpu_check import steps
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Setting
from tilewise.errors import Unsupported

# The rows of a job of a step.
Run: TypeAlias = Callable[[Setting, str, str], Iterator[Row]]
_MODULE = "tilelab.gpu_check.worker"
_LOST = 3  # the exit status of a process whose GPU context is lost


class Worker:
    """The parent's end of a worker process.

    Args:
        setting: of its jobs.
        parallel: whether there are others beside it.
        command: what to run; the worker of this package, but for tests.
    """

    def __init__(
        self, setting: Setting, parallel: bool = False, command: Sequence[str] = ()
    ) -> None:
        module = [*(command or (sys.executable, "-m", _MODULE)), json.dumps(asdict(setting))]
        self._child = worker.Child(module, environment(setting, parallel))

    def ask(self, step: str, job: str, limit_s: float) -> list[Row]:
        """Return the rows of a job; one says so where the process failed or took too long.

        Args:
            step: of the job.
            job: its name.
            limit_s: how long it may take, the start of the process included.
        """
        try:
            return [Row(**row) for row in self._child.ask({"step": step, "job": job}, limit_s)]
        except worker.ChildError as error:
            found = [Row(**row) for row in error.answers]
            return [*found, Row(step, job, "error", str(error))]

    def close(self) -> None:
        """End the process, if there is one."""
        self._child.close()


def environment(setting: Setting, parallel: bool) -> dict[str, str]:
    """Return a worker's environment: in self-tests with Triton's interpreter."""
    found = worker.environment()
    if setting.self_test:
        found["TRITON_INTERPRET"] = "1"
    elif parallel:
        # One compiler each: the processes are as many as the cores already.
        found |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    return found


def _run_step(setting: Setting, step: str, job: str) -> Iterator[Row]:
    return steps.find(step).run(setting, job)


def do(setting: Setting, step: str, job: str, run: Run = _run_step) -> list[Row]:
    """Return the rows of a job; what it raised is one of them."""
    rows: list[Row] = []
    try:
        for row in run(setting, step, job):
            rows.append(row)  # noqa: PERF402  those before an error are kept
    except Unsupported as error:
        rows.append(Row(step, job, "unsupported", in_short(error)))
    except Exception as error:
        where = traceback.format_exc(limit=-6)
        rows.append(Row(step, job, "error", in_short(error), {"traceback": where}))
    return rows


def _context_is_lost(setting: Setting) -> bool:
    """After an illegal access, whoever caught it, every later call on the GPU fails as well."""
    if setting.self_test:
        return False
    try:
        torch.cuda.synchronize()
        torch.zeros(8, device=setting.device).sum().item()
    except Exception:
        return True
    return False


def main(run: Run = _run_step) -> None:
    """Do jobs until there are no more; the setting is the argument of the command."""
    setting = Setting(**json.loads(sys.argv[1]))

    def perform(job: dict[str, str]) -> Iterator[dict[str, Any]]:
        return (row.as_json() for row in do(setting, job["step"], job["job"], run))

    def after() -> None:
        if _context_is_lost(setting):
            sys.exit(_LOST)
        gc.collect()
        if not setting.self_test:
            torch.cuda.empty_cache()

    worker.serve(perform, after)


if __name__ == "__main__":
    main()
