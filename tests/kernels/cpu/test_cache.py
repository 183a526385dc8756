"""The folder of compiled code: private, whole files only, whoever else writes there."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tilewise.folders import NotPrivate
from tilewise.kernels.cpu.cache import Cache, folder


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "one" / "kernels")


def _keep(cache: Cache, name: str, content: bytes) -> Path:
    draft = cache.draft()
    draft.write_bytes(content)
    return cache.keep(draft, name)


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable of all caches, then the user's cache folder."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    assert folder() == tmp_path / "kernels"
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert folder() == tmp_path / "tilewise" / "kernels"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == tmp_path / ".cache" / "tilewise" / "kernels"


def test_made_private(tmp_path: Path) -> None:
    """Whatever the umask is, also of the folders made on the way."""
    before = os.umask(0)
    try:
        made = Cache(tmp_path / "one" / "two")
        path = _keep(made, "x.so", b"code")
    finally:
        os.umask(before)
    for each in (made.where, made.where.parent, path):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700


def test_found(cache: Cache) -> None:
    """What was kept is found, and nothing else is left in the folder."""
    assert cache.find("x.so") is None
    path = _keep(cache, "x.so", b"code")
    assert cache.find("x.so") == path
    assert path.read_bytes().startswith(b"code")
    assert [each.name for each in cache.where.iterdir()] == ["x.so"]


@pytest.mark.parametrize("content", [b"", b"code", b"code" + bytes(32)])
def test_spoiled(cache: Cache, content: bytes) -> None:
    """A file that is empty, cut or changed is not there."""
    _keep(cache, "x.so", b"code").write_bytes(content)
    assert cache.find("x.so") is None
    assert cache.find(_keep(cache, "x.so", b"code").name) is not None


def test_cut_anywhere(cache: Cache) -> None:
    path = _keep(cache, "x.so", bytes(range(256)))
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert cache.find("x.so") is None


def test_written_by_others(cache: Cache, tmp_path: Path) -> None:
    """A file that others can write, or a link, is not there."""
    path = _keep(cache, "x.so", b"code")
    path.chmod(0o722)
    assert cache.find("x.so") is None
    path.chmod(0o700)
    assert cache.find("x.so") == path
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")
    assert cache.find("x.so") is None


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o770, 0o777])
def test_open_folder(tmp_path: Path, mode: int) -> None:
    where = tmp_path / "kernels"
    where.mkdir()
    where.chmod(mode)
    with pytest.raises(NotPrivate, match=f"mode {mode:o}; required are owner"):
        Cache(where)


def test_open_folder_above(tmp_path: Path) -> None:
    """Who can rename a folder can put another in its place; the sticky bit forbids that."""
    where = tmp_path / "shared" / "kernels"
    Cache(where)
    where.parent.chmod(0o777)
    with pytest.raises(NotPrivate, match="above it"):
        Cache(where)
    where.parent.chmod(0o1777)
    Cache(where)


def test_link_for_a_folder(tmp_path: Path) -> None:
    Cache(tmp_path / "real")
    (tmp_path / "kernels").symlink_to(tmp_path / "real")
    with pytest.raises(NotPrivate, match="no folder of its own"):
        Cache(tmp_path / "kernels")


def test_foreign_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's folder: here, by being another user."""
    Cache(tmp_path / "kernels")
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(NotPrivate, match="it has owner"):
        Cache(tmp_path / "kernels")


def test_many_writers(cache: Cache) -> None:
    """A reader beside writers sees one of the whole files, or none."""
    contents = [bytes([i]) * 100_000 for i in range(8)]
    seen: set[bytes] = set()

    def write(content: bytes) -> None:
        for _ in range(20):
            _keep(cache, "x.so", content)

    writers = [threading.Thread(target=write, args=(content,)) for content in contents]
    for writer in writers:
        writer.start()
    found = 0
    while any(writer.is_alive() for writer in writers):
        path = cache.find("x.so")
        if path is not None:
            found += 1
            seen.add(path.read_bytes()[:-32])
    for writer in writers:
        writer.join()
    assert found > 0
    assert seen <= set(contents)
    assert [each.name for each in cache.where.iterdir()] == ["x.so"]
