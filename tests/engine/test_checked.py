"""Checked mode finds an index that leaves its tensor where a pair attends, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewise
from tilewise import attention, attention_varlen, masks, scores
from tilewise.errors import InvalidArgument

S = 9
Q = torch.randn(2, 3, S, 8)
TABLE = torch.randn(3, 5)
IDS = torch.zeros(2, S, dtype=torch.int64)
SMALL = torch.randn(3, S, S - 2)

# What a captured tensor decides is not known before a call: else most of these were refused there
# (test_outside.py).
OPEN = torch.ones(S, dtype=torch.bool)


def some(b: Any, h: Any, m: Any, n: Any) -> Any:
    return OPEN[n]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "past the end": (
        {"mask": some, "score": lambda s, b, h, m, n: s + TABLE[h, n // 2 + 1]},
        r"score: got the index 5 into dimension 1 .*\[3, 5\], at b 0, h 0, m 0, n 8; .*from 0 to 4",
    ),
    "below zero": (
        {"mask": some, "score": lambda s, b, h, m, n: s * TABLE[h, m - n]},
        r"the index -1 into dimension 1 .*, at b 0, h 0, m 0, n 1",
    ),
    "another head": (
        {"mask": some, "score": lambda s, b, h, m, n: s + TABLE[h + 1, 0]},
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
        {"score": lambda s, b, h, m, n: s + TABLE[h, (s * 1000).long()]},
        "into dimension 1",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_an_index_outside_of_its_tensor_is_an_error(name: str) -> None:
    keywords, message = WRONG[name]
    attention(Q, Q, Q, **keywords)  # clamped
    with tilewise.checked(), pytest.raises(InvalidArgument, match=message):
        attention(Q, Q, Q, **keywords)
    attention(Q, Q, Q, **keywords)


RIGHT: dict[str, dict[str, Any]] = {
    "inside": {"score": lambda s, b, h, m, n: s + TABLE[h, (m - n) % 5]},
    "hidden pairs do not count": {
        "mask": lambda b, h, m, n: (n <= m) & (m - n < 5),
        "score": lambda s, b, h, m, n: s + TABLE[h, m - n],
    },
    "a bias that is only read where it is": {
        "mask": lambda b, h, m, n: n < S - 2,
        "score": lambda s, b, h, m, n: s + SMALL[h, m, n],
    },
    "built-in ones": {
        "mask": masks.causal() & masks.document(IDS),
        "score": [scores.bias(torch.zeros(S)), scores.softcap(3.0)],
    },
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_stays_inside_passes(name: str) -> None:
    expected = attention(Q, Q, Q, **RIGHT[name])
    with tilewise.checked():
        assert torch.equal(attention(Q, Q, Q, **RIGHT[name]), expected)


def test_packed_sequences_are_checked_each_by_itself() -> None:
    q, starts = torch.randn(7, 3, 8), torch.tensor([0, 2, 7])

    def score(short: int) -> Callable[..., Any]:
        return lambda s, b, h, m, n: s + TABLE[h, n + short]

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
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TILEWISE_CHECKED": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the index 3 into dimension 0" in done.stderr
