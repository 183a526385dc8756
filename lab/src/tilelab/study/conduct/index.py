"""The records of a study as an SQLite file, for questions that the report does not answer.

It is made from the records, whole or not at all, and nothing ever reads it back. If you delete or
change it, the next report makes it again.

    sqlite3 index.sqlite "select arm, avg(loss) from runs where phase = 'final' group by arm"
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Mapping
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
    """Write the index of a study.

    Args:
        folder: of the study.
        records: by the run's name.

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
                    _insert(database, "runs", [_run(name, record)])
                    _insert(database, "steps", _steps(name, record))
                    _insert(database, "evaluations", _evaluations(name, record))
                    _insert(database, "metrics", _metrics(name, record))
                    _insert(database, "kernels", _kernels(name, record))
                database.commit()
        except sqlite3.OperationalError as error:
            # SQLite has its own words for a full disk, and no errno: ``replacing`` wants one.
            if getattr(error, "sqlite_errorname", "") not in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
                raise
            raise OSError(errno.ENOSPC, str(error)) from None
    return path


def _insert(
    database: sqlite3.Connection, table: str, rows: Iterator[tuple[Any, ...]] | list[Any]
) -> None:
    columns = database.execute(f"select count(*) from pragma_table_info('{table}')").fetchone()[0]
    places = ", ".join("?" * columns)
    database.executemany(f"insert or replace into {table} values ({places})", rows)


def _run(name: str, record: RunRecord) -> tuple[Any, ...]:
    start, end, memory = record.start, record.end, record.memory
    last = record.evaluations[-1] if record.evaluations else None
    split = (
        "weights_bytes",
        "gradients_bytes",
        "optimizer_bytes",
        "activations_bytes",
        "peak_bytes",
    )
    return (
        *(name, start.experiment, start.arm, start.seed, start.phase, start.candidate),
        start.config_hash,
        "incomplete" if end is None else end.status,
        record.steps[-1].step if record.steps else 0,
        len(record.starts),
        last and last.tokens,
        *((last.loss, last.bits_per_byte, last.word_perplexity) if last else (None,) * 3),
        *((last.train_wall_s, last.train_cpu_s) if last else (None,) * 2),
        *(getattr(memory, field, None) for field in split),
        *((end.weights_sha256, end.state_sha256) if end else (None,) * 2),
    )


def _steps(name: str, record: RunRecord) -> Iterator[tuple[Any, ...]]:
    for step in record.steps:
        yield (
            *(name, step.step, step.loss, step.lr, step.gradient_norm),
            *(step.wall_s, step.cpu_s),
        )


def _evaluations(name: str, record: RunRecord) -> Iterator[tuple[Any, ...]]:
    for each in record.evaluations:
        yield (
            *(name, each.step, each.tokens, each.train_wall_s, each.train_cpu_s),
            *(each.loss, each.bits_per_byte, each.word_perplexity),
        )


def _metrics(name: str, record: RunRecord) -> Iterator[tuple[Any, ...]]:
    for each in record.evaluations:
        for metric, value in each.metrics.items():
            yield (name, each.step, metric, value)


def _kernels(name: str, record: RunRecord) -> Iterator[tuple[Any, ...]]:
    for layer in record.kernels.layers if record.kernels else ():
        yield (name, layer.layer, layer.kernel, layer.calls)
