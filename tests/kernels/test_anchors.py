"""Anchors outside our own mathematics: torch's attention, and real traces of trained models."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tilewise
from tests.cases import FLOATS
from tests.contract import assert_exact
from tests.inputs import Inputs
from tests.kernels.targets import Target
from tests.oracle import attend, problem_of
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
    for name, a, b, c in zip("qkv", got, plain_grads, truth, strict=True):
        assert_exact(a, b, c, f"grad of {name}")


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
