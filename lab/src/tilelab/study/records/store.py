"""A study on disk: ``<out>/<name>-<hash>/`` holds everything of it, and nothing else is needed.

    study.json      what was asked: the config, the command, where it ran (written once)
    runs/...        one folder a run, with its record and its checkpoint
    index.sqlite    the records as tables, made anew from them; for questions in SQL, never believed
    floors.json     what simpler things than a model score on its data; so a report needs no data
    report.html, report.md, verdict.json

The hash is of the config: the same command finds its folder again and goes on; another config is
another folder. Token caches belong to the user, not to a study: studies share them.

The index is written whole or not at all, and nothing ever reads it back. If you delete or change
it, the next report makes it again.

    sqlite3 index.sqlite "select arm, avg(loss) from runs where phase = 'final' group by arm"

``floors.json`` has the floors of each experiment (``ask.metrics.Floor``), by its name. A study that
is older has no such file, and its report no floors.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilelab.common.files import replacing, telling_full_disk, write_atomically
from tilelab.study.ask.config import Study, config_hash, parse
from tilelab.study.ask.metrics import Floor
from tilelab.study.ask.run import RECORD
from tilelab.study.ask.values import earlier, hash_of
from tilelab.study.records.events import CorruptRecordError, RunRecord
from tilewise.errors import InvalidArgument, TilewiseError

FORMAT = 1
STUDY, LOCK = "study.json", ".lock"


@dataclass(frozen=True)
class StoredStudy:
    """The contents of ``study.json``."""

    study: Study
    command: str  # what repeats the study, as typed in a shell
    environment: dict[str, Any]  # where it began: versions, chip, cores, threads, git commit
    began: str  # ISO 8601, UTC


def studies_folder() -> Path:
    """Return the folder of studies: ``$TILEWISE_STUDIES``, or ``studies`` in the working folder."""
    return Path(os.environ.get("TILEWISE_STUDIES") or "studies")


def folder_of(study: Study, out: Path) -> Path:
    """Return the folder of a study below ``out``; it need not be there."""
    return out / f"{study.name}-{config_hash(study)}"


def begin(folder: Path, stored: StoredStudy) -> StoredStudy:
    """Make a study's folder, or find it made: then what it says is kept."""
    with _writable(folder):
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    if (folder / STUDY).exists():
        return read_study(folder)
    values = {
        "format": FORMAT,
        "hash": config_hash(stored.study),
        "began": stored.began,
        "command": stored.command,
        "environment": stored.environment,
        "study": stored.study.model_dump(mode="json"),
    }
    write_atomically(folder / STUDY, json.dumps(values, indent=1) + "\n")
    return stored


def begun(folder: Path) -> bool:
    """Return whether any run of a study has begun."""
    return any((folder / "runs").rglob(RECORD))


def forget_empty(folder: Path) -> bool:
    """Remove the folder of a study of which no run has begun; return whether it was one."""
    if begun(folder):
        return False
    for path in (folder / STUDY, *folder.rglob(LOCK)):  # runs have locks too
        path.unlink(missing_ok=True)
    for path in sorted((folder, *folder.rglob("*")), reverse=True):  # what is inside comes first
        with suppress(OSError):  # not a folder, or not empty: it is not ours
            path.rmdir()
    return True


def read_study(folder: Path) -> StoredStudy:
    """Read a study's ``study.json``; refuse another folder, and a file that was changed."""
    required = f"the folder of a study, with a {STUDY} of format {FORMAT}"
    try:
        values = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise InvalidArgument("folder", f"{folder} of format {values['format']}", required)
        study = _parsed(values["study"], folder / STUDY)
        # As it was written, it may lack what later versions added and hash.
        if values["hash"] not in (config_hash(study), hash_of(values["study"])):
            came = f"{folder / STUDY}, whose config does not have its hash {values['hash']}"
            fix = "It was changed by hand: start a new study."
            raise InvalidArgument("folder", came, "the config as it was written", fix)
        return StoredStudy(study, values["command"], values["environment"], values["began"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidArgument):
            raise
        fix = "`tilewise study list` shows what there is."
        raise InvalidArgument("folder", f"{folder} ({error})", required, fix) from None


def _parsed(study: dict[str, Any], path: Path) -> Study:
    """Return the study; a complaint about its config says which file has it."""
    try:
        return parse(Study, {**earlier(Study), **study})
    except InvalidArgument as error:
        fix = f"It is in {path}: read a study with the version of tilewise that wrote it."
        raise InvalidArgument(error.argument, error.came, error.required, fix) from None


class Records(NamedTuple):
    """The records of a study, by the run's name in alphabetical order."""

    whole: dict[str, RunRecord]  # of all runs that have begun
    damaged: dict[str, str]  # why a record cannot be read


def read_records(folder: Path) -> dict[str, RunRecord]:
    """Return the records of all runs that have begun, by the run's name, in alphabetical order."""
    found = readable_records(folder)
    if found.damaged:
        raise CorruptRecordError("\n".join(found.damaged.values()))
    return found.whole


def readable_records(folder: Path) -> Records:
    """Read every record of a study; one that is damaged does not hide the others."""
    runs = folder / "runs"
    found = Records({}, {})
    for path in sorted(runs.rglob(RECORD)):
        name = path.parent.relative_to(runs).as_posix()
        try:
            record = RunRecord.read(path)
        except CorruptRecordError as error:
            found.damaged[name] = str(error)
            continue
        # A process that was killed before its first line leaves an empty record.
        if record.starts:
            found.whole[name] = record
    return found


def study_folders(out: Path) -> list[Path]:
    """Return the folders of all studies below ``out``, the one that was last worked on first."""
    found = [path.parent for path in out.glob(f"*/{STUDY}")]
    return sorted(found, key=lambda folder: (-worked_on(folder), folder.name))


def worked_on(folder: Path) -> float:
    """Return when a study was last worked on, in seconds since 1970."""
    paths = [folder / STUDY, *(folder / "runs").rglob(RECORD)]
    return max(path.stat().st_mtime for path in paths)


def flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a config, or of what is nested alike, with their dotted paths."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else runs the study of this folder, which is made, while the block lasts.

    The lock is the system's: it goes with the process that holds it, however that ends.

    Raises:
        TilewiseError: another process runs it.
        InvalidArgument: the folder cannot be made, or nothing can be written there.
        DiskFullError: there is no room.
    """
    with ExitStack() as stack:
        with _writable(folder):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("a+"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "unknown"
            message = (
                f"{folder} is being worked on by another process ({holder}): wait for it, end it, "
                "or choose another folder with --out"
            )
            raise TilewiseError(message) from None
        with telling_full_disk(folder / LOCK):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
        yield


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    try:
        with telling_full_disk(folder):
            yield
    except OSError as error:
        required = "a folder that can be written, there or to be made"
        raise InvalidArgument("--out", f"{folder} ({error.strerror})", required) from None


INDEX = "index.sqlite"

_TABLES = """
create table runs (
    run text primary key, experiment text, arm text, seed integer, phase text, candidate real,
    config_hash text, status text, steps integer, starts integer, tokens integer,
    loss real, bits_per_byte real, word_perplexity real, train_wall_s real, train_cpu_s real,
    weights_bytes integer, gradients_bytes integer, optimizer_bytes integer,
    activations_bytes integer, peak_bytes integer, weights_sha256 text, state_sha256 text
);
create table steps (
    run text, step integer, loss real, lr real, gradient_norm real, wall_s real, cpu_s real,
    primary key (run, step)
) without rowid;
create table evaluations (
    run text, step integer, tokens integer, train_wall_s real, train_cpu_s real,
    loss real, bits_per_byte real, word_perplexity real, primary key (run, step)
) without rowid;
create table metrics (
    run text, step integer, metric text, value real, primary key (run, step, metric)
) without rowid;
create table kernels (
    run text, layer integer, kernel text, calls integer, primary key (run, layer, kernel)
) without rowid;
"""


def write_index(folder: Path, records: Mapping[str, RunRecord]) -> Path:
    """Write the index of a study, from its records by the run's name."""
    path = folder / INDEX
    with replacing(path) as temporary:
        try:
            with closing(sqlite3.connect(temporary)) as database:
                database.executescript("pragma journal_mode = off; pragma synchronous = off;")
                database.executescript(_TABLES)
                for name, record in sorted(records.items()):
                    for table, rows in _rows(record).items():
                        _insert(database, table, [{"run": name, **row} for row in rows])
                database.commit()
        except sqlite3.OperationalError as error:
            # SQLite has its own words for a full disk, and no errno: ``replacing`` wants one.
            if getattr(error, "sqlite_errorname", "") not in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
                raise
            raise OSError(errno.ENOSPC, str(error)) from None
    return path


def _insert(database: sqlite3.Connection, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows, which have the names of the table's columns; a row's other values are not."""
    columns = database.execute(f"select name from pragma_table_info('{table}')").fetchall()
    empty = {name: None for (name,) in columns}
    places = ", ".join(f":{name}" for name in empty)
    database.executemany(
        f"insert or replace into {table} values ({places})", [{**empty, **row} for row in rows]
    )


def _rows(record: RunRecord) -> dict[str, list[dict[str, Any]]]:
    return {
        "runs": [_run(record)],
        "steps": [vars(each) for each in record.steps],
        "evaluations": [vars(each) for each in record.evaluations],
        "metrics": [
            {"step": each.step, "metric": metric, "value": value}
            for each in record.evaluations
            for metric, value in each.metrics.items()
        ],
        "kernels": [vars(each) for each in record.kernels.layers] if record.kernels else [],
    }


def _run(record: RunRecord) -> dict[str, Any]:
    """Return the row of a run: of its start, last evaluation, memory and end, with what it did."""
    start, end = record.start, record.end
    parts = (*record.evaluations[-1:], *filter(None, (record.memory, end)))
    of_start = ("experiment", "arm", "seed", "phase", "candidate", "config_hash")
    return {
        **{name: getattr(start, name) for name in of_start},
        **{name: value for each in parts for name, value in vars(each).items()},
        "status": "incomplete" if end is None else end.status,
        "steps": record.steps[-1].step if record.steps else 0,
        "starts": len(record.starts),
    }


FLOORS = "floors.json"

Floors = Mapping[str, tuple[Floor, ...]]  # experiment -> its floors


def read_floors(folder: Path) -> dict[str, tuple[Floor, ...]]:
    """Return the floors in a study's folder, empty where none are stored.

    Raises:
        CorruptRecordError: the file is damaged.
    """
    path = folder / FLOORS
    if not path.exists():
        return {}
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        return {name: tuple(Floor(**each) for each in found) for name, found in said.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        fix = "Delete it: the command that ran the study makes it anew."
        raise CorruptRecordError(f"{path}: not the floors of a study ({error}). {fix}") from None


def write_floors(folder: Path, floors: Floors) -> None:
    """Write the floors of a study into its folder."""
    said = {name: [vars(each) for each in found] for name, found in floors.items()}
    write_atomically(folder / FLOORS, json.dumps(said, indent=1) + "\n")
