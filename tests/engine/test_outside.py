"""What certainly reads outside of its tensor is refused; an index that may not leave is clamped."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tests.conftest import ran
from tilewise import BlockMask, attention, attention_varlen, masks, scores
from tilewise.errors import InvalidArgument

S = 64
Q = torch.randn(2, 3, S, 8)
ONE = torch.randn(10)
TABLE = torch.randn(3, 10)
SEEN = torch.ones(10, dtype=torch.bool)
GATE = torch.zeros(S)
GATE[:10] = 1.0
LONG = torch.randn(3, 2 * S - 1)

CERTAIN: dict[str, tuple[dict[str, Any], str]] = {
    "a row": (
        {"score": lambda s, b, h, m, n: s + ONE[m]},
        r"score: got the index 63 \(of indices from 0 to 63\) into dimension 0 of captured "
        r"tensor 0, of shape \[10\], at b 0, h 0, m 63, n 0; .*from 0 to 9 .* Clamp the index",
    ),
    "a key": ({"score": lambda s, b, h, m, n: s * ONE[n]}, "the index 63 .* n 63"),
    "a batch item": ({"score": lambda s, b, h, m, n: s + TABLE[h, 9 + b]}, "the index 10 .* b 1"),
    "a head": ({"score": lambda s, b, h, m, n: s + TABLE[h + 1, 0]}, "the index 3 .* h 2"),
    "below 0": (
        {"score": lambda s, b, h, m, n: s + LONG[h, m - n]},
        r"the index -63 \(of indices from -63 to 63\) into dimension 1",
    ),
    "under a causal mask": (
        {"mask": masks.causal(), "score": lambda s, b, h, m, n: s + TABLE[h, m - n]},
        "the index 63 .* m 63, n 0",
    ),
    "under a window one too wide": (
        {"mask": masks.window(10, 0), "score": lambda s, b, h, m, n: s + TABLE[h, m - n]},
        "the index 10 .*dimension 1",
    ),
    "where it is chosen": (
        {"score": lambda s, b, h, m, n: tilewise.where(m >= 10, s + ONE[m], s)},
        "the index 63",
    ),
    "behind another step": (
        {"score": [lambda s, b, h, m, n: s + ONE[n], scores.softcap(3.0)]},
        "the index 63",
    ),
    "as an index": (
        {"score": lambda s, b, h, m, n: s + LONG[h, torch.arange(10)[m]]},
        "the index 63",
    ),
    "by lengths": ({"score": lambda s, b, h, m, n: s + ONE[m + n.length - 60]}, "the index 67"),
    "of a table of tiles": (
        {"mask": BlockMask.of(masks.causal(), S), "score": lambda s, b, h, m, n: s + ONE[m]},
        "the index 63",
    ),
}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("name", CERTAIN)
def test_what_leaves_for_certain_is_refused(name: str, backend: str) -> None:
    keywords, message = CERTAIN[name]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidArgument, match=message):
            attention(Q, Q, Q, backend=backend, **keywords)


CERTAIN_MASKS: dict[str, tuple[Any, str]] = {
    "a row": (
        lambda b, h, m, n: SEEN[m],
        r"mask: got the index 63 \(of indices from 0 to 63\) into dimension 0 of captured "
        r"tensor 0, of shape \[10\], at b 0, h 0, m 63, n 0; required: an index from 0 to 9\. C",
    ),
    "a key, as numbers": (lambda b, h, m, n: ONE[n] < 9, "the index 63 .* n 63"),
    "below 0": (lambda b, h, m, n: SEEN[m - n - 60], "the index -60 .* m 0, n 0"),
    "beside a part that holds": (
        masks.causal() & (lambda b, h, m, n: SEEN[m]),
        "the index 63 .* m 63, n 0",
    ),
    "in a negation": (
        ~(masks.causal() & (lambda b, h, m, n: SEEN[m])),
        "the index 63 .* m 63",
    ),
    "documents": (
        lambda b, h, m, n: torch.arange(10)[m] == torch.arange(S)[n],
        "the index 63 .*dimension 0",
    ),
    "a batch item of lengths": (lambda b, h, m, n: n < torch.tensor([9])[b], "the index 1 .* b 1"),
}


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
@pytest.mark.parametrize("name", CERTAIN_MASKS)
def test_a_mask_that_leaves_for_certain_is_refused(name: str, backend: str) -> None:
    mask, message = CERTAIN_MASKS[name]
    for _ in range(2):  # the second time from the cache
        with pytest.raises(InvalidArgument, match=message):
            attention(Q, Q, Q, backend=backend, mask=mask)


UNCERTAIN: dict[str, dict[str, Any]] = {
    "inside": {"score": lambda s, b, h, m, n: s + LONG[h, m - n + S - 1]},
    "clamped": {"score": lambda s, b, h, m, n: s + TABLE[h, torch.clamp(m - n, 0, 9)]},
    "not chosen": {"score": lambda s, b, h, m, n: tilewise.where(m < 10, s + ONE[m], s)},
    "times 0": {"score": lambda s, b, h, m, n: s + (m < 10).float() * ONE[m]},
    "times a captured gate": {"score": lambda s, b, h, m, n: s + GATE[m] * ONE[m]},
    "under a mask": {
        "mask": lambda b, h, m, n: n < 10,
        "score": lambda s, b, h, m, n: s + ONE[n],
    },
    "under a composed mask": {
        "mask": masks.causal() & (lambda b, h, m, n: m - n < 10),
        "score": lambda s, b, h, m, n: s + TABLE[h, m - n],
    },
    "under a window": {
        "mask": masks.window(9, 0),
        "score": lambda s, b, h, m, n: s + TABLE[h, m - n],
    },
    "under documents": {
        "mask": masks.causal() & masks.document(torch.arange(S) // 10),
        "score": lambda s, b, h, m, n: s + TABLE[h, m - n],
    },
    "under lengths": {
        "mask": masks.lengths(torch.tensor([10, 4])),
        "score": lambda s, b, h, m, n: s + ONE[n],
    },
    "under a tensor": {
        "mask": lambda b, h, m, n: GATE[m] > 0,
        "score": lambda s, b, h, m, n: s + ONE[m],
    },
    "of a mask, decided by another part": {"mask": lambda b, h, m, n: (m < 10) & (ONE[m] < 9)},
    "of a mask, or by one": {"mask": lambda b, h, m, n: (m >= 10) | SEEN[m]},
    "of a mask, not chosen": {
        "mask": lambda b, h, m, n: tilewise.where(m < 10, SEEN[m], n < 5),
    },
    "of a mask, under a captured part": {
        "mask": lambda b, h, m, n: (GATE[m] > 0) & SEEN[m],
    },
    "of a mask, under a built-in one": {
        "mask": masks.window(9, 0) & (lambda b, h, m, n: SEEN[m - n]),
    },
    "of documents that are longer": {
        "mask": lambda b, h, m, n: torch.arange(2 * S)[m] // 10 == torch.arange(2 * S)[n] // 10,
    },
    "by the score": {"score": lambda s, b, h, m, n: s + ONE[(s * 1000).long()]},
}


@pytest.mark.parametrize("name", UNCERTAIN)
def test_what_is_uncertain_is_clamped(name: str) -> None:
    assert attention(Q, Q, Q, **UNCERTAIN[name]).shape == Q.shape


def _by_row(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return s + ONE[m]


def test_packed_sequences_count_each_by_itself() -> None:
    q = torch.randn(20, 3, 8)
    short, long = torch.tensor([0, 10, 13, 20]), torch.tensor([0, 9, 20])
    attention_varlen(q, q, q, short, short, score=_by_row)
    with pytest.raises(InvalidArgument, match=r"the index 10 .* at b 1, h 0, m 10"):
        attention_varlen(q, q, q, long, long, score=_by_row)
    empty = torch.tensor([0, 0, 20])  # the long sequence has no keys: nothing is read
    none = torch.tensor([0, 20, 20])
    attention_varlen(q, q, q, empty, none, score=_by_row)


def test_many_sequences_are_looked_at_where_they_are_longest() -> None:
    lengths = [1, 1, 1, 1, 1, 11, 1, 1, 1, 1]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    q = torch.randn(sum(lengths), 3, 8)
    with pytest.raises(InvalidArgument, match=r"the index 10 .* at b 5"):
        attention_varlen(q, q, q, starts, starts, score=_by_row)


def test_decoding_counts_rows_from_0() -> None:
    """One query over many keys, and no query or key at all."""
    attention(Q[:, :, :1], Q, Q, score=_by_row)
    attention(Q[:, :, :0], Q, Q, score=_by_row)
    attention(Q, Q[:, :, :0], Q[:, :, :0], score=_by_row)
    attention(Q, Q[:, :, :0], Q[:, :, :0], score=lambda s, b, h, m, n: s + ONE[n])


def test_compiled_calls_refuse_an_expression_too() -> None:
    def call(q: torch.Tensor) -> torch.Tensor:
        return attention(q, q, q, score=lambda s, b, h, m, n: s * ONE[m])

    with pytest.raises(Exception, match="the index 63"):
        torch.compile(call, backend="eager")(Q)


@pytest.mark.parametrize(
    "sizes", [(), (1,), (1, 1), (S, 1), (1, S), (3, 1, 1), (1, 1, 1, 1), (2, 1, S, 1), (1, 3, 1, S)]
)
def test_a_built_in_score_broadcasts_in_a_chain_too(sizes: tuple[int, ...]) -> None:
    bias = torch.randn(sizes)
    half: list[Any] = [scores.bias(bias), lambda s, b, h, m, n: 0.5 * s]
    expected = attention(Q, Q, Q, score=scores.bias(0.5 * bias), scale=0.5 / 8**0.5)
    torch.testing.assert_close(attention(Q, Q, Q, score=half), expected)


@pytest.mark.parametrize("sizes", [(3,), (1, 3), (2, 3)])
def test_slopes_broadcast_in_a_chain_too(sizes: tuple[int, ...]) -> None:
    slopes = torch.rand(sizes)
    half: list[Any] = [scores.alibi(slopes), lambda s, b, h, m, n: 0.5 * s]
    expected = attention(Q, Q, Q, score=scores.alibi(0.5 * slopes), scale=0.5 / 8**0.5)
    torch.testing.assert_close(attention(Q, Q, Q, score=half), expected)


# ---- Checked mode finds an index that leaves its tensor where a pair attends, and nothing else.


KEYS = 9
SHORT = torch.randn(2, 3, KEYS, 8)
COLUMN = torch.randn(3, 5)
IDS = torch.zeros(2, KEYS, dtype=torch.int64)
SMALL = torch.randn(3, KEYS, KEYS - 2)

# What a captured tensor decides is not known before a call: else most of these were refused there
# (above).
OPEN = torch.ones(KEYS, dtype=torch.bool)


def some(b: Any, h: Any, m: Any, n: Any) -> Any:
    return OPEN[n]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "past the end": (
        {"mask": some, "score": lambda s, b, h, m, n: s + COLUMN[h, n // 2 + 1]},
        r"score: got the index 5 into dimension 1 .*\[3, 5\], at b 0, h 0, m 0, n 8; .*from 0 to 4",
    ),
    "below zero": (
        {"mask": some, "score": lambda s, b, h, m, n: s * COLUMN[h, m - n]},
        r"the index -1 into dimension 1 .*, at b 0, h 0, m 0, n 1",
    ),
    "another head": (
        {"mask": some, "score": lambda s, b, h, m, n: s + COLUMN[h + 1, 0]},
        "the index 3 into dimension 0",
    ),
    "of a mask": (
        {"mask": lambda b, h, m, n: OPEN[n] & (IDS[b, m + 1] == IDS[b, n])},
        r"mask: got the index 9 into dimension 1 .* \[2, 9\], at b 0, h 0, m 8, n \d",
    ),
    "too short for a bias": (
        {"mask": some, "score": lambda s, b, h, m, n: s + SMALL[h, m, n]},
        r"the index 7 into dimension 2 .*, at b 0, h 0, m 0, n 7",
    ),
    "by the score": (
        {"score": lambda s, b, h, m, n: s + COLUMN[h, (s * 1000).long()]},
        "into dimension 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_outside_of_its_tensor_is_an_error(name: str) -> None:
    keywords, message = WRONG[name]
    attention(SHORT, SHORT, SHORT, **keywords)  # clamped
    with tilewise.checked(), pytest.raises(InvalidArgument, match=message):
        attention(SHORT, SHORT, SHORT, **keywords)
    attention(SHORT, SHORT, SHORT, **keywords)


RIGHT: dict[str, dict[str, Any]] = {
    "inside": {"score": lambda s, b, h, m, n: s + COLUMN[h, (m - n) % 5]},
    "hidden pairs do not count": {
        "mask": lambda b, h, m, n: (n <= m) & (m - n < 5),
        "score": lambda s, b, h, m, n: s + COLUMN[h, m - n],
    },
    "a bias that is only read where it is": {
        "mask": lambda b, h, m, n: n < KEYS - 2,
        "score": lambda s, b, h, m, n: s + SMALL[h, m, n],
    },
    "built-in ones": {
        "mask": masks.causal() & masks.document(IDS),
        "score": [scores.bias(torch.zeros(KEYS)), scores.softcap(3.0)],
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_stays_inside_passes(name: str) -> None:
    expected = attention(SHORT, SHORT, SHORT, **RIGHT[name])
    with tilewise.checked():
        assert torch.equal(attention(SHORT, SHORT, SHORT, **RIGHT[name]), expected)


def test_packed_sequences_are_checked_each_by_itself() -> None:
    q, starts = torch.randn(7, 3, 8), torch.tensor([0, 2, 7])

    def score(short: int) -> Callable[..., Any]:
        return lambda s, b, h, m, n: s + COLUMN[h, n + short]

    with tilewise.checked():
        attention_varlen(q, q, q, starts, starts, score=score(0))
        with pytest.raises(InvalidArgument, match=r"the index 5 .* at b 1, h 0, m 0, n 4"):
            attention_varlen(q, q, q, starts, starts, score=score(1))


def test_the_environment_checks_every_call() -> None:
    code = (
        "import torch, tilewise; t = torch.zeros(3); q = torch.randn(1, 1, 5, 4);"
        "tilewise.attention(q, q, q, mask=lambda b, h, m, n: t[0] < 1,"
        "score=lambda s, b, h, m, n: s + t[n // 1 + 0 * m])"
    )
    environment = {**os.environ, "TILEWISE_CHECKED": "1"}
    done = ran(sys.executable, "-c", code, status=1, env=environment)
    assert "the index 3 into dimension 0" in done.stderr
