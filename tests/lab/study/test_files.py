"""Files that are there whole or not at all; and what is said of where a study runs."""

from __future__ import annotations

import errno
import json
import os
import platform
from pathlib import Path

import pytest

from tilelab.common import environment
from tilelab.common.environment import describe, pinnable_cores
from tilelab.common.files import DiskFullError, replacing, telling_full_disk, write_atomically


def test_the_new_text_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    before = os.umask(0o022)
    try:
        write_atomically(path, "new: ä")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644, "others may read it"
    assert path.read_text(encoding="utf-8") == "new: ä"
    assert os.listdir(tmp_path) == ["a.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_loses_nothing_older(tmp_path: Path, code: int) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fill_up() -> None:
        with replacing(path) as part:
            part.write_text("ne")
            raise OSError(code, os.strerror(code))

    with pytest.raises(DiskFullError, match=r"a\.json.*free some space"):
        fill_up()
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_names_what_there_is_no_room_for() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/there/x")
    with pytest.raises(DiskFullError, match="to write /there/x "), telling_full_disk():
        raise error
    with pytest.raises(DiskFullError, match="to write a "), telling_full_disk(Path("a")):
        raise error


def test_other_errors_pass_and_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a"):
        raise ZeroDivisionError
    with pytest.raises(PermissionError), replacing(tmp_path / "a"):
        raise PermissionError(errno.EPERM, "no")
    assert os.listdir(tmp_path) == []


def test_it_says_versions_and_no_names() -> None:
    found = describe(3)
    text = json.dumps(found)
    assert found["threads"] == 3
    assert {"torch", "numpy"} <= found["versions"].keys()
    assert platform.node() not in text or len(platform.node()) < 4
    assert str(Path.home()) not in text


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.commit() == ""


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads cannot be pinned here")
def test_one_processor_of_each_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 5})
    for processor, siblings in ((0, "0,2"), (1, "1,3"), (2, "0,2"), (3, "1,3")):
        folder = tmp_path / f"cpu{processor}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert pinnable_cores(tmp_path) == (0, 1, 5)
    assert pinnable_cores(tmp_path / "nothing") == (0, 1, 2, 3, 5)
