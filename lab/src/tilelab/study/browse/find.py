"""Find what a user names on the command line: a study, an arm of one, or a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tilelab.study.ask.registry import nearest
from tilelab.study.records.events import CorruptRecordError, RunRecord
from tilelab.study.records.store import STUDY, read_study, readable_records, study_folders
from tilelab.study.verdict.judge import judge
from tilewise.errors import InvalidArgument

__all__ = ["WITHHELD", "Found", "arm_of", "find", "find_run", "find_study"]

WITHHELD = "withheld"  # in place of a speed that the verdict does not show

_REQUIRED = (
    "a study (laptop, laptop-0123456789ab or its folder), or in it an arm or a run "
    "(choices/lion, choices/lion/seed-0; another study's: laptop:choices/lion)"
)


@dataclass(frozen=True)
class Found:
    """Part of a study."""

    folder: Path  # of the study
    part: str  # ``""`` for all of it, ``experiment``, ``experiment/arm``, or a run's name
    records: dict[str, RunRecord]  # of the runs of that part that have begun, by name
    damaged: dict[str, str]  # why a record of that part cannot be read, by run
    study_records: dict[str, RunRecord]  # of all runs of the study that have begun

    @property
    def name(self) -> str:
        """The name that the command line takes."""
        return f"{self.folder.name}:{self.part}" if self.part else self.folder.name

    def withheld(self) -> dict[str, str]:
        """``experiment/arm`` -> why its speed is not shown; the other arms are not in it.

        All of the study is judged, whatever part of it is to be shown.
        """
        verdict = judge(read_study(self.folder).study, self.study_records)
        return {
            f"{experiment.experiment}/{arm.arm}": arm.speed_withheld
            for experiment in verdict.experiments
            for arm in experiment.arms
            if arm.speed_withheld
        }


def arm_of(run: str) -> str:
    """``experiment/arm`` of the name of a run."""
    return run.rpartition("/")[0]


def find_study(name: str, out: Path) -> Path:
    """Return the folder of a study: by path, by its folder's name, or the newest of that name.

    Raises:
        InvalidArgument: there is none.
    """
    if (Path(name) / STUDY).is_file():
        return Path(name)
    folders = study_folders(out)
    for folder in folders:
        if name in (folder.name, _study_name(folder)):
            return folder
    known = {known for folder in folders for known in (folder.name, _study_name(folder))}
    came = f"{name!r}; in {out} there is {', '.join(each.name for each in folders) or 'none'}"
    raise InvalidArgument("study", came, _REQUIRED, nearest(name, known))


def find(name: str, out: Path) -> Found:
    """Return the study, experiment, arm or run of that name; without a study's name, of the newest.

    Args:
        name: see the message of the error; a path works too.
        out: folder of studies.

    Raises:
        InvalidArgument: there is none.
        CorruptRecordError: all that there is of it is damaged.
    """
    study, colon, part = name.partition(":")
    if colon and not Path(name).exists():
        return _part(find_study(study, out), part.strip("/"), name)
    if Path(name).is_dir():
        folder, part = _above(Path(name).resolve(), name)
        return _part(folder, part, name)
    folders = study_folders(out)
    if any(name in (folder.name, _study_name(folder)) for folder in folders):
        return _part(find_study(name, out), "", name)
    for folder in folders:
        found = _below(folder, name.strip("/"))
        if found is not None:
            return found
    known = [run for folder in folders[:1] for run in readable_records(folder).whole]
    came = f"{name!r}; in {out} there is {', '.join(each.name for each in folders) or 'none'}"
    raise InvalidArgument("name", came, _REQUIRED, nearest(name, [*known, *_parts(known)]))


def find_run(name: str, out: Path) -> tuple[Path, RunRecord]:
    """Return the folder and the record of the one run that is called so.

    Raises:
        InvalidArgument: there is none, or there are several.
    """
    found = find(name, out)
    if len(found.records) != 1:
        some = f" ({', '.join(list(found.records)[:2])}, ...)" if found.records else ""
        came = f"{name!r}, which is {len(found.records)} runs{some}"
        raise InvalidArgument("run", came, "a single one, e.g. choices/lion/seed-0")
    ((run, record),) = found.records.items()
    return found.folder / "runs" / run, record


def _study_name(folder: Path) -> str:
    """``laptop`` of ``laptop-0123456789ab``."""
    return folder.name.rpartition("-")[0]


def _above(path: Path, name: str) -> tuple[Path, str]:
    """Return the study's folder that a folder lies in, and the part that it is."""
    for folder in (path, *path.parents):
        if (folder / STUDY).is_file():
            part = path.relative_to(folder).as_posix().removeprefix("runs").strip("/.")
            return folder, part
    raise InvalidArgument("name", f"{name!r}, a folder that is in no study", _REQUIRED)


def _part(folder: Path, part: str, name: str) -> Found:
    found = _below(folder, part)
    if found is None and part:
        known = list(readable_records(folder).whole)
        fix = nearest(part, [*known, *_parts(known)])
        raise InvalidArgument("name", f"{name!r}, of which nothing has run", _REQUIRED, fix)
    return found or Found(folder, part, {}, {}, {})


def _below(folder: Path, part: str) -> Found | None:
    """Return the runs of a part; None where nothing of it has run."""
    whole, damaged = readable_records(folder)
    names = [name for name in (*whole, *damaged) if not part or f"{name}/".startswith(f"{part}/")]
    records = {name: whole[name] for name in names if name in whole}
    lost = {name: damaged[name] for name in names if name in damaged}
    if lost and not records:
        raise CorruptRecordError("\n".join(lost.values()))
    return Found(folder, part, records, lost, whole) if records else None


def _parts(runs: list[str]) -> set[str]:
    return set(map(arm_of, runs))
