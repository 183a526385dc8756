"""Files of measured blocks: what is read, what is refused and how it is said, and once only."""

from __future__ import annotations

import copy
import json
import os
import stat
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch

from tilewise.errors import TunedBlocksWarning
from tilewise.plan import tuned
from tilewise.plan.tuned import (
    NOTHING,
    Blocks,
    Entry,
    Malformed,
    Place,
    Store,
    Tuned,
    parse,
    text_of,
)

CHIP, FAMILY = "NVIDIA H200", "sm_90"
ENTRIES = (
    Entry(Place("forward", torch.bfloat16, 128, "plain"), Blocks(128, 64, 4, 3), 0.0011, 0.004,
          Blocks(128, 128, 8, 2), 0.00123457, 0.003),
    Entry(Place("dq", torch.float32, 64, "*"), Blocks(32, 16, 8, 1), 0.02, 0.0,
          Blocks(32, 32, 4, 1), 0.03, 0.0),
)  # fmt: skip
FILE = Tuned(CHIP, FAMILY, "2.11.0", "3.6.0", "2026-11-20", ENTRIES)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user with an empty cache folder, and Triton 3.6.1."""
    monkeypatch.delenv("TILEWISE_TUNED", raising=False)
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "installed_triton", lambda: "3.6.1+git0")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the file of the chip is looked for."""
    return tmp_path / "cache" / "tuned" / "nvidia-h200.json"


def find(store: Store | None = None, check: tuned.Check = lambda family, entry: "") -> tuned.Found:
    return (store or Store()).find(CHIP, FAMILY, check)


def refused(match: str, **keywords: Any) -> tuned.Found:
    with pytest.warns(TunedBlocksWarning, match=match) as caught:
        found = find(**keywords)
    assert len(caught) == 1
    assert found.entries == {}
    assert found.refusal
    assert str(found.path) in str(caught[0].message)
    return found


def test_what_is_written_is_read(place: Path) -> None:
    tuned.write(place, FILE)
    assert tuned.read(place) == FILE
    found = find()
    assert found.entries == {entry.place: entry for entry in ENTRIES}
    assert (found.date, found.path, found.refusal) == ("2026-11-20", place, "")
    assert ENTRIES[0].ratio == pytest.approx(1.12234, rel=1e-5)
    assert [path.name for path in place.parent.iterdir()] == [place.name], "no draft is left"
    assert stat.S_IMODE(place.stat().st_mode) == 0o644


def test_without_a_file_there_is_nothing_and_nothing_is_said() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find() == NOTHING


def test_a_file_that_cannot_be_written_leaves_the_one_before(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned.write(place, FILE)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        tuned.write(place, FILE._replace(date="2027-01-01"))
    assert tuned.read(place) == FILE
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_where(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path) -> None:
    """The variable names a file, a folder or nothing; else it is the user's cache folder."""
    assert tuned.path_for(CHIP) == place
    for said in ("off", "OFF"):
        monkeypatch.setenv("TILEWISE_TUNED", said)
        assert tuned.path_for(CHIP) is None
    monkeypatch.setenv("TILEWISE_TUNED", str(tmp_path))
    assert tuned.path_for(CHIP) == tmp_path / "nvidia-h200.json"
    monkeypatch.setenv("TILEWISE_TUNED", str(tmp_path / "mine.json"))
    assert tuned.path_for(CHIP) == tmp_path / "mine.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TILEWISE_TUNED", "~/mine.json")
    assert tuned.path_for(CHIP) == tmp_path / "mine.json"
    monkeypatch.delenv("TILEWISE_TUNED")
    monkeypatch.delenv("TILEWISE_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tuned.path_for("AMD Instinct MI300X (OAM)") == (
        tmp_path / ".cache" / "tilewise" / "tuned" / "amd-instinct-mi300x-oam.json"
    )


def test_the_variable_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path) -> None:
    """Off means off, whatever lies in the cache; a named folder need not have every chip."""
    tuned.write(place, FILE)
    monkeypatch.setenv("TILEWISE_TUNED", "off")
    assert find() == NOTHING
    monkeypatch.setenv("TILEWISE_TUNED", str(tmp_path))
    assert find() == NOTHING
    tuned.write(tmp_path / place.name, FILE._replace(entries=ENTRIES[:1]))
    assert len(find().entries) == 1
    monkeypatch.setenv("TILEWISE_TUNED", str(tmp_path / "absent.json"))
    refused("TILEWISE_TUNED names it and it is not there")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"chip": "NVIDIA H100"}, r"of NVIDIA H100 \(sm_90\), this is NVIDIA H200 \(sm_90\)"),
        ({"family": "sm_80"}, r"of NVIDIA H200 \(sm_80\)"),
        ({"triton": "3.7.1"}, "of Triton 3.7.1, here is 3.6.1"),
        ({"triton": "4.6.0"}, "of Triton 4.6.0"),
    ],
)
def test_what_is_stale_is_refused(place: Path, changed: dict[str, Any], match: str) -> None:
    tuned.write(place, FILE._replace(**changed))
    refused(match)


def test_an_unknown_triton_is_no_match(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuned.write(place, FILE)
    monkeypatch.setattr(tuned, "installed_triton", lambda: "")
    refused("which is here is not known")


def test_one_bad_entry_refuses_all(place: Path) -> None:
    tuned.write(place, FILE)
    refused("entry 1: too large", check=lambda f, entry: "too large" * (entry == ENTRIES[1]))


def test_what_cannot_be_read_is_refused(place: Path) -> None:
    place.mkdir(parents=True)
    refused("it cannot be read")
    place.rmdir()
    place.write_bytes(b"\xff\xfe{}")
    refused("it is no text")


def test_it_is_read_once_and_said_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By however many threads, and whatever becomes of the file afterwards."""
    place.parent.mkdir(parents=True)
    place.write_text("{")
    reads, barrier, store = [], Barrier(8), Store()
    real = tuned.read

    def counted(path: Path) -> Tuned:
        reads.append(path)
        return real(path)

    monkeypatch.setattr(tuned, "read", counted)

    def ask(_: int) -> tuned.Found:
        barrier.wait()
        return find(store)

    with pytest.warns(TunedBlocksWarning) as caught, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert (len(reads), len(caught)) == (1, 1)
    assert all(each is found[0] for each in found)
    tuned.write(place, FILE)
    assert find(store) is found[0], "it stands for the process"
    assert len(find().entries) == 2, "another process sees the new one"


def test_a_warning_that_is_an_error_does_not_stop_the_next_call(place: Path) -> None:
    place.parent.mkdir(parents=True)
    place.write_text("{")
    store = Store()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(TunedBlocksWarning):
            find(store)
        assert find(store).refusal


def test_what_was_found_cannot_be_changed(place: Path) -> None:
    tuned.write(place, FILE)
    entries: Any = find().entries
    with pytest.raises(TypeError):
        entries[ENTRIES[0].place] = ENTRIES[1]


def test_the_version_of_triton_is_read_without_importing_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()

    def version(package: str) -> str:
        if package != "pytorch-triton-rocm":
            raise metadata.PackageNotFoundError(package)
        return "3.6.0"

    monkeypatch.setattr(metadata, "version", version)
    assert tuned.installed_triton() == "3.6.0"

    def absent(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "version", absent)
    assert tuned.installed_triton() == ""


def test_paths_are_shown_without_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tuned.shown(tmp_path / "a" / "b.json") == os.path.join("~", "a", "b.json")
    assert tuned.shown(Path("/elsewhere/b.json")) == "/elsewhere/b.json"


def put(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for step in path[:-1]:
            values = values[step]
        values[path[-1]] = value

    return change


def drop(*path: str | int) -> Callable[[Any], None]:
    def change(values: Any) -> None:
        for step in path[:-1]:
            values = values[step]
        del values[path[-1]]

    return change


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (put("format", value=2), "its format is 2, this version reads 1"),
        (put("format", value=True), "its format is True"),
        (drop("format"), "its format is None"),
        (put("kind", value="a study"), "its kind is 'a study'"),
        (drop("date"), "it has no date"),
        (put("more", value=1), "it has more, which nobody knows"),
        (put("chip", value=""), "it: chip is empty"),
        (put("triton", value=3.6), "it: triton is 3.6, not of type str"),
        (put("date", value="yesterday"), "date is 'yesterday'"),
        (put("entries", value={}), "entries is {}, not of type list"),
        (put("entries", 0, value=[]), "entry 0 is no object"),
        (drop("entries", 1, "width"), "entry 1 has no width"),
        (put("entries", 0, "speed", value=1), "entry 0 has speed"),
        (put("entries", 0, "width", value=128.0), "entry 0: width is 128.0, not of type int"),
        (put("entries", 0, "dtype", value="int32"), "dtype is 'int32', no floating dtype"),
        (put("entries", 0, "dtype", value="Tensor"), "dtype is 'Tensor'"),
        (put("entries", 0, "seconds", value=0), "seconds is 0, too little"),
        (put("entries", 0, "spread", value=-0.1), "spread is -0.1, too little"),
        (put("entries", 0, "seconds", value="1"), "seconds is '1', no finite number"),
        (put("entries", 0, "ratio", value=1.2), "ratio 1.2 is not that of its seconds"),
        (put("entries", 0, "blocks", value="128x64"), "blocks is '128x64', not like"),
        (put("entries", 0, "blocks", value="128x64/4/3 "), "not like 128x64/8/2"),
        (put("entries", 0, "blocks", value="96x64/4/3"), "a side of 96, not a power of two"),
        (put("entries", 0, "blocks", value="128x8/4/3"), "a side of 8"),
        (put("entries", 0, "blocks", value="128x0/4/3"), "a side of 0"),
        (put("entries", 0, "blocks", value="2048x64/4/3"), "a side of 2048"),
        (put("entries", 0, "blocks", value="128x64/6/3"), "6 warps, not a power of two"),
        (put("entries", 0, "blocks", value="128x64/64/3"), "64 warps"),
        (put("entries", 0, "blocks", value="128x64/4/0"), "0 stages"),
        (put("entries", 0, "table_blocks", value="1x1/1/1"), "table_blocks 1x1/1/1 have a side"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused(
    place: Path, change: Callable[[Any], None], match: str
) -> None:
    values = json.loads(text_of(FILE))
    broken = copy.deepcopy(values)
    change(broken)
    with pytest.raises(Malformed, match=match):
        parse(json.dumps(broken))
    place.parent.mkdir(parents=True)
    place.write_text(json.dumps(broken))
    refused(match)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "it is no JSON"),
        ("[]", "it is no JSON object"),
        ('{"format": 1, "format": 1}', "a name comes twice"),
        ('{"format": NaN}', "it has NaN, which is no number"),
        (text_of(FILE)[:-20], "it is no JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: str, match: str) -> None:
    with pytest.raises(Malformed, match=match):
        parse(text)


def test_two_entries_of_one_place_are_refused() -> None:
    text = text_of(FILE._replace(entries=(*ENTRIES, ENTRIES[0]._replace(seconds=0.001))))
    with pytest.raises(Malformed, match="entry 2 is of the same place as entry 0"):
        parse(text)
