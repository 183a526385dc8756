"""Where documents begin: files, articles, tokens that reach over a border."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tilelab.study.ask.config import Data
from tilelab.study.data import documents, wikitext
from tilelab.study.data.tokens import CorruptCacheError, prepare

WIKI = (
    " \n = First article = \n \n Some words . \n \n = = A heading = = \n \n More words . \n"
    " a line that says = this = \n = not a title , for nothing blank is before it = \n \n"
    " \n = Second = \n \n Words : 3 @,@ 000 . \n"
)


def _folder(folder: Path, texts: list[str]) -> Path:
    folder.mkdir()
    for number, text in enumerate(texts):
        (folder / f"{number}.txt").write_text(text)
    return folder


def test_files_are_documents(tmp_path: Path) -> None:
    texts = [f"document {number}: " + "words and words " * (3 + number % 7) for number in range(30)]
    source = _folder(tmp_path / "texts", texts)
    tokens = prepare(Data(source=str(source), held_out=0.2), tmp_path / "cache")
    found = []
    for part, begins in (
        (tokens.train, tokens.documents.train),
        (tokens.held_out, tokens.documents.held_out),
    ):
        pieces = np.split(np.asarray(part), begins[1:])
        found += [bytes(piece.tolist()).decode() for piece in pieces]
    assert sorted(found) == sorted(texts)
    again = prepare(Data(source=str(source), held_out=0.2), tmp_path / "cache")
    assert again.documents.train.tolist() == tokens.documents.train.tolist()
    assert len(list((tmp_path / "cache").glob("documents-*.json"))) == 1


def test_the_same_text_in_other_files_has_other_borders(tmp_path: Path) -> None:
    held_out = "something else to be kept apart, as the smallest file of all"
    one = _folder(tmp_path / "one", ["a" * 500, "b" * 500, held_out])
    other = _folder(tmp_path / "other", ["a" * 400, "a" * 100 + "b" * 500, held_out])
    texts = [prepare(Data(source=str(each)), tmp_path / "cache") for each in (one, other)]
    assert texts[0].sha256 == texts[1].sha256
    assert [text.documents.train.tolist() for text in texts] == [[0, 500], [0, 400]]


def test_a_single_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 100)
    found = prepare(Data(source=str(path), held_out=0.1), tmp_path / "cache").documents
    assert (found.train.tolist(), found.held_out.tolist()) == ([0], [0])


def test_articles_begin_with_their_titles() -> None:
    found = wikitext.articles(WIKI)
    assert "".join(found) == WIKI
    assert [each.split("=")[1].strip() for each in found] == ["First article", "Second"]
    assert "".join(map(wikitext.detokenise, found)) == wikitext.detokenise(WIKI)
    assert wikitext.articles("no title\nat all") == ["no title\nat all"]
    assert wikitext.articles(" before\n\n = A = \n \n after") == [
        " before\n\n",
        " = A = \n \n after",
    ]


def test_the_articles_of_wikitext(shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 in the validation text, by its own count."""
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    from tilelab.study.data import corpus

    text = corpus.load("wikitext-103", 0.05, 1 << 20)
    train, held_out = text.documents()
    assert len(held_out) == 60
    prepared = text.prepared()
    assert (sum(train), sum(held_out)) == (len(prepared.train), len(prepared.held_out))
    first = np.cumsum(held_out)[:-1]
    assert all(prepared.held_out[at:].lstrip().startswith(b"= ") for at in first.tolist())


def test_a_token_over_a_border_belongs_to_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = np.array([1, 2, 3], np.int64)
    tokens = np.array([1, 2, 0, 0, 2, 1], np.uint8)  # they begin at bytes 0, 2, 5, 6, 7, 10
    for at_once in (1, 2, 100):
        monkeypatch.setattr(documents, "_AT_ONCE", at_once)
        found = documents.begins([2, 1, 3, 6], tokens, token_bytes)
        assert found.tolist() == [0, 1, 2, 3]
        # The second begins inside the second token, and so does the third: one of them is none.
        assert documents.begins([3, 1, 8], tokens, token_bytes).tolist() == [0, 2]
        assert documents.begins([11, 1], tokens, token_bytes).tolist() == [0]


def test_segments_by_hand() -> None:
    starts = np.array([0, 3, 4, 9])
    numbers, followed = documents.segments(starts, 1, 5)
    assert numbers.tolist() == [0, 0, 1, 2, 2]
    assert followed.tolist() == [True, False, False, True, True]


def test_the_piece_that_a_token_is_in() -> None:
    starts = np.array([0, 3, 4])
    # Windows of four tokens of ten: 0-2 3 | 4-7 | 8-9.
    assert documents.mean_piece(starts, 10, 4, cut_at_starts=False) == (9 + 1 + 16 + 4) / 10
    # Documents from their beginnings: 0-2, 3, 4-7, 8-9; in windows of five 4-8 and 9.
    assert documents.mean_piece(starts, 10, 5, cut_at_starts=True) == (9 + 1 + 25 + 1) / 10


@pytest.mark.parametrize("text", ["{", '{"train": [0]}', '{"train": [0, 3, 2], "held_out": [0]}'])
def test_a_damaged_file_of_borders_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 100)
    tokens = prepare(Data(source=str(path), held_out=0.1), tmp_path / "cache")
    assert tokens.documents.train.tolist() == [0]
    (borders,) = (tmp_path / "cache").glob("documents-*.json")
    borders.write_text(text)
    tokens = prepare(Data(source=str(path), held_out=0.1), tmp_path / "cache")
    with pytest.raises(CorruptCacheError, match=r"documents-.*Delete it"):
        _ = tokens.documents
