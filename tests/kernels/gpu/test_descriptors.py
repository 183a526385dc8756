"""Which tensors have a tensor descriptor, and what it says of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise.kernels.gpu.walk.descriptors import described
from tilewise.problem import Problem

HALF = torch.float16


def _tensor(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


DENSE = Problem(2, 2, 2, 8, 64, 32, 32, HALF, "cpu", "dense", (), (), 1.0, 0.0, False)
GOOD = {
    "contiguous": _tensor(2, 2, 64, 32),
    "transposed": _tensor(2, 64, 2, 32).transpose(1, 2),
    "sliced": _tensor(2, 2, 64, 40)[..., 8:],
    "one-batch": _tensor(1, 2, 64, 32).as_strided((1, 2, 64, 32), (7, 2048, 32, 1)),
    "narrow": _tensor(2, 2, 64, 8),
}
BAD = {
    "base": _tensor(2, 2, 64, 40)[..., 4:36],
    "step": _tensor(2, 2, 64, 36)[..., :32],
    "columns": _tensor(2, 2, 32, 64).mT,
    "expanded": _tensor(1, 2, 64, 32).expand(2, 2, 64, 32),
    "too-narrow": _tensor(2, 2, 64, 7),
    "empty": _tensor(2, 2, 0, 32),
}


@pytest.mark.parametrize("name", [*GOOD, *BAD])
def test_which_tensors_have_one(name: str) -> None:
    """The address and the strides decide, for each tensor by itself."""
    tensor = GOOD.get(name, BAD.get(name))
    assert tensor is not None
    found = described(tensor, DENSE, 16)
    assert (found is not None) == (name in GOOD)
    if found is not None:
        assert found.sizes == list(tensor.shape)
        assert found.steps[2:] == list(tensor.stride()[2:])
        assert found.block[:3] == [1, 1, 16]


def test_packed_rows_have_one() -> None:
    """Dimensions (1, h, row, column), whatever lies first in memory."""
    packed = DENSE._replace(layout="varlen")
    found = described(_tensor(64, 3, 32), packed, 16)
    assert found is not None
    assert found.sizes == [1, 3, 64, 32]
    assert found.steps[1:] == [32, 96, 1]
    assert described(_tensor(64, 3, 32), packed, 512) is None  # more rows than a copy may have
