"""A plugin of pytest by which xformers' own tests run tilewise's functions, on the CPU.

The tests draw their cases for each of xformers' operators, from what the operator says it can do.
So here are two that name tilewise's limits, in the place of all others; and the functions that the
tests call are those of ``tilewise.compat.xformers``, which take any operator.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import xformers.ops
from xformers.ops import fmha
from xformers.ops.fmha import attn_bias, common

from tilewise.compat.xformers import fmha as ours
from tilewise.compat.xformers.reading import NAMES

BIASES = {type(None), torch.Tensor, *(getattr(attn_bias, name) for name in NAMES)}


class _Limits:
    OPERATOR = True
    NAME = "tilewise"
    SUPPORTED_DEVICES: ClassVar = {"cpu"}
    SUPPORTED_DTYPES: ClassVar = {torch.float32, torch.float16, torch.bfloat16}
    SUPPORTED_MAX_K = 512
    SUPPORTED_ATTN_BIAS_TYPES = BIASES
    SUPPORTS_DROPOUT = True
    SUPPORTS_CUSTOM_SCALE = True
    SUPPORTS_DIFFERENT_VALUE_EMBED = True
    SUPPORTS_OUTPUT_DTYPE = True
    SUPPORTS_PARTIAL = True
    SUPPORTS_BMGHK = True
    SUPPORTS_ATTN_BIAS_GRAD = True
    _TEST_BATCH_SIZES: ClassVar = [1, 5]  # theirs are 1 and 300, for a GPU

    @classmethod
    def not_supported_reasons(cls, d: Any) -> list[str]:
        """Theirs, without what they say of bfloat16 elsewhere than on GPUs."""
        reasons: list[str] = super().not_supported_reasons(d)  # type: ignore[misc]
        return [reason for reason in reasons if not reason.startswith("bf16")]


class FwOp(_Limits, common.AttentionFwOpBase):  # type: ignore[misc]
    """What a forward pass of tilewise takes."""


class BwOp(_Limits, common.AttentionBwOpBase):  # type: ignore[misc]
    """What a backward pass of tilewise takes."""


fmha.ALL_FW_OPS[:] = [FwOp]
fmha.ALL_BW_OPS[:] = [BwOp]
for name in ours.__all__:
    for module in (fmha, xformers.ops):
        setattr(module, name, getattr(ours, name))
