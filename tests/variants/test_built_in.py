"""The built-in masks and scores do what their docstrings say, pair by pair; the docs name all."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

import tilewise
from tests.plain import PairFunction, attend
from tilewise import masks, patterns, scores
from tilewise.errors import InvalidType
from tilewise.variants.operations import OPS
from tilewise.variants.traced import METHODS

M, N = 13, 17
OWN = N - M  # the key at row 0's own position
IDS = torch.arange(N) // 5
SEEN = torch.arange(M * N).reshape(M, N) % 3 != 0
MODULES = (masks, scores, patterns)
each_module = pytest.mark.parametrize("module", MODULES, ids=lambda each: each.__name__)

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


def drawn(*shape: int, learned: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(shape, generator=generator, dtype=torch.float64).requires_grad_(learned)


HEADS = 2
SLOPES, HEAT = drawn(HEADS, learned=False), drawn(HEADS)
EACH, TABLE, KEYS = drawn(2, HEADS, learned=False), drawn(2, HEADS, M, N), drawn(1, N)

# name -> the score, and the same in plain torch. A new score is one row: its name, or NAME-MORE.
SCORES: dict[str, tuple[scores.Score, PairFunction]] = {
    "alibi": (scores.alibi(SLOPES), lambda s, b, h, m, n: s - SLOPES[h] * abs(m + OWN - n)),
    "alibi-each": (scores.alibi(EACH), lambda s, b, h, m, n: s - EACH[b, h] * abs(m + OWN - n)),
    "softcap": (scores.softcap(0.5), lambda s, b, h, m, n: 0.5 * torch.tanh(s / 0.5)),
    "bias": (scores.bias(TABLE), lambda s, b, h, m, n: s + TABLE[b, h, m, n]),
    "bias-of-keys": (scores.bias(KEYS), lambda s, b, h, m, n: s + KEYS[0, n]),
    "function": (
        scores.function(lambda s, b, h, m, n: HEAT[h] * s),
        lambda s, b, h, m, n: HEAT[h] * s,
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_a_score_has_these_values_and_gradients(name: str) -> None:
    score, says = SCORES[name]
    q, k, v = (drawn(2, HEADS, length, 4) for length in (M, N, N))
    learned = [q, k, v, *(each for each in score.captured if each.requires_grad)]
    found, expected = (
        (out, *torch.autograd.grad(out.square().sum(), learned))
        for out in (
            tilewise.attention(q, k, v, score=score),
            attend(q, k, v, score=says).out,
        )
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_every_score_has_its_values() -> None:
    missing = {name for name in scores.__all__ if name.islower()}
    missing -= {"raw", "register_triton"}  # Triton code: tests/kernels/gpu/test_raw.py
    missing -= {name.partition("-")[0] for name in SCORES}
    assert not missing, f"add a row to SCORES, with the score in plain torch, for {missing}"


def numbers() -> list[Any]:
    """Every argument that is a number, with what its function requires."""
    found = []
    for function in (getattr(module, name) for module in MODULES for name in module.__all__):
        takes = inspect.signature(function).parameters.values()
        kinds = {
            each.name: set(get_args(each.annotation))
            if isinstance(each.annotation, UnionType)
            else {each.annotation}
            for each in takes
        }
        rest = {each.name: 4 for each in takes if each.default is each.empty}
        found += [
            pytest.param(function, name, rest, id=f"{function.__name__}-{name}")
            for name, kind in kinds.items()
            if kind & {int, float}
        ]
    return found


@pytest.mark.parametrize(("function", "argument", "rest"), numbers())
@pytest.mark.parametrize("value", ["4", True])
def test_what_is_no_number_is_refused(
    function: Callable[..., object], argument: str, rest: dict[str, int], value: object
) -> None:
    with pytest.raises(InvalidType, match=f"^{argument}: got a {type(value).__name__}"):
        function(**{**rest, argument: value})


PAGE = (Path(__file__).parents[2] / "docs" / "variants.md").read_text()


@each_module
def test_the_docs_name_every_one(module: ModuleType) -> None:
    said = {word for code in re.findall(r"`([^`\n]+)`", PAGE) for word in re.findall(r"\w+", code)}
    missing = [name for name in module.__all__ if name.islower() and name not in said]
    assert not missing, f"docs/variants.md does not name {missing} of {module.__name__}"


def test_the_docs_name_every_function_of_the_language() -> None:
    (row,) = re.findall(r"^\| functions \| `torch\.` `(.*?)`", PAGE, re.MULTILINE)
    listed = set(row.split())
    assert listed <= METHODS.keys()
    missing = []
    for op, operation in OPS.items():
        names = (op,) if operation.names is None else operation.names
        has_operator = any(hasattr(Tensor, f"__{name}__") for name in names)
        if names and not has_operator and listed.isdisjoint(names):
            missing.append(op)
    assert not missing, f"docs/variants.md does not list {missing} in its row of functions"
