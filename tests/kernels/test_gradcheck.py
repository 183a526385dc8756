"""torch's gradcheck on the real kernels in float64: analytic against numerical derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.cases import Case
from tests.inputs import build
from tests.kernels.targets import Target, pairs
from tests.oracle import call

SMALL: dict[str, Any] = {
    "queries": 5,
    "keys": 7,
    "head_dim": 3,
    "value_dim": 2,
    "dtype": torch.float64,
}
CASES = [
    Case("plain", **SMALL),
    Case("causal", **SMALL, mask=("causal",)),
    Case("dead-rows", **{**SMALL, "queries": 9}, mask=("causal",)),
    Case("grouped", **SMALL, heads=4, kv_heads=2, mask=("lengths",)),
    Case("window-not-document", **SMALL, mask=("window_right", "document", "not", "and")),
    Case("dense", **SMALL, mask=("bool",)),
    Case("alibi", **SMALL, score=("alibi",)),
    Case("softcap", **SMALL, score=("softcap_tight",)),
    Case("bias", **SMALL, score=("bias",)),
    Case("bias-broadcast", **SMALL, score=("bias_keys", "bias_rows"), heads=4),
    Case("cap-between", **SMALL, score=("bias_heads", "softcap_tight", "bias_one")),
    Case("sinks", **SMALL, sinks=True, mask=("causal",)),
    Case("dropout", **SMALL, dropout_p=0.4),
    Case(
        "everything",
        **SMALL,
        heads=4,
        score=("softcap_tight", "bias"),
        sinks=True,
        mask=("prefix_each",),
        dropout_p=0.3,
    ),
    Case(
        "varlen",
        **{**SMALL, "sequences": ((3, 4), (5, 2), (0, 3))},
        mask=("causal",),
        score=("bias",),
        sinks=True,
    ),
]


@pytest.mark.parametrize("statistics", [False, pytest.param(True, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("target", "case"), pairs(CASES, 9), indirect=["target"])
def test_gradcheck(target: Target, case: Case, statistics: bool) -> None:
    """Derivatives of out and lse, and of the entropy, by every leaf; the lse of dead rows as 0."""
    inputs = build(case)
    names = list(inputs.leaves)

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        changed = inputs.replaced(dict(zip(names, tensors, strict=True)))
        result = call(changed, target.backend, return_lse=True, return_stats=statistics)
        entropy = (result.stats.entropy,) if statistics else ()
        return result.out, torch.where(result.lse.isinf(), 0.0, result.lse), *entropy

    torch.autograd.gradcheck(function, tuple(inputs.leaves.values()), atol=1e-7, rtol=1e-5)
