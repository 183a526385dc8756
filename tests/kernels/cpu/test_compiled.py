"""Compiled expressions: when they are, what is said of them, and where they cannot be."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.conftest import ROOT
from tests.contract import assert_same_bits
from tests.kernels.cpu.expressed import as_mask, as_score, needs_compiler
from tilewise import doctor, masks
from tilewise.engine.dispatch import PLANS
from tilewise.errors import SlowPathWarning
from tilewise.folders import NotPrivate
from tilewise.kernels.cpu import compiled
from tilewise.kernels.cpu.compiled import Cache, folder
from tilewise.kernels.cpu.emit import emit, program_of

SLOPE = as_score(lambda s, b, h, m, n: s * 0.5 + (m % 3 - n % 5) * 0.25)


@pytest.fixture
def forgetful(here: Path) -> Iterator[None]:
    """Forget what this process knows of compilers and code, before and after."""

    def forget() -> None:
        compiled._memory = compiled._Memory()
        compiled._found.cache_clear()

    forget()
    yield
    forget()


def _attend(**keywords: Any) -> Tensor:
    q = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(1))
    return tilewise.attention(q, q, q, score=SLOPE, backend="cpu", **keywords)


def _said() -> str:
    q = torch.randn(1, 1, 20, 8)
    return str(tilewise.explain(q, q, q, score=SLOPE, backend="cpu"))


def test_every_instruction_set_has_its_flags() -> None:
    assert compiled._ISA_FLAGS.keys() == doctor.FAST.keys()


def test_not_asked_for(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled by default, and explain says how it would be."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    _attend()
    assert "interpreted; TILEWISE_COMPILE=1 has them compiled" in _said()
    assert not (tmp_path / "kernels").exists()


def test_asking_nests_and_ends(here: Path) -> None:
    """What is asked for inside is forgotten outside, and can be asked for again."""
    for _ in range(2):
        with compiled.compiling():
            with compiled.compiling():
                assert compiled.wanted()
            assert compiled.wanted()
        assert not compiled.wanted()


@needs_compiler
def test_by_environment(forgetful: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment asks for it; explain says what will be, then what was."""
    expected = _attend()
    monkeypatch.setenv("TILEWISE_COMPILE", "1")
    assert "to be compiled when first run, by " in _said()
    PLANS.clear()
    got = _attend()
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    assert "compiled by " in _said()
    assert stat.S_IMODE((here / "kernels").stat().st_mode) == 0o700
    monkeypatch.delenv("TILEWISE_COMPILE")
    with compiled.compiling():
        pass
    assert_same_bits(_attend(), expected, "back in the interpreter")


def _fake_compiler(folder: Path, text: str) -> str:
    path = folder / "fake-c++"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return str(path)


def _no_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", "no-such-compiler")
    return "no C++ compiler runs here (asked: no-such-compiler)"


def _failing_compiler(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    text = '[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "x.cc:1: broken" >&2\nexit 1'
    monkeypatch.setenv("CXX", _fake_compiler(folder, text))
    return "fake-c++ failed: x.cc:1: broken"


def _wrong_output(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("CXX", _fake_compiler(folder, "echo fake 1.0"))
    return "cannot be loaded"


def _open_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (folder / "kernels").mkdir()
    (folder / "kernels").chmod(0o755)
    monkeypatch.setenv("CXX", _fake_compiler(folder, "echo fake 1.0"))
    return "is not private: it has owner"


@pytest.mark.parametrize("spoil", [_no_compiler, _failing_compiler, _wrong_output, _open_folder])
def test_falls_back(
    forgetful: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    spoil: Callable[[Path, pytest.MonkeyPatch], str],
) -> None:
    """The interpreter goes on, a warning says why once, explain always does."""
    expected = _attend()
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path))
    reason = spoil(tmp_path, monkeypatch)
    with compiled.compiling():
        with pytest.warns(SlowPathWarning) as caught:
            got = _attend()
        assert len(caught) == 1
        assert reason in str(caught[0].message)
        assert_same_bits(got, expected, "interpreted")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _attend()
        said = _said()
        assert "interpreted: " in said
        assert reason in said


@needs_compiler
def test_found_again(forgetful: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on disk is not compiled again; a spoiled file is, and is never loaded."""
    with compiled.compiling():
        expected = _attend()
    files = sorted((here / "kernels").glob("*.so"))
    times = {path: path.stat().st_mtime_ns for path in files}
    compiled._memory = compiled._Memory()
    with compiled.compiling():
        assert_same_bits(_attend(), expected, "found on disk")
    assert {path: path.stat().st_mtime_ns for path in files} == times
    for path in files:
        # A new file: what this process has loaded stays as it is.
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content[: len(content) // 2])
        path.chmod(0o700)
    compiled._memory = compiled._Memory()
    with compiled.compiling():
        assert_same_bits(_attend(), expected, "compiled anew")
    assert any(path.stat().st_mtime_ns != times[path] for path in files)


_PROCESS = """
import torch, tilewise
from tests.kernels.cpu.expressed import as_score
score = as_score(lambda s, b, h, m, n: s * 0.125 + (m - n))
q = torch.randn(1, 1, 20, 8, generator=torch.Generator().manual_seed(1))
out = tilewise.attention(q, q, q, score=score, backend="cpu")
print(tilewise.explain(q, q, q, score=score, backend="cpu"))
print(float(out.double().sum()))
"""


@needs_compiler
@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Both compile at once, both run, one file is left."""
    environment = os.environ | {"TILEWISE_CACHE": str(tmp_path), "TILEWISE_COMPILE": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", _PROCESS],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = [process.communicate()[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0] == said[1]
    assert "compiled by" in said[0]
    assert len(list((tmp_path / "kernels").iterdir())) == 1


def test_source_depends_on_the_program_alone() -> None:
    """The same program gives the same source: its digest is its name."""
    values = (
        ("m", 1, 0, 1, (), 0, -1, 0, 0.0),
        ("constant", 1, 0, 0, (), 0, -1, -(2**63), 0.0),
        ("n", 1, 0, 2, (), 0, -1, 0, 0.0),
        ("mul", 1, 1, 2, (1, 2), 1, -1, 0, 0.0),
        ("lt", 0, 1, 4, (0, 3), 0, -1, 0, 0.0),
    )
    program = program_of(("avx2", 32, 64, False, "mask", values, (4,), ()))
    assert emit(program, "") == emit(program, "")
    assert "wholes((-9223372036854775807LL - 1))" in emit(program, "")
    less = tuple(value._replace(integer=1 - 2**63) for value in program.values)
    assert "wholes(-9223372036854775807LL)" in emit(program._replace(values=less), "")


def test_notes() -> None:
    """A call without expressions has nothing to say of them."""
    q = torch.randn(1, 1, 4, 8)
    assert tilewise.explain(q, q, q, mask=masks.causal(), backend="cpu").notes == ()
    noted = tilewise.explain(q, q, q, mask=as_mask(lambda b, h, m, n: m >= n), backend="cpu").notes
    assert [name for name, _ in noted] == ["functions"]


# ---- The folder of compiled code: private, whole files only, whoever else writes there.


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
