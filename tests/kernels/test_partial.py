"""Blocks of keys of a split sequence on each backend and instruction set."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.partial import Sizes, check_blocks
from tests.kernels.targets import Target

SIZES = {
    "small": Sizes(33, (0, 1, 8, 40, 57)),
    "a block and more": Sizes(70, (0, 128, 400)),
    "few queries": Sizes(3, (0, 20, 300)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_blocks_add_up(target: Target, name: str, dtype: torch.dtype) -> None:
    check_blocks(target.backend, SIZES[name], dtype)
