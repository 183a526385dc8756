"""WikiText: ordinary text from its words without losing any, and its files wherever they are."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilelab.study.data.wikitext import NAMES, detokenise, find, inside, words
from tilewise.errors import InvalidArgument

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


def test_an_ordinary_folder_is_no_wikitext(tmp_path: Path) -> None:
    _make(tmp_path / "some.txt", tmp_path / "wiki.train.tokens")
    assert inside(tmp_path) is None
