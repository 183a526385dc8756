"""A pytest plugin: vLLM's operations for attention on a CPU, computed by tilewise.

It runs vLLM's own tests of these operations over tilewise's backend (``test_vllm.py``).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm import _custom_ops as ops

from tilewise.integrations.vllm import TilewiseImpl, TilewiseMetadata
from tilewise.variants.float8 import FLOAT8


def _whole(key_cache: Tensor, value_cache: Tensor) -> Tensor:
    """The cache [pages, Hk, page_size, 2 D] of which these are the halves, or a copy of both."""
    pages, heads, size, width = key_cache.shape
    if key_cache.is_contiguous():  # by itself, as tests of float8 have the numbers before
        halves = torch.cat((key_cache, value_cache), dim=2)
        return halves.view(pages, heads, size, 2 * width)
    halves = key_cache.as_strided((pages, heads, 2 * size, width), key_cache.stride())
    assert halves[:, :, size:].data_ptr() == value_cache.data_ptr()
    return halves.view(pages, heads, size, 2 * width)


def _no_plan(**_: Any) -> None:
    """Of a step: there is nothing to plan."""


def _write(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    isa: str,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    nothing = torch.empty(0)
    step = TilewiseMetadata(0, nothing, nothing, nothing, slot_mapping, causal=True)
    if kv_cache_dtype != "auto":
        key_cache, value_cache = (each.view(FLOAT8) for each in (key_cache, value_cache))
    step.write(key, value, key_cache, value_cache, (k_scale, v_scale))


def _attend(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    output: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    causal: bool,
    alibi_slopes: Tensor | None,
    sliding_window: int,
    block_table: Tensor,
    softcap: float,
    scheduler_metadata: None,
    s_aux: Tensor | None,
    dynamic_causal: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_cache_dtype: str = "auto",
) -> None:
    layer = SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale)
    impl = TilewiseImpl(
        query.shape[1],
        query.shape[2],
        scale,
        key_cache.shape[1],
        None if alibi_slopes is None else alibi_slopes.tolist(),
        None if sliding_window == -1 else sliding_window,
        kv_cache_dtype,
        logits_soft_cap=softcap,
        sinks=s_aux,
    )
    step = TilewiseMetadata(
        query.shape[0],
        query_start_loc,
        seq_lens,
        block_table,
        torch.empty(0),
        causal or dynamic_causal is not None,
        None if dynamic_causal is None else dynamic_causal == 0,
    )
    impl.forward(layer, query, None, None, _whole(key_cache, value_cache), step, output)


def pytest_configure() -> None:
    """Before vLLM's tests import them."""
    ops.cpu_attn_get_scheduler_metadata = _no_plan
    ops.cpu_attn_reshape_and_cache = _write
    ops.cpu_attention_with_kv_cache = _attend


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Drop the random numbers that vLLM's tests share, once they are many: all take 20 GB."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    if pages * os.sysconf("SC_PAGE_SIZE") > 3 << 30:
        item.module.tensor_cache.cache_clear()  # type: ignore[attr-defined]
