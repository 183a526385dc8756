"""Problems: what they hold, and the small functions beside them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tilewise.problem import Problem, output_like
from tilewise.validation import check_cu_seqlens, dense_problem, lower_sinks

NOTHING: dict[str, Any] = {
    "mask": (),
    "score": (),
    "scale": None,
    "dropout_p": 0.0,
    "sinks": None,
}


def _dense(**changes: Any) -> Problem:
    q, k, v = torch.zeros(2, 6, 3, 8), torch.zeros(2, 2, 5, 8), torch.zeros(2, 2, 5, 4)
    return dense_problem(q, k, v, **{**NOTHING, **changes})


def test_problems_are_values() -> None:
    assert _dense() == _dense()
    assert hash(_dense()) == hash(_dense())
    assert _dense() != _dense(scale=2.0)
    assert pickle.loads(pickle.dumps(_dense())) == _dense()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e30, 3, np.float32(0.5), np.int64(2)])
def test_any_finite_scale_is_legal(scale: float) -> None:
    assert _dense(scale=scale).scale == scale
    assert type(_dense(scale=scale).scale) is float


@pytest.mark.parametrize("values", [[0], [0, 0, 4], [0, 4], [0, 1, 1, 4]])
def test_good_cu_seqlens_give_their_values(values: list[int]) -> None:
    assert check_cu_seqlens("cu_seqlens_q", torch.tensor(values), values[-1]) == values


CASES = {
    "contiguous": (torch.empty(2, 3, 5, 8), (15 * 4, 5 * 4, 4, 1)),
    "transposed": (torch.empty(2, 5, 3, 8).transpose(1, 2), (15 * 4, 4, 3 * 4, 1)),
    "one row, transposed": (torch.empty(2, 1, 3, 8).transpose(1, 2), (3 * 4, 4, 3 * 4, 1)),
    "expanded": (torch.empty(1, 1, 5, 8).expand(2, 3, 5, 8), None),
    "last stride": (torch.empty(2, 3, 8, 5).transpose(2, 3), (15 * 4, 5 * 4, 4, 1)),
    "packed": (torch.empty(5, 3, 8), (3 * 4, 4, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_follow_the_memory_order_of_q(name: str) -> None:
    like, strides = CASES[name]
    out: Tensor = output_like(like, 4)
    assert out.shape == (*like.shape[:-1], 4)
    assert strides is None or out.stride() == strides


def test_sinks_are_lowered_differentiably() -> None:
    sinks = torch.zeros(8, dtype=torch.bfloat16, requires_grad=True)
    lowered = lower_sinks(sinks[::2], torch.bfloat16)
    assert lowered is not None
    assert (lowered.dtype, lowered.is_contiguous()) == (torch.float32, True)
    lowered.sum().backward()
    assert sinks.grad is not None
    assert sinks.grad.tolist() == [1, 0] * 4
    assert lower_sinks(None, torch.float32) is None
