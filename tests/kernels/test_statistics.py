"""The row statistics: max_logit, lse, entropy and top key, and the gradients of the entropy."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, TABLE, Case, Inputs, build
from tests.contract import assert_same_bits
from tests.extended import extended
from tests.kernels.targets import Target, pairs
from tests.oracle import (
    Reference,
    assert_same,
    attend,
    check,
    problem_of,
    refer,
    send,
)
from tests.oracle import call as run
from tilelab.cases.dense import dense
from tilewise import masks
from tilewise.problem import Operands
from tilewise.reference.blocks import parts
from tilewise.reference.programs import apply_score, visible
from tilewise.validation import dense_problem
from tilewise.variants.lower import statistics_dtype

EVERY = [case.of(dtype) for dtype in FLOATS for case in TABLE]


@cache
def referred(case: Case) -> tuple[Inputs, Reference]:
    """References with gradients through lse and entropy, kept for every instruction set."""
    inputs = build(case)
    return inputs, refer(inputs, send(inputs, 5, entropy=True)._replace(out=None))


@pytest.mark.parametrize(("target", "case"), pairs(EVERY, 5), indirect=["target"])
def test_case_table(target: Target, case: Case) -> None:
    """The 2x rule for the statistics, and for gradients through lse and entropy."""
    inputs, reference = referred(case)
    actual = attend(inputs, target.backend, reference.sent, statistics=True)
    check(actual, reference, str(case))


@pytest.mark.parametrize(("target", "case"), pairs(EVERY, 7), indirect=["target"])
def test_they_cost_no_bit(target: Target, case: Case) -> None:
    """out, lse and their gradients are the same with statistics and without."""
    inputs = build(case)
    sent = send(inputs)
    plain = attend(inputs, target.backend, sent)
    assert_same(plain, attend(inputs, target.backend, sent, statistics="top1"))


def _scores_of(inputs: Inputs) -> list[Tensor]:
    """The score matrices in float64, [B, Hq, M, N] of each part of the problem."""
    found = []
    for part in parts(*problem_of(inputs)):
        problem, operands = part.problem, part.operands
        block = part.block(range(problem.queries), range(problem.keys))
        k = operands.k.double().repeat_interleave(problem.heads // problem.kv_heads, dim=1)
        s = operands.q.double() @ k.mT * problem.scale
        s, _ = apply_score(problem.score, operands.score_tensors, s, block)
        seen = visible(problem.mask, operands.mask_tensors, block, s.device)
        found.append(s.masked_fill(~seen, -math.inf).detach())
    return found


@pytest.mark.parametrize(("target", "case"), pairs(EVERY, 5), indirect=["target"])
def test_the_top_key_has_the_largest_score(target: Target, case: Case) -> None:
    """But for rounding; -1 in dead rows; the first of scores that are all alike."""
    inputs = build(case)
    stats = run(inputs, target.backend, return_stats="top1").stats
    assert stats.top1.dtype == torch.int64
    assert stats.top1.shape == stats.entropy.shape
    keys = [stats.top1]
    if inputs.cu_seqlens is not None:
        keys = [part[None] for part in stats.top1.split(inputs.cu_seqlens[0].diff().tolist(), 1)]
    for s, top in zip(_scores_of(inputs), keys, strict=True):
        if s.size(-1) == 0:
            assert bool((top == -1).all())
            continue
        best = s.amax(-1)
        assert torch.equal(top == -1, best == -math.inf)
        chosen = s.gather(-1, top.clamp(min=0)[..., None])[..., 0]
        rounding = 1e-12 if case.dtype == torch.float64 else 1e-5
        torch.testing.assert_close(chosen, best, atol=rounding, rtol=rounding)
        ties = (s == best[..., None]).all(-1) & (best > -math.inf)
        assert bool((top[ties] == 0).all())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_first_of_equal_keys_is_on_top(target: Target, dtype: torch.dtype) -> None:
    """Small integers are exact in every type, and tie within blocks of keys and across them."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randint(-2, 3, (2, 3, rows, 8), generator=generator).to(dtype)
        for rows in (70, 300, 300)
    )
    s = (q.double() @ k.double().mT).masked_fill(torch.ones(70, 300).triu(231) > 0, -math.inf)
    result = tilewise.attention(
        q, k, v, scale=1.0, mask=masks.causal(), return_stats="top1", backend=target.backend
    )
    assert torch.equal(result.stats.top1, s.argmax(-1))
    assert bool(((s == s.amax(-1, keepdim=True)).sum(-1) > 1).any())


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_one_key(target: Target, dtype: torch.dtype) -> None:
    """One outcome: entropy and its gradients are exactly 0. A sink of the same logit: log 2."""
    inputs = build(Case("one", queries=33, keys=1, dtype=dtype))
    stats = run(inputs, target.backend, return_stats="top1").stats
    assert bool((stats.entropy == 0).all())
    assert bool((stats.top1 == 0).all())
    grads = torch.autograd.grad(stats.entropy.sum(), (inputs.q, inputs.k))
    assert not any(bool(grad.any()) for grad in grads)
    sinks = torch.zeros(2, dtype=statistics_dtype(dtype))
    zero = inputs._replace(q=torch.zeros_like(inputs.q), sinks=sinks)
    entropy = run(zero, target.backend, return_stats=True).stats.entropy
    torch.testing.assert_close(entropy, torch.full_like(entropy, math.log(2.0)))


def test_equal_scores_have_the_largest_entropy(target: Target) -> None:
    """log N, its gradient 0, whatever the score."""
    q, k = torch.full((1, 1, 3, 16), 100.0), torch.full((1, 1, 300, 16), 100.0)
    q.requires_grad_()
    stats = tilewise.attention(q, k, k, return_stats=True, backend=target.backend).stats
    torch.testing.assert_close(stats.entropy, torch.full((1, 1, 3), math.log(300)))
    (grad,) = torch.autograd.grad(stats.entropy.sum(), q)
    assert not bool(grad.any())


# ---- A NaN among a row's scores: the largest logit is NaN and the top key is the first NaN's.
#
# torch's own max and argmax over the scores of each row say what is right.


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


def attended(backend: str, *qkv: Tensor, **keywords: Any) -> Any:
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

        stats = attended(target.backend, *qkv, score=score, return_stats=wanted).stats
        _check(stats, _scores(*qkv[:2], rolled))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_nan_in_keys_and_queries(target: Target, sizes: tuple[int, int]) -> None:
    """Without a score: in a key of one batch item, and in a query of the other."""
    q, k, v = _inputs(*sizes, torch.float32)
    k[0, 0, [20, 33]] = math.nan
    q[1, 3, 0] = math.nan
    stats = attended(target.backend, q, k, v, return_stats="top1").stats
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
    plain = attended(target.backend, q, k, v, mask=mask, return_stats="top1").stats
    stats = attended(target.backend, q, odd, v, mask=mask, return_stats="top1").stats
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
