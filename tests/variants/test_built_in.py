"""The built-in masks show what their docstrings say, pair by pair, and the docs name them all."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tilewise
from tilewise import masks, patterns, scores

M, N = 13, 17
OWN = N - M  # the key at row 0's own position
IDS = torch.arange(N) // 5
SEEN = torch.arange(M * N).reshape(M, N) % 3 != 0

# name -> the mask, and its pairs in plain torch. A new mask is one row: its name, or NAME-MORE.
PAIRS: dict[str, tuple[masks.Mask, Callable[[Any, Any], Any]]] = {
    "causal": (masks.causal(), lambda m, n: n <= m + OWN),
    "causal-top": (masks.causal("top_left"), lambda m, n: n <= m),
    "window": (masks.window(4, 2), lambda m, n: (n >= m + OWN - 4) & (n <= m + OWN + 2)),
    "window-open": (masks.window(None, 2, "top_left"), lambda m, n: n <= m + 2),
    "prefix": (masks.prefix(9), lambda m, n: (n <= m + OWN) | (n < 9)),
    "prefix-each": (masks.prefix(torch.tensor([9])), lambda m, n: (n <= m + OWN) | (n < 9)),
    "prefix-composed": (
        ~masks.causal() & masks.window(0, 3) | masks.prefix(1),
        lambda m, n: ((n > m + OWN) & (n <= m + OWN + 3)) | (n <= m + OWN) | (n < 1),
    ),
    "lengths": (masks.lengths(torch.tensor([6])), lambda m, n: n < 6),
    "document": (masks.document(IDS, IDS[OWN:]), lambda m, n: IDS[OWN:][m] == IDS[n]),
    "dense": (masks.dense(SEEN), lambda m, n: SEEN[m, n]),
    "function": (masks.function(lambda b, h, m, n: m * n > 9), lambda m, n: m * n > 9),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_mask_shows_these_pairs(name: str) -> None:
    mask, says = PAIRS[name]
    expected = torch.broadcast_to(says(torch.arange(M)[:, None], torch.arange(N)), (M, N))
    assert torch.equal(tilewise.visible_pairs(mask, M, N)[0, 0], expected)


def test_every_mask_has_its_pairs() -> None:
    missing = {name for name in masks.__all__ if name.islower()}  # not the type
    missing -= {name.partition("-")[0] for name in PAIRS}
    assert not missing, f"add a row to PAIRS, with the pairs in plain torch, for {missing}"


@pytest.mark.parametrize("module", [masks, scores, patterns], ids=lambda each: each.__name__)
def test_the_docs_name_every_one(module: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "variants.md").read_text()
    said = {word for code in re.findall(r"`([^`\n]+)`", page) for word in re.findall(r"\w+", code)}
    missing = [name for name in module.__all__ if name.islower() and name not in said]
    assert not missing, f"docs/variants.md does not name {missing} of {module.__name__}"
