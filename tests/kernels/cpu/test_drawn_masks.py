"""Random expressions as masks: the core against their evaluation in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tilewise
from tests.kernels.targets import CPU_TARGETS, Target, forced
from tests.variants.drawn import (
    SHAPES,
    Extents,
    expressions,
    own_slots,
    program_of,
    quarters,
    run,
)
from tilewise.engine import call
from tilewise.variants.expr import Expr, encode, kinds
from tilewise.variants.values import Mask

KINDS = ("float", "int", "bool", "float", "int", "bool", "int", "float", "bool")
EXTENTS = Extents(2, 3, 70, 40)


def _captured(slot: int, dtype: torch.dtype) -> Tensor:
    values = quarters(SHAPES[slot % len(SHAPES)], slot)
    if KINDS[slot] == "float":
        return values.to(dtype)
    return (values * 4).long() if KINDS[slot] == "int" else values > 0


def _open(expr: Expr, values: Sequence[Tensor]) -> Tensor:
    """Where the result may be anything: x // 0, a shift too far, no integer's float."""
    found: list[Tensor] = []
    kind = kinds(expr)
    for node in expr.nodes:
        args = [values[arg] for arg in node.args]
        anything = torch.zeros((), dtype=torch.bool)
        for arg in node.args:
            anything = anything | found[arg]
        if node.op in ("floordiv", "mod") and kind[node.args[0]] == "int":
            anything = anything | (args[1] == 0)
        if node.op in ("shl", "shr"):
            anything = anything | (args[1] < 0) | (args[1] > 63)
        if node.op == "to_int" and kind[node.args[0]] == "float":
            anything = anything | ~(args[0].abs() < 9e18)
        found.append(anything)
    return found[expr.outputs[0]]


def _check(expr: Expr, dtype: torch.dtype, target: Target) -> None:
    loads = [node for node in expr.nodes if node.op.startswith("load_")]
    if len(expr.nodes) > 256 or len(loads) > 16:
        return
    expr, used = own_slots(expr)
    tensors = tuple([_captured(slot, dtype) for slot in used])
    every = expr._replace(outputs=tuple(range(len(expr.nodes))))
    values = run(every, tensors, extents=EXTENTS, dtype=dtype)
    mask = Mask(program_of(expr), tensors)
    batch, heads, queries, keys = EXTENTS
    q = torch.zeros(batch, heads, queries, 2, dtype=dtype)
    k = torch.zeros(batch, heads, keys, 2, dtype=dtype)
    v = torch.eye(keys, dtype=dtype).expand(batch, heads, -1, -1)
    with forced(target), pytest.MonkeyPatch.context() as patch:
        # The call refuses some of these indices. The core clamps every one.
        patch.setattr(call, "refuse_outside", lambda *_: None)
        seen = tilewise.attention(q, k, v, mask=mask, backend="cpu") > 0
    wrong = (seen != values[expr.outputs[0]]) & ~_open(expr, values)
    assert not bool(wrong.any()), f"{target}: {encode(expr)} at {wrong.nonzero()[0].tolist()}"


pytestmark = pytest.mark.skipif(not CPU_TARGETS, reason="the compiled core is not built")
targets = st.integers(0, 9).map(lambda index: CPU_TARGETS[index % len(CPU_TARGETS)])
dtypes = st.sampled_from((torch.float32, torch.float64))


@given(expr=expressions("bool", kinds=KINDS, depth=5), dtype=dtypes, target=targets)
@settings(max_examples=60)
def test_drawn_masks(expr: Expr, dtype: torch.dtype, target: Target) -> None:
    """Every pair, on whichever instruction set is drawn."""
    _check(expr, dtype, target)


@pytest.mark.slow
@given(expr=expressions("bool", kinds=KINDS, depth=6), dtype=dtypes, target=targets)
@settings(max_examples=600)
def test_more_drawn_masks(expr: Expr, dtype: torch.dtype, target: Target) -> None:
    """The same at length."""
    _check(expr, dtype, target)
