"""The 2x rule where sums are long: many keys, and gradients that many rows or heads add up to."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.cases import Case
from tests.inputs import Inputs, build
from tests.kernels.targets import TARGETS, Target, pairs
from tests.oracle import Reference, Sent, attend, check, refer
from tilewise import scores

LONG: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": 32, "value_dim": 32}
QUICK = [
    Case("long-full", **LONG, queries=64, keys=4096),
    Case("long-causal", **LONG, queries=2048, keys=2048, mask=("causal",)),
]
SLOW = [
    Case("longest-full", **LONG, queries=16, keys=65536),
    Case("longest-causal", **LONG, queries=100, keys=65536, mask=("causal",)),
    Case("longest-grouped", **{**LONG, "heads": 4}, queries=16, keys=32768, sinks=True),
]


# The tiled reference goes through 4096 small problems in Python.
SLOW_TILED = [
    pytest.param(target, marks=() if target.backend == "cpu" else pytest.mark.slow)
    for target in TARGETS
]


@cache
def _long(case: Case) -> tuple[Inputs, Reference]:
    """Values around 1, so that errors of the weights' sum do not cancel."""
    inputs = build(case)
    with torch.no_grad():
        inputs.v.mul_(0.1).add_(1)
    return inputs, refer(inputs)


def _check_long(case: Case, target: Target) -> None:
    inputs, reference = _long(case)
    got = attend(inputs, target.backend, reference.sent)
    check(got, reference, str(case))


@pytest.mark.parametrize(("target", "case"), pairs(QUICK), indirect=["target"])
def test_long_rows(target: Target, case: Case) -> None:
    """out, lse and every gradient of thousands of keys in float32."""
    _check_long(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_longest_rows(target: Target, case: Case) -> None:
    """A few rows over tens of thousands of keys."""
    _check_long(case, target)


@cache
def _summed() -> tuple[Inputs, Reference]:
    """The loss out.sum(), whose gradient of v is a sum of terms of one sign."""
    sizes: dict[str, Any] = {"queries": 2048, "keys": 64, "head_dim": 16, "value_dim": 16}
    inputs = build(Case("value-sum", batch=1, heads=32, kv_heads=1, **sizes))
    return inputs, refer(inputs, Sent(torch.ones(1, 32, 2048, 16), torch.zeros(1, 32, 2048)))


@cache
def _biased() -> tuple[Inputs, Reference]:
    sizes: dict[str, Any] = {"queries": 8, "keys": 8, "head_dim": 16, "value_dim": 16}
    case = Case("bias-sum", batch=512, heads=8, kv_heads=8, **sizes)
    bias = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(11)).requires_grad_()
    inputs = build(case)._replace(score=scores.bias(bias))
    return inputs, refer(inputs)


@pytest.mark.parametrize("target", SLOW_TILED, ids=str, indirect=True)
def test_bias_of_every_batch_and_head(target: Target) -> None:
    """A bias [1, 1, 8, 8] whose gradient is a sum over 512 batches of 8 heads."""
    inputs, reference = _biased()
    got = attend(inputs, target.backend, reference.sent)
    check(got, reference, "bias-sum")


def test_values_of_every_row_and_head(target: Target) -> None:
    """One key head of 32 query heads: a value's gradient is a sum over 65536 rows."""
    inputs, reference = _summed()
    got = attend(inputs, target.backend, reference.sent)
    check(got, reference, "value-sum")
