"""Peers for a case: torch's three fused backends, FlexAttention, and plain attention.

Nothing here is called before it is timed; what is not there raises when it is called.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tilelab.common.torch_private import keep_buffers
from tilelab.gpu_check.goals import FLEX
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.timed import Attend, Given, Timed, plain, visible

__all__ = ["flex", "peers"]

_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_PLAIN_MATRICES = 6  # of the size B Hq M N that plain attention and its gradients hold at once


def peers(setting: Setting, case: Timed, things: Given) -> dict[str, Attend]:
    """Return the others by name; FlexAttention, which compiles, is last."""
    found: dict[str, Attend] = {}
    if case.kind in ("full", "causal", "decode"):
        found |= {name: _sdpa(case, kind) for name, kind in _BACKENDS.items()}
    if case.kind == "varlen":
        found["flash"] = _torch_varlen(things, case)
    elif case.kind != "fp8":
        found["plain"] = _fitting(setting, case, things)
    if case.kind != "fp8":
        found[FLEX] = flex(setting, case, things)
    return found


def _sdpa(case: Timed, kind: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kind), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # why a backend declines: the error says so too
            return scaled_dot_product_attention(
                q, k, v, is_causal=case.kind == "causal", enable_gqa=q.shape[1] != k.shape[1]
            )

    return attend


def _torch_varlen(things: Given, case: Timed) -> Attend:
    longest = int(things.ends.diff().max())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # New in torch, and said differently in each release.
        from torch.nn.attention.varlen import varlen_attn

        call: Any = varlen_attn
        given = (q, k, v, things.ends, things.ends, longest, longest)
        try:
            out: Tensor = call(*given, is_causal=True)
        except TypeError:
            out = call(*given, window_size=(-1, 0))
        return out

    return attend


def _fitting(setting: Setting, case: Timed, things: Given) -> Attend:
    """Plain attention, where its matrices fit."""
    matrix_bytes = things.q.shape[0] * things.q.shape[1] * things.q.shape[2] * case.length
    matrix_bytes *= things.q.element_size() * _PLAIN_MATRICES
    attend = plain(case, things)

    def checked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not setting.self_test and matrix_bytes > torch.cuda.mem_get_info()[1]:
            raise MemoryError(f"its matrices need {matrix_bytes / 1e9:.0f} GB")
        return attend(q, k, v)

    return checked


def flex(setting: Setting, case: Timed, things: Given) -> Attend:
    """FlexAttention with a block mask, compiled at its first call; as it is in the self-test."""
    made: list[Any] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not made:
            made.extend(_flex_parts(setting, case, things))
        function, block_mask, score = made
        if case.kind == "varlen":
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        grouped = q.shape[1] != k.shape[1]
        out: Tensor = function(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped)
        return out[0].transpose(0, 1) if case.kind == "varlen" else out

    return attend


def _flex_parts(setting: Setting, case: Timed, things: Given) -> tuple[Any, Any, Any]:
    """Return the function, its block mask and its score."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    seen, block_mask, score = visible(case, things), None, None
    if seen is not None:
        shown = seen

        def mask_mod(b: Any, h: Any, m: Any, n: Any) -> Any:
            return shown(m, n)

        # One mask for all batch items and heads.
        block_mask = create_block_mask(
            mask_mod, None, None, case.length, case.length, device=str(setting.device)
        )
    if case.kind == "alibi":
        slopes = things.slopes

        def score_mod(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s - slopes[h] * (m - n)

        score = score_mod
    if setting.self_test:
        return flex_attention, block_mask, score
    torch.compiler.reset()  # it stops compiling after some variants
    # The gradients are asked for again and again from one graph.
    keep_buffers()
    return torch.compile(flex_attention, dynamic=False), block_mask, score
