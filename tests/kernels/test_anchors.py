"""Anchors outside our own mathematics: torch's attention, and real traces of trained models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise
from tests.cases import FLOATS, Case, Inputs, build
from tests.contract import assert_all_exact, assert_exact
from tests.kernels.targets import TARGETS, Target, pairs
from tests.oracle import Reference, Sent, attend, check, problem_of, refer
from tilelab.cases.dense import dense
from tilewise import masks, scores


def _torch(leaves: list[Tensor], kind: str, extra: Tensor) -> Tensor:
    """torch's own answer, by its plain implementation."""
    q, k, v = leaves
    with sdpa_kernel(SDPBackend.MATH):
        if kind == "causal":
            return sdpa(q, k, v, is_causal=True, enable_gqa=True)
        mask = extra if kind == "bool" else extra.to(q.dtype) if kind == "bias" else None
        return sdpa(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("dtype", FLOATS[:3], ids=str)
@pytest.mark.parametrize("kind", ["full", "causal", "bool", "bias"])
def test_agrees_with_torch(target: Target, kind: str, dtype: torch.dtype) -> None:
    """Forward and gradients, against scaled_dot_product_attention in float64."""
    torch.manual_seed(5)
    queries, keys = 130, 97
    shapes = ((2, 4, queries, 48), (2, 2, keys, 48), (2, 2, keys, 40))
    leaves = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    extra = torch.randn(2, 1, queries, keys)
    if kind == "bool":
        extra = extra > -0.5
    keywords = {
        "full": {},
        "causal": {"mask": masks.causal(align="top_left")},
        "bool": {"mask": extra},
        "bias": {"score": scores.bias(extra.to(dtype)) if kind == "bias" else None},
    }[kind]
    grad = torch.randn(2, 4, queries, 40).to(dtype)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wide_extra = extra if kind == "bool" else extra.to(dtype).double()
    out = tilewise.attention(*leaves, **keywords, backend=target.backend)  # type: ignore[arg-type]
    plain, oracle = _torch(leaves, kind, extra), _torch(wide, kind, wide_extra)
    assert_exact(out, plain, oracle, "out")
    got = torch.autograd.grad(out, leaves, grad)
    plain_grads = torch.autograd.grad(plain, leaves, grad)
    truth = torch.autograd.grad(oracle, wide, grad.double())
    assert_all_exact(got, plain_grads, truth, "qkv", "grad of ")


def _layers(folder: Path) -> list[tuple[str, Path, str]]:
    found = []
    for path in sorted((folder / "traces").glob("*.npz")):
        with np.load(path) as file:
            layers = sorted({name.split(".")[0] for name in file.files if "." in name})
        found += [(f"{path.stem}.{layer}", path, layer) for layer in layers]
    return found


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_real_traces(target: Target, shared_data: Path, dtype: torch.dtype) -> None:
    """q, k and v of trained models: out and lse as stored, computed in float64 elsewhere."""
    layers = _layers(shared_data)
    if not layers:
        pytest.skip(f"no traces in {shared_data / 'traces'}")
    for name, path, layer in layers:
        with np.load(path) as file:
            meta = json.loads(str(file["meta"]))
            q, k, v = (torch.from_numpy(file[f"{layer}.{part}"]) for part in "qkv")
            out = torch.from_numpy(file[f"{layer}.out"])
            lse = torch.from_numpy(file[f"{layer}.lse"])
        mask = masks.causal() if meta["causal"] else None
        if meta.get("kv_lens") is not None:
            lengths = masks.lengths(torch.as_tensor(meta["kv_lens"]))
            mask = lengths if mask is None else mask & lengths
        q, k, v = (t.to(dtype) for t in (q, k, v))
        inputs = Inputs(q, k, v, mask, None, None, meta["scale"], 0.0, 0, None)
        got = attend(inputs, target.backend)
        plain = dense(*problem_of(inputs), dtype=dtype)
        assert_exact(got.out, plain.out, out, f"{name}: out")
        assert_exact(got.lse, plain.lse, lse, f"{name}: lse")


# ---- The 2x rule where sums are long: many keys, and gradients that many rows or heads add up to.


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
