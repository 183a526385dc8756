"""What xformers' tests import from a module beside them, which its source archive leaves out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from xformers.ops.fmha.attn_bias import AttentionBias

_NO_GPU = pytest.mark.skip(reason="of operators for GPUs")


def _as_it_is(test: Callable[..., Any]) -> Callable[..., Any]:
    return test


cuda_only = cuda_or_mtia_only = rocm_only = _NO_GPU
disable_on_mtia = disable_on_rocm = disable_tf32 = _as_it_is


def use_cpu_ref(device: str) -> bool:
    """Return whether a reference has to move to the CPU."""
    return False


def construct_fp8_attention_inputs(*given: Any) -> Any:
    """Skip: nothing here has xformers' float8."""
    pytest.skip("of float8")


def assert_allclose(
    out: Tensor, ref: Tensor, msg: str = "", atol: float = 1e-8, rtol: float = 1e-5
) -> None:
    """Assert |out - ref| <= atol + rtol |ref|, in shapes and dtypes that are the same."""
    assert out.shape == ref.shape, msg
    torch.testing.assert_close(
        out.float(), ref.float(), atol=atol, rtol=rtol, msg=lambda m: msg + m
    )


def ref_attention_for_test(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Any = None,
    drop_mask: Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Return attention by its formula in float32; [B, M, K] or [B, M, H, K]."""
    if q.dim() == 4:
        return ref_attention_bmhk_for_test(q, k, v, attn_bias, scale=scale)
    if isinstance(attn_bias, AttentionBias):
        attn_bias = attn_bias.materialize((q.shape[0], q.shape[1], k.shape[1]), torch.float32)
    return _formula(q, k, v, attn_bias, scale)


def ref_attention_bmhk_for_test(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Any = None, scale: float | None = None
) -> Tensor:
    """Return attention by its formula in float32; [B, M, H, K]."""
    if isinstance(attn_bias, AttentionBias):
        shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        attn_bias = attn_bias.materialize(shape, torch.float32)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _formula(q, k, v, attn_bias, scale).transpose(1, 2)


def _formula(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, scale: float | None) -> Tensor:
    q, k, v = (x.float() for x in (q, k, v))
    s = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if added is None else s + added.float()
    return torch.softmax(s, -1).nan_to_num(0) @ v  # a row that sees nothing
