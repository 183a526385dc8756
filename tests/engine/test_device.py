"""What a call does with tensors of a device: their values are not read on the way to a kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.engine.call import build_operands, build_problem, read_keywords
from tilewise.errors import InvalidArgument, TilewiseError
from tilewise.problem import Operands
from tilewise.variants.checked import checked


def _packed(device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    q, k, v = (torch.empty(9, 2, 4, device=device) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=dtype).to(device)
    return q, k, v, cu


def _operands(device: str, **keywords: Any) -> Operands:
    q, k, v, cu = _packed(device)
    mask = masks.document(torch.zeros(2, 5, dtype=torch.int64, device=device)) & masks.lengths(
        torch.tensor([1, 2]).to(device)
    )
    score = scores.bias(torch.zeros(5, 5, device=device))
    backend = keywords.get("backend")
    asked = read_keywords(mask, score, None, 0.0, None, backend, (cu, cu))
    return build_operands(build_problem(q, k, v, asked), q, k, v, asked, None)


def test_cu_seqlens_of_a_device_stay_there_unread() -> None:
    """Meta tensors have no values: reading one would fail."""
    operands = _operands("meta")
    for cu in (operands.cu_seqlens_q, operands.cu_seqlens_k):
        assert cu is not None
        assert (cu.device.type, cu.dtype, cu.shape) == ("meta", torch.int64, (3,))
    assert [tensor.device.type for tensor in operands.mask_tensors] == ["meta"] * 3


def test_the_reference_reads_them() -> None:
    """It needs them on the CPU, wherever the tensors are."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta", backend="tiled")


def test_checked_mode_reads_them() -> None:
    """What is asked for is done: cu_seqlens that are wrong are named."""
    with checked(), pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta")


def test_on_the_cpu_they_are_checked_as_ever() -> None:
    """A wrong end is an error."""
    q, k, v, cu = _packed("cpu")
    asked = read_keywords(None, None, None, 0.0, None, "gpu", (cu, cu - 1))
    problem = build_problem(q, k, v, asked)
    with pytest.raises(InvalidArgument, match="cu_seqlens_k"):
        build_operands(problem, q, k, v, asked, None)
    assert issubclass(InvalidArgument, TilewiseError)
