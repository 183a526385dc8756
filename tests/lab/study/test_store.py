"""A study's folder: found again, checked, locked.

The index: a picture of the records, whole or not at all.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.records_of import Behaviour, known, records_of, study_of, write
from tilelab.common.files import DiskFullError
from tilelab.study.ask.config import change, config_hash
from tilelab.study.ask.run import RECORD
from tilelab.study.records import store
from tilelab.study.records import store as index
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import INDEX, StoredStudy, write_index
from tilewise.errors import InvalidArgument, TilewiseError
from tilewise.folders import cache_folder

STORED = StoredStudy(study_of(), "tilewise study run x", {"chip": "test"}, "2026-01-02T03:04:05")


def test_what_was_asked_is_kept_as_it_was_first(tmp_path: Path) -> None:
    assert store.begin(tmp_path / "new/a", STORED) == STORED
    later = StoredStudy(STORED.study, "another command", {}, "2027")
    assert store.begin(tmp_path / "new/a", later) == STORED
    assert store.read_study(tmp_path / "new/a") == STORED
    study = study_of()
    other = change(study, {"question": "Another?"})
    assert store.folder_of(study, tmp_path) == tmp_path / f"synthetic-{config_hash(study)}"
    assert store.folder_of(other, tmp_path) != store.folder_of(study, tmp_path)


def test_where_no_folder_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match=r"--out.*a folder"):
        store.begin(tmp_path / "file" / "a", STORED)
    folder = tmp_path / "file" / "a"
    with pytest.raises(InvalidArgument, match=r"--out.*a folder"), store.locked(folder):
        pass

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    required = r"--out.*Permission denied.*can be written"
    with pytest.raises(InvalidArgument, match=required), store.locked(tmp_path):
        pass


def test_a_study_of_an_older_version_can_be_read(tmp_path: Path) -> None:
    """One whose config lacks what was added since: it gets the standard value."""
    store.begin(tmp_path, STORED)
    path = tmp_path / store.STUDY
    values = json.loads(path.read_text())
    del values["study"]["experiments"][0]["baseline"]["training"]["z_loss"]
    text = json.dumps(values["study"], sort_keys=True, separators=(",", ":"))
    values["hash"] = hashlib.sha256(text.encode()).hexdigest()[:12]
    path.write_text(json.dumps(values))
    assert store.read_study(tmp_path).study == STORED.study


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No such file"),
        ("[]", "folder of a study"),
        ("{", "folder of a study"),
        ('{"format": 9}', "of format 9"),
        ("other", "does not have its hash"),
        ("newer", r"optimizer\.name: got 'later'.*study\.json.*version"),
    ],
)
def test_a_folder_that_is_no_study(tmp_path: Path, text: str | None, message: str) -> None:
    store.begin(tmp_path, STORED)
    path = tmp_path / store.STUDY
    if text is None:
        path.unlink()
    elif text in ("other", "newer"):
        values = json.loads(path.read_text())
        values["study"]["question"] = "Which is worse?"
        if text == "newer":
            values["study"]["experiments"][0]["baseline"]["optimizer"]["name"] = "later"
        path.write_text(json.dumps(values))
    else:
        path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        store.read_study(tmp_path)


def test_records_by_the_name_of_their_run(tmp_path: Path) -> None:
    records = records_of(STORED.study, {"lion": Behaviour(diverged={1: 5}, absent=(2,))})
    write(tmp_path, records)
    empty = tmp_path / "runs/optimizers/lion/seed-2"
    empty.mkdir(parents=True)
    (empty / RECORD).write_text("")  # killed before its first line
    found = store.read_records(tmp_path)
    assert set(found) == set(records)
    assert found["optimizers/lion/seed-1"].diverged
    assert store.read_records(tmp_path / "nowhere") == {}


def test_a_record_that_cannot_be_read_does_not_hide_the_others(tmp_path: Path) -> None:
    records = records_of(STORED.study, {})
    write(tmp_path, records)
    lost = next(iter(records))
    path = tmp_path / "runs" / lost / RECORD
    path.unlink()
    path.mkdir()
    found = store.readable_records(tmp_path)
    assert set(found.whole) == set(records) - {lost}
    assert found.damaged == {
        lost: f"{path}: cannot be read (Is a directory). "
        "Move the folder of the run away to train it again."
    }


def test_the_study_worked_on_last_is_the_first(tmp_path: Path) -> None:
    for number, name in enumerate("abc"):
        store.begin(tmp_path / name, STORED)
        os.utime(tmp_path / name / store.STUDY, (number, number))
    write(tmp_path / "a", records_of(STORED.study, {}))
    (tmp_path / "d").mkdir()
    assert [path.name for path in store.study_folders(tmp_path)] == ["a", "c", "b"]
    assert store.study_folders(tmp_path / "nowhere") == []


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with store.locked(tmp_path):
        words = f"another process.*{os.getpid()}"
        with pytest.raises(TilewiseError, match=words), store.locked(tmp_path):
            pass
        assert (tmp_path / ".lock").read_text() == str(os.getpid())
    with store.locked(tmp_path):
        pass


def test_where_studies_and_caches_go(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TILEWISE_STUDIES", "TILEWISE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/you")
    assert store.studies_folder() == Path("studies")
    assert cache_folder() == Path("/home/you/.cache/tilewise")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/tilewise")
    monkeypatch.setenv("TILEWISE_CACHE", "/c")
    monkeypatch.setenv("TILEWISE_STUDIES", "/s")
    assert (cache_folder(), store.studies_folder()) == (Path("/c"), Path("/s"))


def test_a_study_that_never_began_leaves_nothing_and_no_other_is_touched(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "s-0"
    for inside in ("runs/e/a/seed-0", "runs/e/b/seed-0"):
        (folder / inside).mkdir(parents=True)
    for name in ("study.json", ".lock", "runs/e/a/seed-0/.lock"):
        (folder / name).touch()
    (folder / "mine.txt").touch()
    assert store.forget_empty(folder)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    (folder / "mine.txt").unlink()
    assert store.forget_empty(folder)
    assert not folder.exists()

    record = folder / "runs/e/a/seed-0/record.jsonl"
    record.parent.mkdir(parents=True)
    record.touch()
    (folder / "study.json").touch()
    assert not store.forget_empty(folder)
    assert record.exists()
    assert (folder / "study.json").exists()


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
