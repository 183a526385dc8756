"""The records of a study as an SQLite file, for questions that the report does not answer.

It is made from the records, whole or not at all, and nothing ever reads it back. If you delete or
change it, the next report makes it again.

    sqlite3 index.sqlite "select arm, avg(loss) from runs where phase = 'final' group by arm"
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tilelab.common.files import replacing
from tilelab.study.records.events import RunRecord

__all__ = ["INDEX", "write_index"]

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
    """Write the index of a study, from its records by the run's name.

    Raises:
        DiskFullError: there is no room.
    """
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
    """Return the rows of a record in each table."""
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
