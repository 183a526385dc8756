"""Rows of documents: what is in them, what has a target, and that nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.lab.study.train.toys import CONFIG, tokens_of
from tilelab.study.ask.config import change
from tilelab.study.data.order import evaluation_windows, strided
from tilelab.study.data.packing import (
    IGNORED,
    Packed,
    Padded,
    Rows,
    RunRows,
    Stream,
    attended,
    shortened,
)
from tilelab.study.data.tokens import Documents, Tokens
from tilewise.errors import InvalidArgument

BEGINS = [0, 1, 40, 41, 43, 100, 260, 261, 330]


def _tokens(begins: list[int], size: int = 400) -> Tokens:
    """A text of tokens that say where they are."""
    text = tokens_of()
    numbers = np.arange(size, dtype=np.uint16)
    found = Documents(np.array(begins), np.zeros(1, np.int64))
    return replace(text, train=numbers, vocabulary=size, find_documents=lambda: found)


def _document(token: int) -> int:
    return int(np.searchsorted(BEGINS, token, side="right")) - 1


def test_packed_windows_are_those_of_the_stream_apart_by_document() -> None:
    tokens = _tokens(BEGINS)
    stream, packed = (kind(tokens, 16, 3, 2, 5) for kind in (Stream, Packed))
    hidden = 0
    for step in range(8):
        for mine, theirs in zip(packed.at(step), stream.at(step), strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert theirs.documents is None
            assert mine.documents is not None
            for row, numbers in zip(mine.tokens.tolist(), mine.documents.tolist(), strict=True):
                assert numbers == [_document(token) for token in row]
            for token, target in zip(
                mine.tokens.flatten().tolist(), mine.targets.flatten().tolist(), strict=True
            ):
                ends = _document(token) != _document(token + 1)
                assert target == (IGNORED if ends else token + 1)
                hidden += ends
            assert mine.learnt == int((mine.targets >= 0).sum())
    assert hidden > 8


def test_padded_rows_are_every_document_once_an_epoch() -> None:
    tokens = _tokens(BEGINS)
    padded = Padded(tokens, 16, 4, 1, 5)
    ends = [*BEGINS[1:], 400]
    rows = sum(-(-(end - 1 - begin) // 16) for begin, end in zip(BEGINS, ends, strict=True))
    assert rows % 4 == 0  # so that epochs are whole steps
    orders = []
    for epoch in range(2):
        seen, order = Counter[int](), []
        for step in range(epoch * rows // 4, (epoch + 1) * rows // 4):
            (batch,) = padded.at(step)
            assert batch.documents is None
            for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
                length = sum(target != IGNORED for target in targets)
                assert targets[:length] == [token + 1 for token in row[:length]]
                assert targets[length:] == [IGNORED] * (16 - length)
                assert row[length:] == [0] * (16 - length)
                assert len({_document(token) for token in [*row[:length], row[0] + length]}) == 1
                seen.update(targets[:length])
                order.append(row[0])
        # Every token but the first of its document is a target, once.
        assert seen == Counter(set(range(400)) - set(BEGINS))
        orders.append(order)
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


@pytest.mark.parametrize("kind", [Stream, Packed, Padded])
def test_rows_are_a_function_of_seed_and_step(kind: type[Stream]) -> None:
    tokens = _tokens(BEGINS)
    one, again, other = (kind(tokens, 16, 2, 2, seed) for seed in (1, 1, 2))
    for step in (5, 0, 11):
        for mine, theirs in zip(one.at(step), again.at(step), strict=True):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert torch.equal(mine.targets, theirs.targets)
    whole = kind(tokens, 16, 4, 1, 1).at(3)[0]
    assert torch.equal(torch.cat([each.tokens for each in one.at(3)]), whole.tokens)
    assert not torch.equal(other.at(3)[0].tokens, one.at(3)[0].tokens)


def test_shorter_rows_have_the_same_tokens() -> None:
    whole = Packed(_tokens(BEGINS), 16, 3, 1, 5).at(2)[0]
    cut = shortened(whole, 4)
    assert cut.tokens.shape == cut.targets.shape == (12, 4)
    assert torch.equal(cut.tokens.flatten(), whole.tokens.flatten())
    assert torch.equal(cut.targets.flatten(), whole.targets.flatten())
    assert cut.documents is not None
    assert whole.documents is not None
    assert torch.equal(cut.documents.flatten(), whole.documents.flatten())
    assert shortened(Rows(whole.tokens, whole.targets), 16).documents is None


def test_documents_of_one_token_teach_nothing() -> None:
    alone = _tokens(list(range(400)))
    with pytest.raises(InvalidArgument, match="documents of two tokens or more"):
        Padded(alone, 16, 2, 1, 0)
    with pytest.raises(InvalidArgument, match=r"data.packing.*packing=stream"):
        Packed(alone, 16, 2, 1, 0).at(0)


def test_held_out_windows_apart_by_document() -> None:
    text, begins = np.arange(100, dtype=np.uint8), np.array([0, 7, 30, 31, 90])
    whole, apart = (
        [evaluation_windows(text, 10, 9, each), strided(text, 10, 4, each)]
        for each in (None, begins)
    )
    for one, other in zip(whole, apart, strict=True):
        scored: list[int] = []
        for plain, part in zip(one.parts(4), other.parts(4), strict=True):
            assert plain.documents is None
            assert len(plain.model_inputs) == 1
            assert torch.equal(part.inputs, plain.inputs)
            assert torch.equal(part.targets, plain.targets)
            inputs, documents = part.model_inputs
            assert torch.equal(inputs, part.inputs)
            targets = np.array(part.targets[part.counted].tolist())
            of_targets = np.searchsorted(begins, targets, side="right") - 1
            assert documents[part.counted].tolist() == of_targets.tolist()
            hidden = plain.targets[plain.counted & ~part.counted]
            assert set(hidden.tolist()) <= set(begins.tolist())
            scored += part.targets[part.counted].tolist()
        assert len(set(scored)) == len(scored)
    assert set(scored) == set(range(1, 100)) - set(
        begins.tolist()
    )  # strided ones are all there are


@pytest.mark.parametrize("packing", ["stream", "documents", "padded"])
def test_rows_of_a_run_grow_and_count_what_they_teach(packing: str) -> None:
    changes = {
        "data.packing": packing,
        "training.length_warmup": {"start": 4, "steps": 3},
        "budget.steps": 5,
    }
    config, tokens = change(CONFIG, changes), _tokens(BEGINS)
    rows = RunRows(config, tokens, 3)
    whole = RunRows(change(config, {"training.length_warmup.steps": 0}), tokens, 3)
    shapes = [rows.at(step)[1].tokens.shape for step in range(5)]
    assert [tuple(shape) for shape in shapes] == [(8, 4), (4, 8), (4, 8), (2, 16), (2, 16)]
    for step in range(5):
        for mine, theirs in zip(rows.at(step), whole.at(step), strict=True):
            assert torch.equal(mine.targets.flatten(), theirs.targets.flatten())
            assert mine.learnt == theirs.learnt
    expected = (4 + 2 * 8 + 2 * 16) / 5
    found = attended(config, tokens)
    assert found == expected if packing == "stream" else 1 < found < expected
