"""Token caches: made once, whole or not at all, never believed when they are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tilelab.common.files import DiskFullError
from tilelab.study.ask.config import Data
from tilelab.study.data import corpus, wikitext
from tilelab.study.data import tokens as module
from tilelab.study.data.tokens import (
    CorruptCacheError,
    Tokens,
    document_begins,
    mean_piece,
    prepare,
    segments,
)
from tilewise.errors import InvalidArgument

TEXT = "".join(f"line {index} of a text\n" for index in range(200))


@pytest.fixture
def data(tmp_path: Path) -> Data:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return Data(source=str(path), held_out=0.1)


def _same(a: Tokens, b: Tokens) -> bool:
    return (
        a.as_json() == b.as_json()
        and np.array_equal(a.train, b.train)
        and np.array_equal(a.held_out, b.held_out)
    )


def test_tokens_are_the_text(data: Data, tmp_path: Path) -> None:
    made = prepare(data, tmp_path / "cache" / "deep")
    assert made.train.tobytes() + made.held_out.tobytes() == TEXT.encode()
    assert made.train.dtype == made.held_out.dtype == np.uint8
    assert made.vocabulary == len(made.token_bytes) == 256
    assert not made.train.flags.writeable
    assert isinstance(made.train, np.memmap)
    assert made.as_json() == {
        "name": "text.txt",
        "source": data.source,
        "tokenizer": "bytes",
        "sha256": made.sha256,
        "vocabulary": 256,
        "train_tokens": len(made.train),
        "held_out_tokens": len(made.held_out),
        "train_bytes": len(made.train),
        "held_out_bytes": len(made.held_out),
        "train_words": None,
        "held_out_words": None,
    }
    assert json.loads(json.dumps(made.as_json())) == made.as_json()


def test_a_cache_folder_that_cannot_be_made(data: Data, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(InvalidArgument, match=r"cache folder.*TILEWISE_CACHE"):
        prepare(data, tmp_path / "file" / "cache")


def test_another_text_or_split_is_another_cache(data: Data, tmp_path: Path) -> None:
    first = prepare(data, tmp_path)
    second = prepare(data.model_copy(update={"held_out": 0.5}), tmp_path)
    Path(data.source).write_text(TEXT.upper())
    third = prepare(data, tmp_path)
    assert len({each.sha256 for each in (first, second, third)}) == 3
    assert len(list(tmp_path.glob("tokens-*.bin"))) == 3
    assert first.train.tobytes().decode() in TEXT  # the mapped file was left alone
    assert third.train.tobytes().decode() in TEXT.upper()


def test_gpt2_tokens_and_words_of_wikitext(
    shared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_DATA", str(shared_data))
    folder = tmp_path / "wikitext-2"
    folder.mkdir()
    (folder / "wiki.train.tokens").write_text(" \n = T = \n \n One , two @-@ fold . \n")
    (folder / "wiki.valid.tokens").write_text(" \n = V = \n \n A 2 @,@ 500 m run ! \n")
    made = prepare(Data(source=str(folder), tokenizer="gpt2"), tmp_path)
    assert made.train.dtype == np.uint16
    assert made.vocabulary == 50257
    text = "\n= V =\n\nA 2,500 m run!\n"
    assert made.token_bytes[made.held_out].sum() == made.held_out_bytes == len(text)
    assert (made.train_words, made.held_out_words) == (11, 12)
    assert _same(prepare(Data(source=str(folder), tokenizer="gpt2"), tmp_path), made)
    plain = prepare(Data(source=str(folder)), tmp_path)
    assert plain.held_out.tobytes().decode() == text


def _bpe(data: Data, size: int = 280) -> Data:
    return data.model_copy(update={"tokenizer": "bpe", "vocabulary": size})


def test_a_trained_vocabulary_is_of_the_training_text_alone(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = prepare(_bpe(data), tmp_path)
    assert made.vocabulary == len(made.token_bytes) == 280
    parts = (made.train, made.held_out)
    assert "".join(made.decode(part.tolist()) for part in parts) == TEXT
    sizes = [int(made.token_bytes[part].sum()) for part in parts]
    assert sizes == [made.train_bytes, made.held_out_bytes]
    assert made.documents.train.tolist() == [0]
    (path,) = tmp_path.glob("vocabulary-*.json")
    kept = json.loads(path.read_text())
    with monkeypatch.context() as patch:
        patch.setattr(module, "train_vocabulary", None)  # whoever calls it now fails
        assert _same(prepare(_bpe(data), tmp_path), made)
    # Another end of the text is another corpus, and the same vocabulary.
    path.unlink()
    Path(data.source).write_text(TEXT[: -made.held_out_bytes] + "@!" * (made.held_out_bytes // 2))
    other = prepare(_bpe(data), tmp_path)
    assert (other.train_bytes, other.sha256 == made.sha256) == (made.train_bytes, False)
    (path,) = tmp_path.glob("vocabulary-*.json")
    assert json.loads(path.read_text()) == kept


def test_the_vocabulary_is_part_of_what_a_corpus_is(data: Data, tmp_path: Path) -> None:
    made = [prepare(each, tmp_path) for each in (data, _bpe(data), _bpe(data, 281))]
    assert len({each.sha256 for each in made}) == 3
    assert [each.as_json()["vocabulary"] for each in made] == [256, 280, 281]
    assert made[0].sha256 == corpus.load(data.source, 0.1, 1 << 24).sha256  # as ever


@pytest.mark.parametrize("text", ["{", "[]", '{"tokens": [], "merges": [], "sha256": ""}'])
def test_a_damaged_vocabulary_is_said(data: Data, tmp_path: Path, text: str) -> None:
    prepare(_bpe(data), tmp_path)
    (path,) = tmp_path.glob("vocabulary-*.json")
    path.write_text(text)
    with pytest.raises(CorruptCacheError, match=r"vocabulary-.*is damaged.*Delete it"):
        prepare(_bpe(data), tmp_path)


def _flip(path: Path) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[1234] ^= 1
    path.write_bytes(damaged)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a flipped bit": (".bin", _flip),
    "a cut file": (".bin", lambda path: path.write_bytes(path.read_bytes()[:-1])),
    "an empty file": (".bin", lambda path: path.write_bytes(b"")),
    "a missing file": (".bin", Path.unlink),
    "no JSON": (".json", lambda path: path.write_text('{"dtype": ')),
    "other JSON": (".json", lambda path: path.write_text('{"dtype": "uint8"}')),
    "a list": (".json", lambda path: path.write_text("[]")),
    "another checksum": (
        ".json",
        lambda path: path.write_text(path.read_text().replace('"sha256": "', '"sha256": "0')),
    ),
    "another border": (
        ".json",
        lambda path: path.write_text(
            path.read_text().replace('"train_tokens": ', '"train_tokens": 1')
        ),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_named_and_refused(data: Data, tmp_path: Path, damage: str) -> None:
    first = prepare(data, tmp_path)
    suffix, hurt = DAMAGES[damage]
    binary, sidecar = next(tmp_path.glob("tokens-*.bin")), next(tmp_path.glob("tokens-*.json"))
    hurt(binary if suffix == ".bin" else sidecar)
    with pytest.raises(CorruptCacheError, match="damaged") as caught:
        prepare(data, tmp_path)
    assert f"Delete {binary} and {sidecar}" in str(caught.value)
    for path in (binary, sidecar):  # what the message says helps
        path.unlink(missing_ok=True)
    again = prepare(data, tmp_path)
    assert again.train.tobytes() + again.held_out.tobytes() == TEXT.encode()
    assert again.as_json() == first.as_json()


def test_a_crash_before_the_sidecar_leaves_nothing_that_is_read(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_atomically", crash)
        with pytest.raises(KeyboardInterrupt):
            prepare(data, tmp_path)
    assert not list(tmp_path.glob("tokens-*.json"))
    _flip(next(tmp_path.glob("tokens-*.bin")))  # as if the crash had come in the middle
    assert prepare(data, tmp_path).train.tobytes().decode() in TEXT


def test_a_full_disk_is_said_and_leaves_nothing(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(DiskFullError, match=r"no room to write .*tokens-.*free some space"):
            prepare(data, tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]
    assert prepare(data, tmp_path / "cache").train.tobytes().decode() in TEXT


def test_many_at_once_make_it_once(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    write = module._write

    def counted(*arguments: object) -> None:
        calls.append(1)
        write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_write", counted)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: prepare(data, tmp_path), range(8)))
    assert len(calls) == 1
    assert all(_same(each, made[0]) for each in made)


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


def test_the_text_for_tuning_stands_for_the_held_out_one(tmp_path: Path) -> None:
    texts = [f"document {number}: " + "words and words " * (3 + number % 7) for number in range(40)]
    data = Data(source=str(_folder(tmp_path / "texts", texts)), held_out=0.2, tuning=0.2)
    plain = prepare(data.model_copy(update={"tuning": 0.0}), tmp_path / "cache")
    tokens = prepare(data, tmp_path / "cache")
    assert bytes(tokens.held_out) == bytes(plain.held_out)
    assert tokens.sha256 != plain.sha256
    assert "tuning_tokens" not in plain.as_json()
    scored = tokens.scored_on("tuning")
    assert scored.held_out_bytes == tokens.as_json()["tuning_bytes"] == len(scored.held_out)
    borders = scored.documents.held_out
    pieces = np.split(np.asarray(scored.held_out), borders[1:])
    assert {bytes(piece.tolist()).decode() for piece in pieces} <= set(texts)
    assert tokens.scored_on("held-out") is tokens


def test_the_same_text_in_other_files_has_other_borders(tmp_path: Path) -> None:
    held_out = "something else to be kept apart, as the smallest file of all"
    one = _folder(tmp_path / "one", ["a" * 500, "b" * 500, held_out])
    other = _folder(tmp_path / "other", ["a" * 400, "a" * 100 + "b" * 500, held_out])
    texts = [prepare(Data(source=str(each)), tmp_path / "cache") for each in (one, other)]
    assert texts[0].sha256 == texts[1].sha256
    assert [text.documents.train.tolist() for text in texts] == [[0, 500], [0, 400]]


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
    text = corpus.load("wikitext-103", 0.05, 1 << 20)
    train, held_out = text.documents()
    assert len(held_out) == 60
    texts = [part.text for part in text.prepared()]
    assert [sum(train), sum(held_out)] == list(map(len, texts))
    first = np.cumsum(held_out)[:-1]
    assert all(texts[1][at:].lstrip().startswith(b"= ") for at in first.tolist())


def test_a_token_over_a_border_belongs_to_where_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = np.array([1, 2, 3], np.int64)
    tokens = np.array([1, 2, 0, 0, 2, 1], np.uint8)  # they begin at bytes 0, 2, 5, 6, 7, 10
    for at_once in (1, 2, 100):
        monkeypatch.setattr("tilelab.study.data.tokens._AT_ONCE", at_once)
        found = document_begins([2, 1, 3, 6], tokens, token_bytes)
        assert found.tolist() == [0, 1, 2, 3]
        # The second begins inside the second token, and so does the third: one of them is none.
        assert document_begins([3, 1, 8], tokens, token_bytes).tolist() == [0, 2]
        assert document_begins([11, 1], tokens, token_bytes).tolist() == [0]


def test_segments_and_pieces_by_hand() -> None:
    starts = np.array([0, 3, 4])
    # Windows of four tokens of ten: 0-2 3 | 4-7 | 8-9.
    assert mean_piece(starts, 10, 4, cut_at_starts=False) == (9 + 1 + 16 + 4) / 10
    # Documents from their beginnings: 0-2, 3, 4-7, 8-9; in windows of five 4-8 and 9.
    assert mean_piece(starts, 10, 5, cut_at_starts=True) == (9 + 1 + 25 + 1) / 10
    starts = np.array([0, 3, 4, 9])
    numbers, followed = segments(starts, 1, 5)
    assert numbers.tolist() == [0, 0, 1, 2, 2]
    assert followed.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("text", ["{", '{"train": [0]}', '{"train": [0, 3, 2], "held_out": [0]}'])
def test_a_damaged_file_of_borders_is_said(tmp_path: Path, text: str) -> None:
    path = tmp_path / "text.txt"
    path.write_text("one line\n" * 100)
    tokens = prepare(Data(source=str(path), held_out=0.1), tmp_path / "cache")
    assert tokens.documents.train.tolist() == tokens.documents.held_out.tolist() == [0]
    (borders,) = (tmp_path / "cache").glob("documents-*.json")
    borders.write_text(text)
    tokens = prepare(Data(source=str(path), held_out=0.1), tmp_path / "cache")
    with pytest.raises(CorruptCacheError, match=r"documents-.*Delete it"):
        _ = tokens.documents
