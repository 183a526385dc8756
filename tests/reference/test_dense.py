"""The plain mathematics: against torch, against loops, and its gradients by gradcheck."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from tests.cases import TABLE, Case
from tests.extended import extended, has_extended_precision
from tests.inputs import Inputs, build
from tests.oracle import problem_of, refer
from tilelab.cases.dense import dense
from tilewise.reference.philox import keep_mask


def _case(name: str) -> Case:
    return next(case for case in TABLE if case.name == name).of(torch.float64)


def test_agrees_with_torch() -> None:
    """No variant: scaled_dot_product_attention."""
    inputs = build(_case("grouped"))._replace(mask=None)
    expected = sdpa(inputs.q, inputs.k, inputs.v, enable_gqa=True)
    torch.testing.assert_close(dense(*problem_of(inputs)).out, expected)


def _score(inputs: Inputs, b: int, h: int, m: int, n: int) -> float:
    """One score, from the definition."""
    problem, operands = problem_of(inputs)
    group = problem.heads // problem.kv_heads
    s = float(operands.q[b, h, m] @ operands.k[b, h // group, n]) * problem.scale

    def pick(tensor: Tensor, *index: int) -> float:
        return float(
            tensor[tuple(i if d > 1 else 0 for i, d in zip(index, tensor.shape, strict=True))]
        )

    for instr in problem.score:
        if instr.op == "softcap":
            cap = float(instr.params[0])
            s = cap * math.tanh(s / cap)
        elif instr.op == "alibi":
            distance = abs(m + problem.keys - problem.queries - n)
            s -= pick(operands.score_tensors[instr.slots[0]], b, h) * distance
        else:
            s += pick(operands.score_tensors[instr.slots[0]], b, h, m, n)
    return s


def test_definition() -> None:
    """One row at a time, key by key, with a mask, scores, a sink and dropout."""
    case = Case(
        "definition",
        heads=4,
        queries=6,
        keys=9,
        head_dim=5,
        value_dim=3,
        dtype=torch.float64,
        mask=("causal",),
        score=("softcap_tight", "alibi", "bias_heads"),
        sinks=True,
        dropout_p=0.3,
    )
    inputs = build(case).detached()
    result = dense(*problem_of(inputs))
    assert inputs.sinks is not None
    keep = keep_mask(
        inputs.seed, 0.3, batches=range(2), heads=range(4), queries=range(6), keys=range(9)
    )
    for b, h, m in ((0, 0, 0), (1, 3, 5), (0, 2, 3), (1, 1, 4)):
        seen = range(m + 9 - 6 + 1)
        weights = [math.exp(_score(inputs, b, h, m, n)) for n in seen]
        total = sum(weights) + math.exp(float(inputs.sinks[h]))
        row = sum(
            weights[n] / total * float(keep[b, h, m, n]) / 0.7 * inputs.v[b, h // 2, n]
            for n in seen
        )
        torch.testing.assert_close(result.out[b, h, m], row)
        torch.testing.assert_close(float(result.lse[b, h, m]), math.log(total))
        top, row_sum = (float(part[b, h, m]) for part in result.stats)
        torch.testing.assert_close(2**top * row_sum, sum(weights))


@pytest.mark.parametrize("name", ["cap-bias-alibi", "varlen-all", "grouped-all", "sinks-dead-rows"])
def test_extended_agrees(name: str) -> None:
    """The hand-written gradients are autograd's."""
    inputs = build(_case(name))
    result, wide, _ = refer(inputs)
    for fact in ("out", "lse"):
        found = torch.from_numpy(getattr(wide, fact).astype(float))
        torch.testing.assert_close(getattr(result, fact), found)
    assert wide.grads.keys() == result.grads.keys()
    for leaf, grad in wide.grads.items():
        torch.testing.assert_close(result.grads[leaf], torch.from_numpy(grad.astype(float)))


@pytest.mark.skipif(not has_extended_precision(), reason="long double is float64 here")
def test_extended_is_more_precise() -> None:
    """Its rounding is far below float64's: the softmax of a constant row is exact to 1e-18."""
    inputs = build(Case("extended", queries=3, keys=3, dtype=torch.float64, scale=0.0))
    result = extended(*problem_of(inputs))
    mean = inputs.v.detach().numpy().astype("longdouble").mean(axis=2, keepdims=True)
    assert float(abs(result.out - mean).max()) < 1e-18
    assert result.grads is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_runs_in_any_dtype(dtype: torch.dtype) -> None:
    """The plain implementation keeps to its dtype, and near the oracle."""
    inputs = build(_case("causal").of(dtype))
    problem, operands = problem_of(inputs)
    result, truth = dense(problem, operands, dtype=dtype), dense(problem, operands)
    assert result.out.dtype == result.lse.dtype == dtype
    rounding = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(result.out.double(), truth.out, atol=rounding, rtol=rounding)
