"""The child process: does jobs as they come, and ends itself where its GPU context is lost.

``python -m tilelab.gpu_check.worker SETTING`` reads lines ``{"step": .., "job": ..}`` and writes
lines ``{"row": ..}``, then ``{"done": true}`` for each job. Output of libraries goes to the
standard error.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias

import torch

from tilelab.gpu_check import steps
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilewise.errors import Unsupported

__all__ = ["Run", "do", "in_short", "main"]

# The rows of a job of a step.
Run: TypeAlias = Callable[[Setting, str, str], Iterator[Row]]
_LOST = 3  # the exit status of a process whose GPU context is lost
_LONGEST_NOTE = 300


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


def in_short(error: BaseException) -> str:
    """Return an error in one line."""
    if isinstance(error, Unsupported):
        reasons = [reason for why in error.reasons.values() for reason in why]
        return "; ".join(reasons or [error.what])[:_LONGEST_NOTE]
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words}"[:_LONGEST_NOTE]


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
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nobody else writes between our lines
    _serve(Setting(**json.loads(sys.argv[1])), channel, run)


def _serve(setting: Setting, out: IO[str], run: Run) -> None:
    for line in sys.stdin:
        asked: dict[str, Any] = json.loads(line)
        for row in do(setting, asked["step"], asked["job"], run):
            print(json.dumps({"row": row.as_json()}), file=out, flush=True)
        print(json.dumps({"done": True}), file=out, flush=True)
        if _context_is_lost(setting):
            sys.exit(_LOST)
        gc.collect()
        if not setting.self_test:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
