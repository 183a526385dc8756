"""What to compute (Problem), with what (Operands), and what comes back (Result, Grads).

Letters: B batch, Hq query heads, Hk key/value heads (Hq % Hk == 0), M queries, N keys, D query/key
width, Dv value width. In a variable-length call, Tq and Tk are the packed totals.
"""

from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.variants.float8 import FLOAT8, output_dtype
from tilewise.variants.program import Program

__all__ = [
    "DTYPES",
    "START",
    "Grads",
    "Needs",
    "Operands",
    "Problem",
    "Result",
    "Statistics",
    "output_like",
]

# What a call wants to know about its rows: nothing, the statistics, or the top key too.
Statistics: TypeAlias = Literal["", "rows", "top1"]

START = (0, 0, 0, 0)  # where dropout counts from, unless the operands are a part

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, FLOAT8)


class Problem(NamedTuple):
    """The requested attention: immutable, hashable, no tensors.

    Args:
        batch: B, or the number of sequences (varlen).
        heads, kv_heads: Hq and Hk.
        queries, keys: M and N, or the packed totals Tq and Tk (varlen).
        head_dim, value_dim: D and Dv.
        dtype: of q, k, v and out; float8's out is bfloat16.
        device: the device type, e.g. ``"cpu"``.
        layout: ``"dense"`` ([B, H, S, D]) or ``"varlen"`` ([T, H, D] with cu_seqlens).
        mask: which pairs attend; ``()`` is all of them.
        score: how scores change; ``()`` is not at all.
        scale: s = scale * q.k.
        dropout_p: the probability of dropping, in [0, 1).
        sinks: whether each head has one extra logit in its denominator.
        page_size: keys and values lie in pages of so many rows, which a block table finds; ``keys``
            is then the most that a sequence may have. 0: they do not.
        stored: dtype of keys and values in pages of 8 bits, whose rows each have a scale; None
            where it is ``dtype``.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    device: str
    layout: str
    mask: Program
    score: Program
    scale: float
    dropout_p: float
    sinks: bool
    page_size: int = 0
    stored: torch.dtype | None = None


class Operands(NamedTuple):
    """The tensors of one call, in kernel form (see ``variants/lower.py``).

    Args:
        q, k, v: [B, Hq, M, D], [B, Hk, N, D], [B, Hk, N, Dv] with any strides; varlen
            [Tq, Hq, D], [Tk, Hk, D], [Tk, Hk, Dv].
        mask_tensors, score_tensors: what the programs captured, in slot order: boolean masks and
            biases [B or 1, Hq or 1, M or 1, N or 1], lengths int64 [B], ids int64 [B or 1, S],
            slopes [B or 1, Hq], and what expressions read. In a variable-length call their first
            dimension counts sequences, their rows and keys count within a sequence and may be
            longer than any of them.
        sinks: [Hq], contiguous, float32 (float64 for float64), or None.
        cu_seqlens_q, cu_seqlens_k: int64 [B + 1], contiguous; None if dense. On the CPU, checked;
            for the GPU backend's tensors on their device, where their values are not read.
        seed: 64 random bits as a number in [0, 2**64); 0 without dropout. For the GPU backend an
            int64 tensor of one element on the device of q, whose value the host does not read.
        origin: the first batch item, head, query and key as dropout counts them, where these
            operands are a part of a longer call.
        block_table: int32 [B, P], contiguous: key n of sequence b is row ``n % page_size`` of page
            ``block_table[b, n // page_size]``; k and v are then [pages, Hk, page_size, D or Dv] of
            any strides. Entries beyond a sequence's keys are not looked at. None without pages.
        key_lengths: int32 [B], contiguous: how many keys each sequence has, at most P * page_size.
        q_scale, k_scale, v_scale: float32 [B, Hq], [B, Hk], [B, Hk] (one row per sequence in a
            variable-length call), contiguous: what a stored float8 number stands for is it times
            its head's scale. None where it is 1. Of pages in 8 bits (``Problem.stored``) k_scale
            and v_scale are float32 [pages, Hk, page_size] of any strides, a number for each row.
        whole_pages: whether every sequence has all keys of each of its pages, as lists of blocks.
        for_backward: whether a backward pass may follow. A kernel that computes scores in another
            order than that pass does leaves such calls to one that does not.
        out_alone: whether nobody will look at anything but the output: a kernel may then leave lse
            and stats out, which are NaN, or what they would be otherwise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask_tensors: tuple[Tensor, ...] = ()
    score_tensors: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: int | Tensor = 0
    origin: tuple[int, int, int, int] = START
    block_table: Tensor | None = None
    key_lengths: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    whole_pages: bool = False
    for_backward: bool = False
    out_alone: bool = False


class Result(NamedTuple):
    """Result of a forward pass.

    Args:
        out: [B, Hq, M, Dv] in q's dtype (bfloat16 for float8) and memory order; varlen
            [Tq, Hq, Dv].
        lse: natural-log sum of exponentials of each row, sink included, [B, Hq, M] (varlen
            [Hq, Tq]), float32 (float64 for float64); -inf for a row that sees nothing.
        stats: ``[2, *lse.shape]`` in lse's dtype, before sinks: row_max, the score that a row
            subtracts, in the backend's own unit (``kernels.Prepared.row_max_unit``): the
            largest, or one near it; and row_sum = sum of exp(score - row_max). For the backward
            pass of the same backend. With statistics
            ``[3, *lse.shape]``: row_mean too, the mean under the probabilities (the sink's among
            them) of the logits less the larger of row_max and the sink, in base-2 units.
        max_logit, entropy: shaped as lse, natural units; None without statistics.
        top_key: int64, shaped as lse: the first key with the largest score, -1 for none; None
            without the statistics "top1".
    """

    out: Tensor
    lse: Tensor
    stats: Tensor
    max_logit: Tensor | None = None
    entropy: Tensor | None = None
    top_key: Tensor | None = None


# What follows ``out`` in a Result of which nobody reads more.
UNSEEN = (None,) * (len(Result._fields) - 1)


class Needs(NamedTuple):
    """The gradients that are wanted, and of what.

    Args:
        q, k, v, score_tensors, sinks: whether the gradient of each is wanted.
        partial: the result is of more keys than the operands have: the keys are a block of a
            sequence that is split, and out, lse and stats are of all its blocks merged.
    """

    q: bool
    k: bool
    v: bool
    score_tensors: tuple[bool, ...] = ()
    sinks: bool = False
    partial: bool = False


class Grads(NamedTuple):
    """The gradients that were wanted; None for the others.

    Args:
        q, k, v: shaped as the inputs.
        score_tensors: shaped as the lowered tensors: summed over what was broadcast.
        sinks: [Hq].
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    score_tensors: tuple[Tensor | None, ...] = ()
    sinks: Tensor | None = None


def side_by_side(first: Tensor, second: Tensor) -> Tensor | None:
    """Return rows of both as a view; None unless those of ``second`` begin where ``first``'s end.

    Both are [..., D or Dv], with the other sizes alike.
    """
    if (
        first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr()
        or first.stride() != second.stride()
        or first.stride(-1) != 1
        or first.storage_offset() + first.shape[-1] != second.storage_offset()
    ):
        return None
    width = first.shape[-1] + second.shape[-1]
    return first.as_strided((*first.shape[:-1], width), first.stride())


def output_like(like: Tensor, width: int) -> Tensor:
    """An uninitialised tensor shaped as ``like`` but for its last dimension, in its memory order.

    Its dtype is that of an output for ``like``: like's own, or bfloat16 for float8.

    Args:
        like: [B, H, S, D] or [T, H, D]. A [B, S, H, D] memory seen as its transpose gives a result
            laid out the same way; any other strides give a plain contiguous one.
        width: the last dimension of the result.
    """
    shape, dtype = like.shape, output_dtype(like.dtype)
    if width == shape[-1] and like.is_contiguous():
        return torch.empty_like(like, dtype=dtype)
    if len(shape) == 4:
        batch, heads, rows, _ = shape
        _, head_stride, row_stride, _ = like.stride()
        if row_stride > head_stride:
            strides = (rows * heads * width, width, heads * width, 1)
            return like.new_empty_strided((batch, heads, rows, width), strides, dtype=dtype)
    return like.new_empty((*shape[:-1], width), dtype=dtype)
