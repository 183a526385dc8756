"""Floors: count tables against a direct computation, compressors against their own definition."""

from __future__ import annotations

import gzip
import lzma
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.study.data.texts import tokens_of
from tests.lab.study.records_of import config_of
from tilelab.study.ask.metrics import Floor
from tilelab.study.data import floors as module
from tilelab.study.data.floors import bits_of, count, floors
from tilelab.study.data.order import RunRows
from tilelab.study.data.tokens import CorruptCacheError, Tokens, prepare
from tilewise.errors import InvalidArgument

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "left", "for", "home")
Pieces = Sequence[Sequence[int]]


def text_of(size: int, seed: int) -> bytes:
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(size)).encode()[:size]


def direct(pieces: Pieces, asked: Sequence[int], order: int, vocabulary: int) -> float:
    """Bits of a text by Witten and Bell's rule, one probability at a time."""
    after: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for piece in pieces:
        for at, symbol in enumerate(piece):
            for back in range(min(order, at) + 1):
                after[tuple(piece[at - back : at])][symbol] += 1

    def probability(context: tuple[int, ...], symbol: int) -> float:
        shorter = probability(context[1:], symbol) if context else 1 / vocabulary
        found = after.get(context)
        if not found:
            return shorter
        return (found[symbol] + len(found) * shorter) / (found.total() + len(found))

    return -sum(
        math.log2(probability(tuple(asked[max(0, at - order) : at]), symbol))
        for at, symbol in enumerate(asked)
    )


@pytest.mark.parametrize(("at_once", "vocabulary"), [(1 << 23, 256), (7, 256), (100, 300)])
def test_count_tables_are_those_of_the_rule(
    at_once: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    learnt, asked = (np.frombuffer(text_of(*each), np.uint8) for each in ((600, 0), (200, 1)))
    borders = np.array([[3, 4], [9, 200], [201, 203], [300, 600]])  # shorter than a context too
    whole = np.array([[0, 600]])
    for pieces in (borders, whole):
        cut = [learnt[first:end].tolist() for first, end in pieces.tolist()]
        found = bits_of(count(learnt, pieces, 4, vocabulary), asked, vocabulary)
        for order, value in enumerate(found):
            expected = direct(cut, asked.tolist(), order, vocabulary)
            assert value == pytest.approx(expected, rel=1e-12), order


def of_words(size: int, seed: int, **changes: Any) -> Tokens:
    """A text of made-up tokens: one for each word with the space behind it."""
    sizes = np.array([len(word) + 1 for word in WORDS])
    draw = np.random.default_rng(seed)
    train, held_out = (draw.integers(len(WORDS), size=each) for each in (size, 100))
    texts = ["".join(f"{WORDS[at]} " for at in part).encode() for part in (train, held_out)]
    values: dict[str, Any] = {
        "tokenizer": "words",
        "token_bytes": sizes,
        "train_bytes": len(texts[0]),
        "held_out_bytes": len(texts[1]),
        "find_text": lambda: (texts[0], texts[1]),
    }
    return tokens_of(train, held_out, len(WORDS), **{**values, **changes})


def test_floors_are_of_what_was_seen_and_of_all(tmp_path: Path) -> None:
    tokens = of_words(500, 0)
    train, held_out = tokens.text()
    pieces = np.array([[0, 40], [60, 200], [499, 500]])
    found: dict[tuple[str, str], Floor] = {
        (each.name, each.text): each for each in floors(tokens, pieces, tmp_path)
    }
    cut = [tokens.train[first:end] for first, end in pieces.tolist()]
    decoded = ["".join(f"{WORDS[at]} " for at in piece).encode() for piece in cut]
    seen, size = b"".join(decoded), len(held_out)
    learnt: dict[str, tuple[Pieces, Pieces]] = {
        "seen": ([list(each) for each in decoded], [each.tolist() for each in cut]),
        "all": ([list(train)], [tokens.train.tolist()]),
    }
    for text, (of_bytes, of_tokens) in learnt.items():
        for order in (1, 2, 3, 4):
            each = found[f"byte table of order {order}", text]
            expected = direct(of_bytes, list(held_out), order, 256) / size
            assert each.value == pytest.approx(expected, rel=1e-12)
            assert each.bytes_seen == sum(map(len, of_bytes))
        for order in (1, 2):
            expected = direct(of_tokens, tokens.held_out.tolist(), order, len(WORDS)) / size
            each = found[f"token table of order {order}", text]
            assert each.value == pytest.approx(expected, rel=1e-12)

    def xz(text: bytes) -> int:
        return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))

    def bits(bytes_: int) -> float:
        return 8 * bytes_ / size

    assert found["gzip -9", "none"].value == bits(len(gzip.compress(held_out, 9)))
    assert found["xz -9e", "none"].value == bits(xz(held_out))
    assert found["xz -9e", "seen"].value == bits(xz(seen + held_out) - xz(seen))
    assert found["xz -9e", "all"].value == bits(xz(train + held_out) - xz(train))
    assert len(found) == 2 + 2 * 7
    every = {each.metric for each in found.values()}
    assert every == {"bits_per_byte"}


@pytest.mark.parametrize("packing", ["stream", "documents", "padded"])
def test_what_a_run_has_seen_is_what_its_batches_have(packing: str, tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in range(12):
        (folder / f"{name}.txt").write_bytes(text_of(700, name))
    changes = {"model.context": 32, "training.batch": 3, "data.held_out": 0.2}
    config = config_of(**changes, **{"data.source": str(folder), "data.packing": packing})
    tokens = prepare(config.data, tmp_path)

    def steps(number: int) -> RunRows:
        longer = config.model_copy(
            update={"budget": config.budget.model_copy(update={"steps": number})}
        )
        return RunRows(longer, tokens, 1)

    few = 10
    pieces = steps(few).seen()
    assert (pieces[1:, 0] > pieces[:-1, 1]).all(), "in order, and they do not touch"
    text = tokens.train.tobytes()
    windows = []
    for step in range(few):
        for rows in steps(few).at(step):
            windows += [
                bytes([*row[: int((target >= 0).sum())], target[target >= 0][-1]])
                if packing == "padded"
                else row.numpy().astype(np.uint8).tobytes()
                for row, target in zip(rows.tokens, rows.targets, strict=True)
            ]
    seen = [text[first:end] for first, end in pieces.tolist()]
    assert all(any(window in piece for piece in seen) for window in windows)
    total, in_windows = sum(map(len, seen)), sum(map(len, windows))
    if packing == "padded":  # a row's last target is the first token of the row after it
        assert in_windows - len(windows) <= total <= in_windows
    else:
        assert total == in_windows + len(pieces), "the last target of a piece was seen too"
    assert steps(10_000).seen().tolist() == [[0, len(tokens.train)]]


def test_floors_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, pieces = of_words(300, 0), np.array([[0, 40]])
    first = floors(tokens, pieces, tmp_path)

    def gone() -> tuple[bytes, bytes]:
        raise AssertionError("the text was read again")

    again = of_words(300, 0, find_text=gone)
    assert floors(again, pieces, tmp_path) == first
    assert all(isinstance(each, Floor) for each in first)
    with pytest.raises(AssertionError, match="read again"):
        floors(again, np.array([[0, 41]]), tmp_path)
    with pytest.raises(AssertionError, match="read again"):
        floors(of_words(300, 0, find_text=gone, sha256="1" * 64), pieces, tmp_path)
    whole = floors(tokens, np.array([[0, 300]]), tmp_path)
    assert [each.value for each in whole if each.text == "seen"] == [
        each.value for each in whole if each.text == "all"
    ]
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    large = {(each.name, each.text) for each in floors(of_words(300, 2), pieces, tmp_path)}
    assert ("byte table of order 4", "seen") in large
    assert not [text for _, text in large if text == "all"], "too long to count and compress"
    (path,) = (each for each in tmp_path.glob("floors-*.json"))
    path.write_text(path.read_text()[:-9])
    with pytest.raises(CorruptCacheError, match=f"{path.name} is damaged"):
        floors(tokens, pieces, tmp_path)


def test_a_text_that_changed_is_refused(tmp_path: Path) -> None:
    tokens = of_words(100, 0, find_text=lambda: (b"another", b"text"))
    with pytest.raises(InvalidArgument, match="has changed since its tokens were made"):
        floors(tokens, np.array([[0, 40]]), tmp_path)
