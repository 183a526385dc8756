"""The sources of a report: ``study.json`` and the records of a study, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilelab.study.ask.config import Experiment
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import StoredStudy, read_study, readable_records
from tilelab.study.verdict.judge import unfolded
from tilelab.study.verdict.result import StudyVerdict

__all__ = ["Evidence", "gather"]


@dataclass(frozen=True)
class Evidence:
    """A study, what its runs have written, and what that says.

    Args:
        stored: what was asked, the command, and where it ran.
        records: of every run that has begun and whose record can be read, by the run's name.
        verdict: of the judge.
        folder: of the study.
        experiments: the config's, each with the stages that follow from it; as in the verdict.
        damaged: why the record of a run cannot be read, by the run's name.
    """

    stored: StoredStudy
    records: Mapping[str, RunRecord]
    verdict: StudyVerdict
    folder: Path
    experiments: tuple[Experiment, ...]
    damaged: Mapping[str, str]

    def finals(self, experiment: Experiment, arm: str) -> dict[int, RunRecord]:
        """Return the runs of an arm that count, by seed; those that have not begun are left out."""
        names = {seed: f"{experiment.name}/{arm}/seed-{seed}" for seed in experiment.seeds}
        return {seed: self.records[name] for seed, name in names.items() if name in self.records}


def gather(folder: Path) -> Evidence:
    """Read a study's folder.

    Raises:
        InvalidArgument: it is no study's folder, or its ``study.json`` was changed.
    """
    stored, (records, damaged) = read_study(folder), readable_records(folder)
    experiments, verdict = unfolded(stored.study, records)
    return Evidence(stored, records, verdict, folder, experiments, damaged)
