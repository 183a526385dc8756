"""The text of a study: found, capped and split the same way everywhere."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilelab.study.data import corpus
from tilelab.study.data.corpus import Corpus, Piece, load, standard_library
from tilewise.errors import InvalidArgument

CAP = 1 << 24


def _write(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_standard_library_is_split_by_file() -> None:
    first, second = load("stdlib", 0.05, 1 << 20), load("stdlib", 0.05, 1 << 20)
    assert first == second
    assert first.files > 20
    assert b"import" in first.held_out
    assert 0.02 < len(first.held_out) / (len(first.train) + len(first.held_out)) <= 0.05
    pieces = {piece.path: piece.data for piece in standard_library(1 << 20)}
    assert len(first.train) + len(first.held_out) == sum(map(len, pieces.values())) <= 1 << 20
    kept = [path for path, data in pieces.items() if len(data) > 200 and data in first.held_out]
    assert kept
    assert not any(pieces[path] in first.train for path in kept)
    assert first.prepared() == (first.train, first.held_out, None, None)


def test_python_files_are_sorted_capped_and_freed_of_what_varies(tmp_path: Path) -> None:
    names = ("b.py", "a.py", "sub/c.py", "test/no.py", "site-packages/no.py", "a.txt")
    _write(tmp_path, {name: f"[{name}]" for name in names})
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    assert [piece.path for piece in standard_library(CAP, tmp_path)] == ["a.py", "b.py", "sub/c.py"]
    assert (
        standard_library(13, tmp_path) == [Piece("a.py", b"[a.py]"), Piece("b.py", b"[b.py]")][:2]
    )
    assert [piece.path for piece in standard_library(11, tmp_path)] == ["a.py"]


@given(
    sizes=st.lists(st.integers(0, 50), min_size=2, max_size=12).filter(lambda each: sum(each) > 1),
    share=st.floats(0.01, 0.9),
)
def test_a_split_by_file_loses_nothing_and_keeps_to_the_share(
    sizes: list[int], share: float
) -> None:
    pieces = [Piece(f"{index}.txt", bytes([65 + index]) * size) for index, size in enumerate(sizes)]
    try:
        split = corpus._split_files("made up", pieces, share)
    except InvalidArgument:
        assert sum(size > 0 for size in sizes) < 2 or 0 in sizes
        return
    assert not set(split.train) & set(split.held_out)  # whole files
    assert sorted(split.train + split.held_out) == sorted(b"".join(each.data for each in pieces))
    fits = len(split.held_out) <= share * sum(sizes)
    assert fits or len(split.held_out) == min(sizes)
    again = corpus._split_files("made up", pieces, share)
    assert (again.train, again.held_out) == (split.train, split.held_out)


def test_files_are_held_out_by_the_hash_of_their_path() -> None:
    pieces = [Piece(f"{letter}.txt", letter.encode() * 10) for letter in "abcdefghij"]
    split = corpus._split_files("made up", pieces, 0.3)
    ordered = sorted("abcdefghij", key=lambda each: hashlib.sha256(f"{each}.txt".encode()).digest())
    assert split.held_out.decode() == "".join(each * 10 for each in sorted(ordered[:3]))


def test_near_copies_of_other_files_are_not_held_out() -> None:
    def lines(name: str) -> bytes:
        return b"".join(f"line number {at} of the text of {name}\n".encode() for at in range(20))

    family = [Piece(f"{at}.txt", lines("all") + lines(str(at))[:200]) for at in range(40)]
    others = [Piece(f"other {at}.txt", lines(f"file {at}")) for at in range(10)]
    split = corpus._split_files("made up", [*family, *others], 0.1)
    assert split.held_out
    assert b"text of all" not in split.held_out
    split = corpus._split_files("made up", family, 0.1)
    assert split.held_out, "where all are copies, one has to do"


def test_little_of_the_standard_library_that_is_held_out_is_trained_on_too() -> None:
    found = load("stdlib", 0.05, 16 << 20)
    train = set(found.train.split(b"\n"))
    held_out = [line for line in found.held_out.split(b"\n") if len(line) > 30]
    assert sum(line in train for line in held_out) < 0.15 * len(held_out)


def test_a_folder_is_read_whole_in_order(tmp_path: Path) -> None:
    _write(tmp_path, {"b/2.txt": "22", "a.md": "1", "c": "3" * 90, ".hidden": "no", ".git/x": "no"})
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"packed"))
    found = load(str(tmp_path), 0.05, CAP)
    assert found.files == 4
    assert found.name == tmp_path.name
    assert sorted(found.train + found.held_out) == sorted(b"122" + b"3" * 90 + b"packed")
    assert load(str(tmp_path), 0.05, 4).files == 2  # whole files only


def test_one_file_is_cut_at_a_line(tmp_path: Path) -> None:
    lines = "".join(f"line {index}\n" for index in range(100))
    _write(tmp_path, {"text.txt": lines})
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("text.txt", "packed.txt.gz"):
        found = load(str(tmp_path / name), 0.1, CAP)
        assert found.name == name
        assert (found.train + found.held_out).decode() == lines
        assert found.train.endswith(b"\n")
        assert 0.1 <= len(found.held_out) / len(lines) < 0.12
    capped = load(str(tmp_path / "text.txt"), 0.1, 500)
    assert 490 < len(capped.train) + len(capped.held_out) <= 500
    assert (capped.train + capped.held_out).endswith(b"\n")
    _write(tmp_path / "alone", {"only.txt": lines})
    assert (
        load(str(tmp_path / "alone"), 0.1, CAP).train
        == load(str(tmp_path / "text.txt"), 0.1, CAP).train
    )


def test_a_text_of_one_line_is_cut_between_characters(tmp_path: Path) -> None:
    _write(tmp_path, {"text": "é戦😀" * 50})
    for cap in range(400, 412):
        found = load(str(tmp_path / "text"), 0.3, cap)
        assert found.train.decode()
        assert found.held_out.decode()


def test_the_hash_is_of_the_text_and_its_split() -> None:
    hashes = {
        Corpus("a", b"ab", b"c", 1).sha256,
        Corpus("a", b"a", b"bc", 1).sha256,
        Corpus("a", b"ab", b"d", 1).sha256,
    }
    assert len(hashes) == 3
    assert Corpus("a", b"ab", b"c", 1).sha256 == Corpus("b", b"ab", b"c", 9).sha256


def test_wikitext_brings_its_own_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, valid = " \n = T = \n \n One , two . \n Three . \n", " \n = V = \n \n Four ! \n"
    _write(tmp_path / "wikitext-2", {"wiki.train.tokens": train, "wiki.valid.tokens": valid})
    monkeypatch.setenv("TILEWISE_DATA", str(tmp_path))
    for source in ("wikitext-2", str(tmp_path / "wikitext-2")):
        found = load(source, 0.5, CAP)
        assert (found.train, found.held_out) == (train.encode(), valid.encode())
        ready = found.prepared()
        assert ready.train == b"\n= T =\n\nOne, two.\nThree.\n"
        assert ready.held_out == b"\n= V =\n\nFour!\n"
        assert (ready.train_words, ready.held_out_words) == (12, 7)
    capped = load("wikitext-2", 0.5, len(train) - 3)
    assert capped.train.decode() == train[: -len(" Three . \n")]
    assert capped.held_out == found.held_out


def test_the_real_slice_is_found(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    found = load("wikitext-103", 0.05, CAP)
    assert found.name.startswith("wikitext-103")
    assert b"Valkyria Chronicles III" in found.train
    assert b"Homarus gammarus" in found.held_out


def test_wrong_texts_are_clear_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWISE_DATA", raising=False)
    _write(tmp_path, {"empty.txt": "", "torn.gz": "not packed"})
    (tmp_path / "binary").mkdir()
    (tmp_path / "binary" / "a.bin").write_bytes(b"a\0b")
    (tmp_path / "none").mkdir()
    latin = tmp_path / "latin"
    _write(latin, {"wiki.valid.raw": "x"})
    (latin / "wiki.train.raw").write_bytes(b"caf\xe9")
    for source, message in (
        (str(tmp_path / "nowhere"), r"nowhere.*stdlib, wikitext-2, .* or a path that exists"),
        (str(tmp_path / "empty.txt"), r"0 bytes in 1 files.*both training and evaluation"),
        (str(tmp_path / "none"), r"0 bytes in 0 files"),
        (str(tmp_path / "torn.gz"), r"torn\.gz \(Not a gzipped file"),
        (str(tmp_path / "binary"), r"a\.bin, which is not text.*Move it out"),
        (str(latin), r"wiki\.train\.raw, which is not UTF-8"),
        ("wikitext-103", r"no TILEWISE_DATA.*curl"),
    ):
        with pytest.raises(InvalidArgument, match=f"data.source: got .*{message}"):
            load(source, 0.05, CAP)
