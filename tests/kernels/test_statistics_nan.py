"""A NaN among a row's scores: the largest logit is NaN and the top key is the first NaN's.

torch's own max and argmax over the scores of each row say what is right.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tests.extended import extended
from tests.kernels.targets import Target
from tilelab.cases.dense import dense
from tilewise import masks
from tilewise.problem import Operands
from tilewise.validation import dense_problem

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
SIZES = ((1, 300), (3, 1100), (70, 300), (130, 40))  # the first two are few queries
WIDTH = 8


def _holes(queries: int, keys: int) -> Tensor:
    """A table that is added to the scores: rows with a NaN, several, infinities, both, neither."""
    table = torch.zeros(queries, keys)
    nan, inf = math.nan, math.inf
    kinds: list[list[tuple[int, float]]] = [
        [(keys - 1, nan), (keys // 2, nan)],
        [(0, nan)],
        [],
        [(3, nan), (7, inf)],
        [(7, nan), (3, inf)],
        [(5, inf), (keys - 2, inf)],
        [(n, nan) for n in range(keys)],
        [(4, -inf)],
    ]
    for m in range(queries):
        for n, value in kinds[m % len(kinds)]:
            table[m, n] = value
    return table


def _inputs(queries: int, keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(queries + keys)
    q, k, v = (
        torch.randn(2, heads, rows, WIDTH, generator=generator).to(dtype)
        for heads, rows in ((4, queries), (2, keys), (2, keys))
    )
    return q, k, v


def _scores(q: Tensor, k: Tensor, table: Tensor | None, seen: Tensor | None = None) -> Tensor:
    s = q.double() @ k.double().repeat_interleave(2, dim=1).mT / math.sqrt(WIDTH)
    if table is not None:
        s = s + table
    return s if seen is None else s.masked_fill(~seen, -math.inf)


def _check(stats: Any, s: Tensor) -> None:
    """Statistics, with or without keys, against the scores in float64."""
    expected, keys = s.max(-1)
    dead = expected == -math.inf
    odd = expected.isnan()
    assert torch.equal(stats.max_logit.isnan(), odd)
    exact = expected.isinf()
    assert torch.equal(stats.max_logit[exact].double(), expected[exact])
    finite = ~odd & ~exact
    torch.testing.assert_close(
        stats.max_logit[finite].double(), expected[finite], rtol=1e-3, atol=1e-3
    )
    if stats.top1 is not None:
        # Rounding may choose another one of the finite; a NaN or an infinity is where it is.
        sharp = (odd | exact) & ~dead
        assert torch.equal(stats.top1[sharp], keys[sharp])
        assert bool((stats.top1[dead] == -1).all())
        got = s.gather(-1, stats.top1.clamp(min=0)[..., None])[..., 0]
        torch.testing.assert_close(got[finite], expected[finite], rtol=1e-3, atol=1e-3)


def run(backend: str, *qkv: Tensor, **keywords: Any) -> Any:
    return tilewise.attention(*qkv, backend=backend, **keywords)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("wanted", [True, "top1"], ids=str)
def test_a_nan_is_seen(
    target: Target, sizes: tuple[int, int], dtype: torch.dtype, wanted: Any
) -> None:
    qkv = _inputs(*sizes, dtype)
    table = _holes(*sizes)
    for shift in range(8 if sizes[0] < 8 else 1):  # few rows take each kind in turn
        rolled = _holes(8, sizes[1])[shift : shift + 1] if sizes[0] < 8 else table

        def score(s: Any, _b: Any, _h: Any, m: Any, n: Any, rolled: Tensor = rolled) -> Any:
            return s + rolled[m if rolled.shape[0] > 1 else 0, n]

        stats = run(target.backend, *qkv, score=score, return_stats=wanted).stats
        _check(stats, _scores(*qkv[:2], rolled))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_nan_in_keys_and_queries(target: Target, sizes: tuple[int, int]) -> None:
    """Without a score: in a key of one batch item, and in a query of the other."""
    q, k, v = _inputs(*sizes, torch.float32)
    k[0, 0, [20, 33]] = math.nan
    q[1, 3, 0] = math.nan
    stats = run(target.backend, q, k, v, return_stats="top1").stats
    _check(stats, _scores(q, k, None))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_hidden_nan_is_not_seen(target: Target, sizes: tuple[int, int]) -> None:
    """Of a causal mask: rows that do not attend to it have the same bits as without."""
    q, k, v = _inputs(*sizes, torch.float32)
    hole = sizes[1] - sizes[0] + sizes[0] // 2 if sizes[0] <= sizes[1] else 20
    odd = k.clone()
    odd[:, 1, hole] = math.nan
    mask = masks.causal()
    seen = torch.ones(sizes, dtype=torch.bool).tril(sizes[1] - sizes[0])
    plain = run(target.backend, q, k, v, mask=mask, return_stats="top1").stats
    stats = run(target.backend, q, odd, v, mask=mask, return_stats="top1").stats
    _check(stats, _scores(q, odd, None, seen))
    above = ~seen[:, hole]
    for field in ("max_logit", "top1", "entropy"):
        got, expected = (getattr(x, field)[..., above] for x in (stats, plain))
        assert_same_bits(got, expected, field)


def test_the_references_see_it() -> None:
    q, k, v = _inputs(40, 60, torch.float64)
    k[0, 0, [20, 33]] = math.nan
    problem = dense_problem(q, k, v, mask=(), score=(), scale=None, dropout_p=0.0, sinks=None)
    s = _scores(q, k, None)
    expected, keys = s.max(-1)
    found = dense(problem, Operands(q, k, v))
    assert found.max_logit is not None
    assert found.top_key is not None
    assert torch.equal(found.max_logit.isnan(), expected.isnan())
    assert torch.equal(found.top_key, keys)
    wide = torch.from_numpy(extended(problem, Operands(q, k, v)).max_logit.astype("float64"))
    assert torch.equal(wide.isnan(), expected.isnan())
