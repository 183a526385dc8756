"""The row statistics: max_logit, lse, entropy and top key, and the gradients of the entropy."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, TABLE, Case
from tests.contract import assert_same_bits
from tests.inputs import Inputs, build
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
from tilewise import masks, scores
from tilewise.reference.blocks import parts
from tilewise.reference.programs import apply_score, visible
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


def test_dropout_leaves_them_alone(target: Target) -> None:
    """They are of the probabilities before dropout."""
    inputs = build(Case("dropped", queries=65, keys=200, mask=("causal",)))
    plain = run(inputs, target.backend, return_stats="top1").stats
    dropped = run(inputs, target.backend, return_stats="top1", dropout_p=0.6, seed=3).stats
    for field in ("max_logit", "lse", "entropy", "top1"):
        assert_same_bits(getattr(dropped, field), getattr(plain, field), field)


def test_a_bias_step_between_caps(target: Target) -> None:
    """The gradient of the entropy goes back through every step of a chain."""
    case = Case("chain", queries=5, keys=7, head_dim=3, value_dim=2, dtype=torch.float64)
    inputs = build(replace(case, heads=4))
    bias = torch.linspace(-1, 1, 28, dtype=torch.float64).reshape(4, 1, 7).requires_grad_()

    def entropy(bias: Tensor) -> Any:
        score = [scores.softcap(2.0), scores.bias(bias), scores.softcap(3.0)]
        return run(inputs, target.backend, score=score, return_stats=True).stats.entropy

    assert torch.autograd.gradcheck(entropy, (bias,))
