"""Blocks of keys of a split sequence, by the GPU kernels in the interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.test_partial import Sizes, check_blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_add_up(dtype: torch.dtype) -> None:
    check_blocks("gpu", Sizes(19, (0, 1, 20, 37), 16, 16), dtype)
