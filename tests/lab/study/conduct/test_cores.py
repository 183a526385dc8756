"""Cores: one of them for each run, of all studies on the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tilelab.study.conduct.cores import Cores, lock_folder

Make = Callable[[Sequence[int], str], Cores]


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Make]:
    """The cores of another study, with the folder of its locks."""
    with ExitStack() as stack:
        yield lambda processors, name: stack.enter_context(
            closing(Cores(processors, tmp_path / name))
        )


def test_a_free_core_is_taken_before_one_that_has_a_run(study: Make) -> None:
    cores = study((4, 6), "locks")
    assert cores.choose([]) == 4
    assert cores.choose([4]) == 6
    assert cores.choose([6]) == 4
    assert cores.choose([4, 6]) == 4
    assert cores.choose([4, 6, 4]) == 6
    assert cores.choose([4, None]) == 6


def test_two_studies_do_not_share_a_core(study: Make) -> None:
    ours, theirs = study((0, 1), "locks"), study((0, 1), "locks")
    assert ours.choose([]) == 0
    assert theirs.choose([]) == 1
    assert ours.choose([0]) is None
    # Between two runs a core is still its study's.
    assert theirs.choose([]) == 1
    assert study((0, 1), "locks").choose([]) is None
    ours.close()
    assert theirs.choose([1]) == 0
    assert theirs.choose([0, 1, 1]) == 0


def test_nothing_is_pinned_where_there_are_no_cores(study: Make) -> None:
    assert study((), "locks").choose([]) is None


def test_without_a_place_for_locks_there_are_no_other_studies(study: Make, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    studies = [study((0, 1), "file") for _ in range(2)]
    assert [each.choose([]) for each in studies] == [0, 0]
    for each in studies:
        assert "may share a core" in each.trouble


def test_a_private_folder_is_no_trouble(study: Make) -> None:
    cores = study((0, 1), "locks")
    assert cores.choose([]) == 0
    assert cores.trouble == ""


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _dangling(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def _link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to(path.parent / "elsewhere")


def _writable_by_the_group(path: Path) -> None:
    path.mkdir()
    path.chmod(0o770)


@pytest.mark.parametrize("put", [_fifo, _dangling, _link, _writable_by_the_group])
def test_a_folder_that_another_user_could_have_put_there_is_left_alone(
    study: Make, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    put(tmp_path / "locks")
    cores = study((0, 1), "locks")
    assert cores.choose([]) == 0
    assert str(tmp_path / "locks") in cores.trouble
    assert not [each for each in tmp_path.rglob("*") if each.name == "0"]


def test_the_folder_of_another_user_is_left_alone(
    study: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    cores = study((0,), "locks")
    assert cores.choose([]) == 0
    assert "it has owner" in cores.trouble
    assert not any((tmp_path / "locks").iterdir())


@pytest.mark.parametrize("put", [_fifo, _dangling])
def test_a_lock_that_is_no_file_neither_hangs_nor_is_followed(
    study: Make, tmp_path: Path, put: Callable[[Path], None]
) -> None:
    (tmp_path / "locks").mkdir(mode=0o700)
    put(tmp_path / "locks" / "0")
    cores = study((0, 1), "locks")
    assert cores.choose([]) == 0
    assert str(tmp_path / "locks" / "0") in cores.trouble
    assert not (tmp_path / "locks" / "elsewhere").exists()


def test_locks_are_in_the_runtime_folder_if_it_is_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert lock_folder() == runtime / "tilewise" / "cores"
    runtime.chmod(0o755)
    assert runtime not in lock_folder().parents
