"""The order of windows: a function of seed and step, whole epochs, the same however it is cut."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.lab.study.data.texts import tokens_of
from tilelab.study.data.order import Batches, _mixed, evaluation_windows, strided
from tilewise.errors import InvalidArgument

GOLDEN_7 = [12, 62, 22, 32, 2, 52, 72, 42, 82, 36, 46, 86]
GOLDEN_8 = [16, 66, 36]


def _counting(length: int) -> NDArray[Any]:
    """A text whose tokens say where they are."""
    return np.arange(length, dtype=np.uint16)


def _batches(
    length: int, context: int = 8, batch: int = 4, accumulation: int = 1, seed: int = 0
) -> Batches:
    return Batches(tokens_of(_counting(length)), context, batch, accumulation, seed)


def _starts(batches: Batches, steps: int) -> list[int]:
    return [
        int(start)
        for step in range(steps)
        for inputs, _ in batches.at(step)
        for start in inputs[:, 0]
    ]


def test_windows_are_pieces_of_the_text_and_targets_the_next_tokens() -> None:
    for inputs, targets in _batches(1000, accumulation=3).at(5):
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (4, 8)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs, inputs[:, :1] + torch.arange(8))
    assert len(_batches(1000, accumulation=3).at(5)) == 3


def test_the_order_never_changes() -> None:
    # Written down: a change of the order makes every stored result incomparable.
    assert _starts(_batches(100, context=10, batch=3, seed=7), 4) == GOLDEN_7
    assert _starts(_batches(100, context=10, batch=3, seed=8), 1) == GOLDEN_8


def test_draws_are_those_of_splitmix64() -> None:
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]  # of seed 1234567
    assert _mixed(np.arange(3, dtype=np.uint64), 1234567).tolist() == known


def test_steps_are_at_random_access_and_depend_on_the_seed() -> None:
    first, second = _batches(500), _batches(500)
    backwards = {step: first.at(step) for step in reversed(range(40))}
    for step in range(40):
        for (a, b), (c, d) in zip(backwards[step], second.at(step), strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, d)
    assert _starts(_batches(500, seed=1), 5) != _starts(_batches(500, seed=2), 5)


def test_batch_and_accumulation_only_cut_the_same_sequence() -> None:
    whole = _starts(_batches(300, batch=8), 15)
    assert _starts(_batches(300, batch=4, accumulation=2), 15) == whole
    assert _starts(_batches(300, batch=2), 60) == whole


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


def test_offsets_and_orders_differ_between_epochs_and_are_even() -> None:
    batches = _batches(8 * 100 + 8, batch=1, seed=3)
    assert batches.windows == 100
    first = Counter[int]()
    orders = set()
    for epoch in range(400):
        starts = _starts_of_epoch(batches, epoch)
        first[min(starts)] += 1
        orders.add(tuple(start - min(starts) for start in starts[:4]))
    assert set(first) == set(range(8))
    assert all(25 < count < 80 for count in first.values())  # 50 expected, 6.6 its deviation
    assert len(orders) > 395


def _starts_of_epoch(batches: Batches, epoch: int) -> list[int]:
    at = epoch * batches.windows
    return [int(batches.at(step)[0][0][0, 0]) for step in range(at, at + batches.windows)]


def test_a_step_reaches_into_the_next_epoch() -> None:
    batches = _batches(8 * 5 + 8, batch=4)  # 5 windows an epoch
    starts = _starts(batches, 5)
    for epoch in range(4):
        assert len({start // 8 for start in starts[5 * epoch : 5 * epoch + 5]}) == 5


def test_the_shortest_text_and_one_that_is_too_short() -> None:
    assert _starts(_batches(9, batch=2), 2) == [0, 0, 0, 0]
    with pytest.raises(InvalidArgument, match=r"8 tokens in the training text.*at least 9.*of 8"):
        _batches(8)
    with pytest.raises(InvalidArgument, match=r"8 tokens in the held-out text.*at least 9"):
        evaluation_windows(_counting(8), 8, 1)


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
        assert part.counted.all()
        assert torch.equal(part.targets, part.inputs + 1)


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
        assert part.inputs.shape == part.targets.shape == part.counted.shape
        assert part.inputs.shape[1] == context
        for row in range(len(part.inputs)):
            start = int(part.inputs[row, 0])
            for place in part.counted[row].nonzero()[:, 0].tolist():
                target = int(part.targets[row, place])
                assert target == start + place + 1
                scored[target] += 1
                seen = place + 1
                assert seen == target if start == 0 else seen > context - stride
    assert scored == Counter(range(1, length))
    assert len(found) == 1 + max(0, -(-(length - 1 - context) // stride))


def test_a_stride_that_leaves_gaps_is_refused() -> None:
    for stride in (0, 9):
        with pytest.raises(
            InvalidArgument, match=rf"final_stride: got {stride}.*1 to the context 8"
        ):
            strided(_counting(100), 8, stride)
