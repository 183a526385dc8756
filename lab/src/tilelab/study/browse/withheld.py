"""The arms of a study that may not show their speed: the command line keeps to the verdicts."""

from __future__ import annotations

from pathlib import Path

from tilelab.study.records.store import read_study, readable_records
from tilelab.study.verdict.judge import judge

__all__ = ["WITHHELD", "arm_of", "withheld"]

WITHHELD = "withheld"


def arm_of(run: str) -> str:
    """``experiment/arm`` of the name of a run."""
    return run.rpartition("/")[0]


def withheld(folder: Path) -> dict[str, str]:
    """``experiment/arm`` -> why its speed is not shown; the other arms are not in it.

    All of the study is judged, whatever part of it is to be shown.

    Args:
        folder: of the study.
    """
    verdict = judge(read_study(folder).study, readable_records(folder).whole)
    return {
        f"{experiment.experiment}/{arm.arm}": arm.speed_withheld
        for experiment in verdict.experiments
        for arm in experiment.arms
        if arm.speed_withheld
    }
