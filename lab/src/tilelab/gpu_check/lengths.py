"""Speed at shorter lengths, as ``speed`` measures it."""

from __future__ import annotations

from collections.abc import Iterator

from tilelab.gpu_check import timed
from tilelab.gpu_check.row import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.speed import measure

__all__ = ["jobs", "run"]

STEP = "lengths"


def jobs(setting: Setting) -> list[str]:
    """Return a job for each case."""
    return [case.name for case in timed.other_lengths(setting.sizes)]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """Measure the forward pass of a case, and the backward pass."""
    return measure(setting, STEP, job)
