"""torch's gradcheck on the real kernels in float64: analytic against numerical derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case
from tests.inputs import Inputs, build
from tests.kernels.targets import Target, pairs
from tilewise.variants.values import Score

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


def replaced(inputs: Inputs, leaves: dict[str, Tensor]) -> Inputs:
    """The inputs with other tensors in the place of their leaves."""
    score = inputs.score
    if score is not None:
        captured = list(score.captured)
        slots = [instr.slots[0] for instr in score.program if instr.op == "bias"]
        for index, slot in enumerate(slots):
            captured[slot] = leaves[f"bias{index}"]
        score = Score(score.program, tuple(captured))
    q, k, v = leaves["q"], leaves["k"], leaves["v"]
    return inputs._replace(q=q, k=k, v=v, score=score, sinks=leaves.get("sinks"))


def _call(inputs: Inputs, leaves: dict[str, Tensor], backend: str) -> tuple[Tensor, Tensor]:
    """out and lse as a function of the leaves; the lse of dead rows, which is -inf, as 0."""
    changed = replaced(inputs, leaves)
    q, k, v, keywords = changed.q, changed.k, changed.v, changed.keywords()
    if inputs.cu_seqlens is None:
        out, lse, _ = tilewise.attention(q, k, v, **keywords, return_lse=True, backend=backend)
    else:
        out, lse, _ = tilewise.attention_varlen(
            q, k, v, *inputs.cu_seqlens, **keywords, return_lse=True, backend=backend
        )
    return out, torch.where(lse.isinf(), 0.0, lse)


@pytest.mark.parametrize(("target", "case"), pairs(CASES, 9), indirect=["target"])
def test_gradcheck(target: Target, case: Case) -> None:
    """Derivatives of out and lse by every leaf."""
    inputs = build(case)
    names = list(inputs.leaves)

    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return _call(inputs, dict(zip(names, tensors, strict=True)), target.backend)

    torch.autograd.gradcheck(function, tuple(inputs.leaves.values()), atol=1e-7, rtol=1e-5)
