"""What ``tilewise.compat.xformers`` refuses, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.compat.test_xformers import XOPS, drawn
from tilewise.compat.xformers import attn_bias
from tilewise.errors import InvalidArgument, InvalidType, Unsupported


def _with(bias: Any, **given: Any) -> Callable[[], Any]:
    q, k, v = drawn((1, 9, 4, 16), (1, 12, 4, 16), (1, 12, 4, 16))
    given = {"query": q, "key": k, "value": v, "attn_bias": bias} | given
    return lambda: XOPS.memory_efficient_attention(**given)


class _Derived(attn_bias.LowerTriangularMask):
    pass


_BLOCKS = attn_bias.BlockDiagonalMask.from_seqlens([4, 5], [6, 6], device="cpu")
_SCALED = torch.zeros(1, 12, 4, 16)
_SCALED.dequant_func = None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (_with(torch.ones(9, 12, dtype=torch.bool)), InvalidArgument, "boolean mask"),
        (_with(torch.zeros(9, 12)), InvalidArgument, r"attn_bias: got shape \(9, 12\)"),
        (_with("causal"), InvalidType, "a bias of xformers.ops.fmha.attn_bias"),
        (_with(_Derived()), Unsupported, "_Derived"),
        (_with(None, p=1.0), InvalidArgument, r"p: got 1.0; required: a probability"),
        (_with(None, p="0"), InvalidType, "p: got a str"),
        (_with(None, scale="1"), InvalidType, "scale: got a str"),
        (_with(None, key=torch.zeros(1, 12, 1, 16)), InvalidArgument, "expand the heads"),
        (_with(None, key=torch.zeros(12, 4)), InvalidArgument, "key: got shape"),
        (_with(None, value=torch.zeros(1, 12, 4, 16).half()), InvalidArgument, "value: got"),
        (_with(None, value=torch.zeros(1, 12, 4, 2).int()), Unsupported, "packed 4 bits"),
        (_with(None, key=_SCALED), Unsupported, "ScaledTensor"),
        (_with(_BLOCKS, query=torch.zeros(2, 9, 4, 16)), InvalidArgument, "query"),
        (_with(_BLOCKS.to("meta")), InvalidArgument, r"attn_bias.to\(query.device\)"),
        (
            lambda: attn_bias.LocalAttentionFromBottomRightMask(-1, 2),
            InvalidArgument,
            "window_left",
        ),
        (lambda: _BLOCKS.make_local_attention(0), InvalidArgument, "window_size"),
        (lambda: _BLOCKS.materialize((9, 13)), InvalidArgument, "13 keys"),
        (
            lambda: attn_bias.BlockDiagonalMask.from_seqlens([1, 2], [3]),
            InvalidArgument,
            "kv_seqlen: got 1 lengths",
        ),
        (
            lambda: attn_bias.BlockDiagonalPaddedKeysMask.from_seqlens([1], 4, [5]),
            InvalidArgument,
            "at most 4",
        ),
        (
            lambda: attn_bias.BlockDiagonalGappyKeysMask.from_seqlens([1], [0], [5]),
            InvalidArgument,
            "the number of all rows",
        ),
        (
            lambda: XOPS.memory_efficient_attention_partial(*drawn(*[(1, 3, 2, 8)] * 3), p=0.5),
            Unsupported,
            "without autograd",
        ),
        (
            lambda: XOPS.merge_attentions([torch.zeros(1, 3, 2, 8)], []),
            InvalidArgument,
            "lse_split: got 0 for 1",
        ),
    ],
)
def test_what_is_wrong_is_named(
    call: Callable[[], Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda x: x.BlockDiagonalPaddedKeysMask.from_seqlens([4, 5], 7, [5, 7]),
            "multiple of the 7",
        ),
        (
            lambda x: x.BlockDiagonalGappyKeysMask.from_seqlens([4, 5], [0, 9, 16], [5, 7]),
            "the rows that",
        ),
    ],
)
@pytest.mark.parametrize("wanted", [False, True])
def test_keys_outside_of_a_cache_are_refused(make: Any, words: str, wanted: bool) -> None:
    q, k = drawn((1, 9, 4, 16), (1, 13, 4, 16))
    words = "the rows that attn_bias names" if wanted else words
    with pytest.raises(InvalidArgument, match=words):
        XOPS.memory_efficient_attention(q.requires_grad_(wanted), k, k, make(attn_bias))
