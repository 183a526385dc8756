"""torch's flash operators of sequences, which ``torch.nn.attention.varlen`` calls.

``flash_impl`` puts them in place, on the CPU and on CUDA. torch has no such kernels on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.flash_attn.arguments import as_flash_attn, read
from tilewise.compat.flash_attn.newer import Flags, Found, Sequences, computed
from tilewise.compat.from_lse import Forward, gradients_of
from tilewise.engine.call import read_keywords
from tilewise.errors import Unsupported

__all__ = ["KERNELS"]


class _Numbers(NamedTuple):
    """The numbers of a call, and the tensor of slopes."""

    dropout_p: float
    is_causal: bool
    scale: float | None
    left: int | None
    right: int | None
    alibi_slopes: Tensor | None = None

    @property
    def window(self) -> tuple[int, int]:
        """Return the window as flash-attn has it: -1 for no bound."""
        left, right = (-1 if each is None else each for each in (self.left, self.right))
        return left, right

    def check(self, return_debug_mask: bool = False) -> None:
        """Refuse what torch's operators have besides."""
        asked = {
            "dropout_p": bool(self.dropout_p),
            "alibi_slopes": self.alibi_slopes is not None,
            "return_debug_mask": return_debug_mask,
        }
        for name, present in asked.items():
            if present:
                what = f"{name} in the flash-attention implementation 'tilewise' of sequences"
                raise Unsupported(what, fix="call tilewise.attention_varlen")


def _computed(
    q: Tensor, k: Tensor, v: Tensor, where: Sequences, numbers: _Numbers, debug: bool
) -> Found:
    numbers.check(debug)
    flags = Flags(numbers.scale, numbers.is_causal, numbers.window, 0.0)
    with torch.no_grad():
        found = computed(q, k, v, flags, where)
    return Found(found.out, as_flash_attn(found.lse).contiguous())


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    window = (window_size_left, window_size_right)
    numbers = _Numbers(dropout_p, is_causal, scale, *window, alibi_slopes)
    where = Sequences(cum_seq_q, cum_seq_k, None, seqused_k, block_table)
    found = _computed(query, key, value, where, numbers, return_debug_mask)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return found.out.contiguous(), found.lse, state, query.new_empty(0), query.new_empty(0)


def _forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *positional: Any,
    **keywords: Any,
) -> Tensor:
    found, lse, *_ = _forward(query, key, value, *positional, **keywords)
    out.copy_(found)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    numbers = _Numbers(dropout_p, is_causal, scale, window_size_left, window_size_right)
    numbers.check()
    packed = None if cum_seq_q is None or cum_seq_k is None else (cum_seq_q, cum_seq_k)
    given = [query, key, value, out, grad_out]
    if packed is None:
        given = [x.transpose(1, 2) for x in given]
    q, k, v, result, dout = given
    with torch.no_grad():
        options = read(1, query.shape[-2], 0.0, scale, is_causal, numbers.window, 0.0, None)
        keywords = read_keywords(options.mask, None, scale, 0.0, None, None, packed)
        grads = gradients_of(Forward(q, k, v, result, logsumexp), dout, keywords, None)
    turned = grads if packed else [x.transpose(1, 2) for x in grads]
    return tuple(x.contiguous() for x in turned)


# By the operators' names; torch 2.11 has not all of them.
KERNELS: dict[str, Any] = {
    name: kernel
    for name, kernel in {
        "_flash_attention_forward": _forward,
        "_flash_attention_forward_no_dropout_inplace": _forward_into,
        "_flash_attention_backward": _backward,
    }.items()
    if hasattr(torch.ops.aten, name)
}
