"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tilelab.common.files import DiskFullError, replacing, telling_full_disk, write_atomically


def test_the_new_text_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")
    write_atomically(path, "new: ä")
    assert path.read_text(encoding="utf-8") == "new: ä"
    assert os.listdir(tmp_path) == ["a.json"]


def test_others_may_read_it_as_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


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
