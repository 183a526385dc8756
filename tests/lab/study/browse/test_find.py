"""What a user names: studies, experiments, arms and runs, by name or by path."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab.study.records_of import experiment_of, stored_in, study_of
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import RECORD
from tilelab.study.browse.show import find, find_run, find_study
from tilelab.study.records import store
from tilewise.errors import InvalidArgument

Made = Callable[[Study, int], Path]


@pytest.fixture
def make(tmp_path: Path) -> Made:
    """make(study, age) -> its folder, finished."""

    def made(study: Study, touched: int) -> Path:
        folder = stored_in(tmp_path, study)
        for path in (folder / store.STUDY, *folder.rglob(RECORD)):
            os.utime(path, (touched, touched))
        return folder

    return made


def test_by_name(tmp_path: Path, make: Made) -> None:
    old = make(study_of(experiment_of("muon", name="other")), 1)
    new = make(study_of(), 2)
    assert find_study("synthetic", tmp_path) == new
    assert find_study(old.name, tmp_path) == old
    assert find_study(str(old), tmp_path / "elsewhere") == old
    assert len(find("synthetic", tmp_path).records) == 9
    assert find("optimizers/lion", tmp_path).records.keys() == {
        f"optimizers/lion/seed-{seed}" for seed in (0, 1, 2)
    }
    assert list(find("optimizers/lion/seed-1", tmp_path).records) == ["optimizers/lion/seed-1"]
    # What the newest study does not have is looked for in older ones.
    assert find("other/muon", tmp_path).folder == old
    named = find(f"{old.name}:other/muon/seed-0", tmp_path)
    assert (named.part, len(named.records)) == ("other/muon/seed-0", 1)
    assert named.name == f"{old.name}:other/muon/seed-0"
    assert find("optimizers", tmp_path).part == "optimizers"


def test_by_path(tmp_path: Path, make: Made) -> None:
    folder = make(study_of(), 1)
    nowhere = tmp_path / "nowhere"
    assert find(str(folder), nowhere).part == ""
    assert find(str(folder / "runs/optimizers/lion"), nowhere).part == "optimizers/lion"
    run = find(str(folder / "runs/optimizers/lion/seed-0"), nowhere)
    assert list(run.records) == ["optimizers/lion/seed-0"]
    assert run.folder == folder


def test_a_single_run(tmp_path: Path, make: Made) -> None:
    folder = make(study_of(), 1)
    place, record = find_run("optimizers/lion/seed-1", tmp_path)
    assert place == folder / "runs/optimizers/lion/seed-1"
    assert (record.start.arm, record.start.seed) == ("lion", 1)
    with pytest.raises(InvalidArgument, match=r"'optimizers/lion', which is 3 runs.*lion/seed-0"):
        find_run("optimizers/lion", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("synthetik", "in .* there is synthetic-"),
        ("optimizers/lino", "Did you mean 'optimizers/lion'"),
        ("synthetic:optimizers/lion/seed-7", "of which nothing has run.*seed-"),
        ("nothing:optimizers", "study: got 'nothing'"),
        ("lion/seed-0", "Did you mean 'optimizers/lion/seed-0'"),
    ],
)
def test_what_is_not_there(tmp_path: Path, make: Made, name: str, message: str) -> None:
    make(study_of(), 1)
    with pytest.raises(InvalidArgument, match=message):
        find(name, tmp_path)


def test_a_folder_that_is_in_no_study(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="in no study"):
        find(str(tmp_path), tmp_path)
    with pytest.raises(InvalidArgument, match="there is none"):
        find_study("laptop", tmp_path)
