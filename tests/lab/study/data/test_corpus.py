"""The text of a study: found, capped and split the same way everywhere; WikiText as written."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilelab.study.data import corpus
from tilelab.study.data.corpus import Corpus, Piece, load, standard_library
from tilelab.study.data.wikitext import NAMES, detokenise, find, inside, last_articles, words
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
    # Nor are near copies: little that is held out is trained on too.
    train = set(first.train.split(b"\n"))
    held_out = [line for line in first.held_out.split(b"\n") if len(line) > 30]
    assert sum(line in train for line in held_out) < 0.15 * len(held_out)
    assert first.prepared() == [(first.train, None), (first.held_out, None)]


def test_python_files_are_sorted_capped_and_freed_of_what_varies(tmp_path: Path) -> None:
    names = ("b.py", "a.py", "sub/c.py", "test/no.py", "site-packages/no.py", "a.txt")
    _write(tmp_path, {name: f"[{name}]" for name in names})
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    assert [piece.path for piece in standard_library(CAP, tmp_path)] == ["a.py", "b.py", "sub/c.py"]
    assert standard_library(13, tmp_path) == [Piece("a.py", b"[a.py]"), Piece("b.py", b"[b.py]")]
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


def test_files_are_held_out_by_the_hash_of_their_path_and_the_hash_is_of_the_split() -> None:
    pieces = [Piece(f"{letter}.txt", letter.encode() * 10) for letter in "abcdefghij"]
    split = corpus._split_files("made up", pieces, 0.3)
    ordered = sorted("abcdefghij", key=lambda each: hashlib.sha256(f"{each}.txt".encode()).digest())
    assert split.held_out.decode() == "".join(each * 10 for each in sorted(ordered[:3]))
    parts = ((b"ab", b"c"), (b"a", b"bc"), (b"ab", b"d"))
    assert len({Corpus("a", *each, 1).sha256 for each in parts}) == 3
    assert Corpus("a", b"ab", b"c", 1).sha256 == Corpus("b", b"ab", b"c", 9).sha256


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


def test_a_pattern_takes_some_files_of_a_folder(tmp_path: Path) -> None:
    files = {f"a/{at}.py": f"x{at} = 1\n" * 9 for at in range(9)}
    _write(tmp_path, {**files, "b.py": "y = 2\n", "c.txt": "no code\n", "a/d/e.py": "z = 3\n"})
    found = load(f"{tmp_path}/**/*.py", 0.2, CAP)
    text = found.train + found.held_out
    assert sorted(text) == sorted("".join([*files.values(), "y = 2\n", "z = 3\n"]).encode())
    assert found.sha256 == load(f"{tmp_path}/**/*.py", 0.2, CAP).sha256
    shallow = load(f"{tmp_path}/a/[0-4].py", 0.2, CAP)
    assert len(shallow.train + shallow.held_out) == sum(len(files[f"a/{at}.py"]) for at in range(5))
    with pytest.raises(InvalidArgument, match="0 bytes in 0 files"):
        load(f"{tmp_path}/*.rst", 0.2, CAP)


def test_a_text_for_tuning_comes_out_of_the_training_text_alone(tmp_path: Path) -> None:
    lines = "".join(f"line {index}\n" for index in range(100))
    files = {f"{at}.txt": f"file {at} has words of its own\n" * (5 + at % 3) for at in range(40)}
    _write(tmp_path, {"one.txt": lines})
    _write(tmp_path / "many", files)
    for source in ("stdlib", str(tmp_path / "one.txt"), str(tmp_path / "many")):
        plain, tuned = (load(source, 0.1, 1 << 20, tuning) for tuning in (0.0, 0.1))
        assert tuned.held_out == plain.held_out
        assert sorted(tuned.train + tuned.tuning) == sorted(plain.train)
        assert 0.05 < len(tuned.tuning) / sum(map(len, tuned.parts)) < 0.12
        assert tuned.sha256 != plain.sha256
        assert tuned.sha256 == load(source, 0.1, 1 << 20, 0.1).sha256
    text = load(str(tmp_path / "one.txt"), 0.1, CAP, 0.1)
    assert (text.train + text.tuning + text.held_out).decode() == lines
    many = load(str(tmp_path / "many"), 0.1, CAP, 0.1)
    kept = [name for name, body in files.items() if body.encode() in many.tuning]
    assert sum(len(files[name]) for name in kept) == len(many.tuning)  # whole files
    assert list(map(sum, many.documents())) == list(map(len, many.parts))
    with pytest.raises(InvalidArgument, match=r"data\.tuning"):
        load(str(tmp_path / "many"), 0.1, 400, 0.001)


def test_wikitext_tunes_on_its_last_articles() -> None:
    text = "".join(f" \n = Title {at} = \n \n words of it, {at} . \n" for at in range(50)).encode()
    for size in (1, 100, 700):
        first = last_articles(text, size)
        assert text[first:].startswith(b" = Title")
        assert len(text) - first <= max(size, 40)
        assert len(text) - first > size - 40
    assert last_articles(b"no title\nat all", 4) == 0


def test_a_text_of_one_line_is_cut_between_characters(tmp_path: Path) -> None:
    _write(tmp_path, {"text": "é戦😀" * 50})
    for cap in range(400, 412):
        found = load(str(tmp_path / "text"), 0.3, cap)
        assert found.train.decode()
        assert found.held_out.decode()


def test_wikitext_brings_its_own_held_out_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, valid = " \n = T = \n \n One , two . \n Three . \n", " \n = V = \n \n Four ! \n"
    _write(tmp_path / "wikitext-2", {"wiki.train.tokens": train, "wiki.valid.tokens": valid})
    monkeypatch.setenv("TILEWISE_DATA", str(tmp_path))
    for source in ("wikitext-2", str(tmp_path / "wikitext-2")):
        found = load(source, 0.5, CAP)
        assert (found.train, found.held_out) == (train.encode(), valid.encode())
        assert found.prepared() == [
            (b"\n= T =\n\nOne, two.\nThree.\n", 12),
            (b"\n= V =\n\nFour!\n", 7),
        ]
    capped = load("wikitext-2", 0.5, len(train) - 3)
    assert capped.train.decode() == train[: -len(" Three . \n")]
    assert capped.held_out == found.held_out


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
        (
            str(tmp_path / "nowhere"),
            r"nowhere.*stdlib, packages, wikitext-2, .* or a path that exists",
        ),
        (str(tmp_path / "empty.txt"), r"0 bytes in 1 files.*both training and evaluation"),
        (str(tmp_path / "none"), r"0 bytes in 0 files"),
        (str(tmp_path / "torn.gz"), r"torn\.gz \(Not a gzipped file"),
        (str(tmp_path / "binary"), r"a\.bin, which is not text.*Move it out"),
        (str(latin), r"wiki\.train\.raw, which is not UTF-8"),
        ("wikitext-103", r"no TILEWISE_DATA.*curl"),
    ):
        with pytest.raises(InvalidArgument, match=f"data.source: got .*{message}"):
            load(source, 0.05, CAP)


GOLDEN = {
    " \n = Robert Boulter = \n \n": "\n= Robert Boulter =\n\n",
    " = = Career = = \n": "== Career ==\n",
    " = = = Film roles = = = \n": "=== Film roles ===\n",
    " a tactical role @-@ playing game , 2 @,@ 500 m and 0 @.@ 7 kg . \n": (
        "a tactical role-playing game, 2,500 m and 0.7 kg.\n"
    ),
    ' becoming " lobster red " on cooking . Then " more " . \n': (
        'becoming "lobster red" on cooking. Then "more".\n'
    ),
    " ( Japanese : 戦場の , lit . 3 ) and [ sic ] ; why ? yes ! \n": (
        "(Japanese: 戦場の, lit. 3) and [sic]; why? yes!\n"
    ),
    " The game 's opening . \n": "The game's opening.\n",
    " the lobsters ' claws at 4 ° N latitude \n": "the lobsters' claws at 4° N latitude\n",
    ' an " open quote . \n " closed " here \n': 'an " open quote.\n"closed" here\n',
}
JOINTS = ("@-@", "@,@", "@.@")


@pytest.mark.parametrize("text", GOLDEN)
def test_ordinary_text_comes_out(text: str) -> None:
    assert detokenise(text) == GOLDEN[text]


def _without_spaces(text: str) -> str:
    text = text.replace(" ", "")
    for joint in JOINTS:
        text = text.replace(joint, joint[1])
    return text


WORDS = ["a", "Bs", "1", "'s", "s", "N", "°", "=", "戦", "U.S.", "a-b", *JOINTS, *".,:;!?()[]{}'\""]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=12), max_size=4))
def test_only_spaces_and_marks_of_joints_go(lines: list[list[str]]) -> None:
    text = "".join(f" {' '.join(line)} \n" if line else " \n" for line in lines)
    out = detokenise(text)
    assert _without_spaces(out) == _without_spaces(text)
    assert out.count("\n") == text.count("\n")


def test_words_are_counted_with_the_ends_of_lines(shared_data: Path) -> None:
    assert words(" \n = A title = \n \n Some text . \n") == 9
    path = shared_data / "wikitext" / "wikitext103.valid.tokens.txt.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    assert words(text) == len(text.strip().split(" ")) == 217_642


def _make(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", ["{name}", "{name}-v1", "."])
def test_official_files_are_found(tmp_path: Path, name: str, folder: str, end: str) -> None:
    suffix = "raw" if name.endswith("raw") else "tokens"
    data = tmp_path / "data"
    place = data / folder.format(name=name)
    if folder == ".":
        data = place = tmp_path / name  # the user names the very folder
    train, valid = place / f"wiki.train.{suffix}{end}", place / f"wiki.valid.{suffix}{end}"
    _make(train, valid)
    assert find(name, data) == (name, train, valid)
    assert inside(place) == (place.name, train, valid)
    for other in NAMES:
        if other != name:
            with pytest.raises(InvalidArgument):
                find(other, data)


def test_single_files_are_found_and_a_prefix_is_called_one(tmp_path: Path) -> None:
    folder = tmp_path / "wikitext"
    part, valid = (
        folder / f"wikitext103.{name}.tokens.txt.gz" for name in ("train-prefix", "valid")
    )
    _make(part, valid)
    assert find("wikitext-103", tmp_path) == ("wikitext-103 (prefix)", part, valid)
    assert find("wikitext-103", folder).train == part
    whole = folder / "wikitext103.train.tokens.txt"
    _make(whole)
    assert find("wikitext-103", tmp_path) == ("wikitext-103", whole, valid)


def test_missing_files_say_how_to_get_them(tmp_path: Path) -> None:
    (tmp_path / "wikitext-2").mkdir()
    _make(tmp_path / "wikitext-2" / "wiki.train.tokens")  # but nothing to evaluate on
    for folder, came in (
        (None, "no TILEWISE_DATA"),
        (tmp_path, f"TILEWISE_DATA={tmp_path} without"),
    ):
        with pytest.raises(InvalidArgument, match=r"data\.source") as caught:
            find("wikitext-2", folder)
        message = str(caught.value)
        assert came in message
        assert "wikitext-2/wiki.train.tokens and wiki.valid.tokens" in message
        for step in ("curl -LO https://", "unzip wikitext-2-v1.zip", "export TILEWISE_DATA="):
            assert step in message
    with pytest.raises(InvalidArgument, match=r"wikitext-103-raw/wiki\.train\.raw"):
        find("wikitext-103-raw", None)
    _make(tmp_path / "some.txt", tmp_path / "wiki.train.tokens")
    assert inside(tmp_path) is None, "an ordinary folder"


def test_the_real_slice_is_found(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    found = load("wikitext-103", 0.05, CAP)
    assert found.name == "wikitext-103 (prefix), 0.5% of its words"
    assert b"Valkyria Chronicles III" in found.train
    assert b"Homarus gammarus" in found.held_out


@pytest.mark.parametrize(
    "name",
    ["wikitext103.train-prefix.tokens", "wikitext103.valid.tokens", "wikitext.valid.raw"],
)
def test_nothing_is_lost_of_the_real_files(shared_data: Path, name: str) -> None:
    text = gzip.decompress((shared_data / "wikitext" / f"{name}.txt.gz").read_bytes()).decode()
    out = detokenise(text)
    assert _without_spaces(out) == _without_spaces(text)
    assert len(out) < 0.97 * len(text)
    for joint in JOINTS:
        assert f" {joint} " not in out
    assert " , " not in out
    assert not any(line != line.strip(" ") for line in out.split("\n"))


def test_packages_are_the_text_beside_torch_that_is_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    for name, data in {
        "torch/__init__.py": b"",
        "torch/a.py": b"x = 1\n" * 40,
        "torch/latin.py": b"# caf\xe9\n",
        "torch/null.py": b"a\0b",
        "other.py": b"y = 2\n" * 5,
        "other.txt": b"no code",
    }.items():
        (tmp_path / name).write_bytes(data)
    origin = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: origin)
    found = corpus.installed_packages(1000)
    assert [each.path for each in found] == ["other.py", "torch/__init__.py", "torch/a.py"]
    assert [each.path for each in corpus.installed_packages(100)] == [
        "other.py",
        "torch/__init__.py",
    ]
    loaded = corpus.load("packages", 0.2, 1000)
    assert loaded.name == "the installed Python packages"
    assert len(loaded.train) + len(loaded.held_out) == 270
