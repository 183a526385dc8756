"""The index: a picture of the records, whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, known, records_of, study_of
from tilelab.common.files import DiskFullError
from tilelab.study.records import store as index
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import INDEX, write_index

LION = Behaviour(diverged={0: 4}, stopped={1: 0}, starts=(0,), metric="accuracy")
BEHAVIOURS = {"lion": LION}


def rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def test_it_says_what_the_records_say(tmp_path: Path) -> None:
    records = records_of(study_of(), BEHAVIOURS)
    path = write_index(tmp_path, records)
    assert path == tmp_path / INDEX
    assert [each.name for each in tmp_path.iterdir()] == [INDEX]
    status = dict(rows(path, "select run, status from runs"))
    assert status["optimizers/lion/seed-0"] == "diverged"
    assert status["optimizers/lion/seed-1"] == "incomplete"
    assert len(status) == 9
    (found,) = rows(
        path,
        "select experiment, arm, seed, phase, candidate, steps, starts, tokens, bits_per_byte, "
        "peak_bytes, weights_sha256 from runs where run = 'optimizers/wsd/seed-2'",
    )
    record = records["optimizers/wsd/seed-2"]
    last = record.evaluations[-1]
    assert found == (
        "optimizers", "wsd", 2, "final", None, 40, 1, last.tokens, last.bits_per_byte,
        known(record.memory).peak_bytes, known(record.end).weights_sha256,
    )  # fmt: skip
    assert rows(path, "select starts from runs where run = 'optimizers/lion/seed-2'") == [(2,)]
    steps = sum(len(record.steps) for record in records.values())
    assert rows(path, "select count(*) from steps") == [(steps,)]
    assert rows(path, "select count(*) from steps where loss is null") == [(1,)]
    evaluations = sum(len(record.evaluations) for record in records.values())
    assert rows(path, "select count(*) from evaluations") == [(evaluations,)]
    measured = sum(len(record.evaluations) for name, record in records.items() if "/lion/" in name)
    assert rows(path, "select count(*), min(metric) from metrics") == [(measured, "accuracy")]
    kernels = rows(path, "select distinct kernel from kernels")
    assert kernels == [("tilewise cpu",)]
    name = "optimizers/lion/seed-0"
    path = write_index(tmp_path, {name: RunRecord(starts=records[name].starts)})
    assert rows(path, "select status, steps, loss, peak_bytes from runs") == [
        ("incomplete", 0, None, None)
    ]


def test_a_newer_one_takes_its_place_and_a_full_disk_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = records_of(study_of())
    write_index(tmp_path, {})
    path = write_index(tmp_path, records)
    assert rows(path, "select count(*) from runs") == [(9,)]
    small = f"pragma max_page_count = 2;{index._TABLES}"
    monkeypatch.setattr(index, "_TABLES", small)
    with pytest.raises(DiskFullError, match="free some space"):
        write_index(tmp_path, {})
    assert rows(path, "select count(*) from runs") == [(9,)]
    assert [each.name for each in tmp_path.iterdir()] == [INDEX]
