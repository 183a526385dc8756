"""Compiles what will be timed, in many processes at once; the compilers keep it on disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from tilelab.gpu_check import timed
from tilelab.gpu_check.goals import FLEX
from tilelab.gpu_check.peers import flex
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.speed import attempt, marker

__all__ = ["jobs", "run"]

STEP = "prepare"
_OF_A_SELF_TEST = 2  # cases: nothing is compiled


def jobs(setting: Setting) -> list[str]:
    """Return a job for each timed case."""
    names = [case.name for case in timed.cases(setting.sizes)]
    return names[:_OF_A_SELF_TEST] if setting.self_test else names


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Call ours and FlexAttention once; what does not work says so when it is timed."""
    case = timed.find(setting.sizes, job)
    things = timed.given(setting, case)
    first_s: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        theirs = {} if case.kind == "fp8" else {FLEX: flex(setting, case, things)}
        for ways in (timed.ours(setting, case, things), theirs):
            for backward in (False, True)[: 1 + case.has_backward]:
                direction = "backward" if backward else "forward"
                found = attempt(setting, things, ways, backward=backward)
                first_s.setdefault(direction, {}).update(found.first_s)
            if setting.scratch and FLEX in ways:
                marker(setting, case).touch()
    yield Row(STEP, job, values={"first_call_s": first_s})
