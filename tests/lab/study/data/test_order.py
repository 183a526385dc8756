"""The order of windows, a function of seed and step; rows of documents: nothing is lost."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.lab.study.data import texts
from tests.lab.study.records_of import known
from tests.lab.study.train.toys import CONFIG, tokens_of
from tilelab.study.ask.config import change
from tilelab.study.data.order import (
    IGNORED,
    Packed,
    Padded,
    Rows,
    RunRows,
    Stream,
    _mixed,
    attended,
    evaluation_windows,
    shortened,
    strided,
)
from tilelab.study.data.tokens import Documents, Tokens
from tilewise.errors import InvalidArgument

GOLDEN_7 = [12, 62, 22, 32, 2, 52, 72, 42, 82, 36, 46, 86]
GOLDEN_8 = [16, 66, 36]


def _counting(length: int) -> NDArray[Any]:
    """A text whose tokens say where they are."""
    return np.arange(length, dtype=np.uint16)


def _batches(
    length: int, context: int = 8, batch: int = 4, accumulation: int = 1, seed: int = 0
) -> Stream:
    return Stream(texts.tokens_of(_counting(length)), context, batch, accumulation, seed)


def _starts(batches: Stream, steps: int) -> list[int]:
    return [
        int(start)
        for step in range(steps)
        for rows in batches.at(step)
        for start in rows.tokens[:, 0]
    ]


def test_the_order_never_changes() -> None:
    # Written down: a change of the order makes every stored result incomparable.
    assert _starts(_batches(100, context=10, batch=3, seed=7), 4) == GOLDEN_7
    assert _starts(_batches(100, context=10, batch=3, seed=8), 1) == GOLDEN_8


def test_draws_are_those_of_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of seed 1234567
    assert _mixed(np.arange(3, dtype=np.uint64), 1234567).tolist() == known


@given(length=st.integers(9, 200), context=st.integers(1, 8), seed=st.integers(0, 2**40))
def test_an_epoch_goes_once_through_the_text(length: int, context: int, seed: int) -> None:
    batches = _batches(length, context, batch=1, seed=seed)
    offsets = set()
    for epoch in range(3):
        starts = [
            int(batches.at(epoch * batches.windows + index)[0][0][0, 0])
            for index in range(batches.windows)
        ]
        ordered = sorted(starts)
        assert (np.diff(ordered) == context).all()
        assert 0 <= ordered[0] < context
        assert ordered[-1] + context < length  # the last target is in the text too
        assert length - 1 - (ordered[-1] + context) < 2 * context  # and little is left over
        offsets.add(ordered[0])
    assert len(offsets) <= context


def test_the_shortest_text_and_one_that_is_too_short() -> None:
    assert _starts(_batches(9, batch=2), 2) == [0, 0, 0, 0]
    with pytest.raises(InvalidArgument, match=r"8 tokens in the training text.*at least 9.*of 8"):
        _batches(8)
    with pytest.raises(InvalidArgument, match=r"8 tokens in the held-out text.*at least 9"):
        evaluation_windows(_counting(8), 8, 1)
    for stride in (0, 9):  # it leaves gaps
        words = rf"final_stride: got {stride}.*1 to the context 8"
        with pytest.raises(InvalidArgument, match=words):
            strided(_counting(100), 8, stride)


@given(length=st.integers(9, 300), windows=st.integers(1, 50))
def test_evaluation_windows_are_spread_and_do_not_overlap(length: int, windows: int) -> None:
    found = evaluation_windows(_counting(length), 8, windows)
    assert len(found) == min(windows, (length - 1) // 8)
    starts = found.starts
    assert starts[0] == 0
    assert starts[-1] + 8 <= length - 1
    assert (np.diff(starts) >= 8).all()
    if len(found) > 1:
        assert starts[-1] == length - 9  # up to the very end
    for part in found.parts(3):
        assert torch.equal(part.targets, part.tokens + 1)


@given(
    length=st.integers(2, 120),
    context=st.integers(1, 16),
    stride=st.integers(1, 16),
    rows=st.integers(1, 9),
)
def test_a_strided_pass_scores_every_token_once_with_its_context(
    length: int, context: int, stride: int, rows: int
) -> None:
    stride = min(stride, context)
    scored = Counter[int]()
    found = strided(_counting(length), context, stride)
    for part in found.parts(rows):
        assert part.tokens.shape == part.targets.shape
        assert part.tokens.shape[1] == context
        for row in range(len(part.tokens)):
            start = int(part.tokens[row, 0])
            for place in (part.targets[row] != IGNORED).nonzero()[:, 0].tolist():
                target = int(part.targets[row, place])
                assert target == start + place + 1
                scored[target] += 1
                seen = place + 1
                assert seen == target if start == 0 else seen > context - stride
    assert scored == Counter(range(1, length))
    assert len(found) == 1 + max(0, -(-(length - 1 - context) // stride))


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
            for row, numbers in zip(
                mine.tokens.tolist(), known(mine.documents).tolist(), strict=True
            ):
                assert numbers == [_document(token) for token in row]
            for token, target in zip(
                mine.tokens.flatten().tolist(), mine.targets.flatten().tolist(), strict=True
            ):
                ends = _document(token) != _document(token + 1)
                assert target == (IGNORED if ends else token + 1)
                hidden += ends
            assert mine.learnt == int((mine.targets >= 0).sum())
    assert hidden > 8
    alone = _tokens(list(range(400)))
    with pytest.raises(InvalidArgument, match="documents of two tokens or more"):
        Padded(alone, 16, 2, 1, 0)
    with pytest.raises(InvalidArgument, match=r"data.packing.*packing=stream"):
        Packed(alone, 16, 2, 1, 0).at(0)


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
    assert torch.equal(known(cut.documents).flatten(), known(whole.documents).flatten())
    assert shortened(Rows(whole.tokens, whole.targets), 16).documents is None


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
            assert torch.equal(part.tokens, plain.tokens)
            inputs, documents = part.model_inputs
            assert torch.equal(inputs, part.tokens)
            counted = part.targets != IGNORED
            assert torch.equal(part.targets[counted], plain.targets[counted])
            targets = np.array(part.targets[counted].tolist())
            of_targets = np.searchsorted(begins, targets, side="right") - 1
            assert documents[counted].tolist() == of_targets.tolist()
            hidden = plain.targets[(plain.targets != IGNORED) & ~counted]
            assert set(hidden.tolist()) <= set(begins.tolist())
            scored += targets.tolist()
        assert len(set(scored)) == len(scored)
    # Strided ones are all there are.
    assert set(scored) == set(range(1, 100)) - set(begins.tolist())


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
