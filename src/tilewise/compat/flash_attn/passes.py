"""flash-attn's separate forward and backward passes, the parts of ring attention.

Some libraries split a sequence among devices (ring-flash-attention, yunchang). They call a forward
pass per block of keys and merge the blocks by their lse. Then they call a backward pass per block
with the merged output and lse. So the backward passes here trust the ``out`` and ``softmax_lse``
that they get.

The names, their order and the results are those of flash-attn 2.8.3. Its functions are torch ops;
these are Python functions. None has a gradient of its own: requesting one raises. ``rng_state`` is
int64 [2]: the first number is the seed of dropout, the second is 0.
"""

from __future__ import annotations

import sys
from typing import TypeAlias

import torch
from torch import Tensor

from tilewise.checks import check_tensor
from tilewise.compat.flash_attn.arguments import Options, check_rank, read, two_bounds
from tilewise.compat.flash_attn.calls import (
    Answer,
    Packing,
    check_dense,
    check_packed,
    paged,
    whole,
)
from tilewise.compat.gradients import Forward, forward_only, gradients_of
from tilewise.engine.call import read_keywords
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.variants.lower import statistics_dtype

Passed: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # out, softmax_lse, S_dmask, rng_state
_PIECE = 128  # rows in multiples of which flash-attn 2 lays out softmax_d
_FIX = "call flash_attn_func, or write an autograd.Function over the two passes"


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> Passed:
    """Run the forward pass of ``flash_attn_func``, whose arguments these are.

    Returns:
        out [B, M, Hq, Dv]; softmax_lse [B, Hq, M], float32 (float64 for float64), +inf for a row
        without keys; S_dmask, empty unless return_softmax with dropout; rng_state, int64 [2].

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    check_dense(q=q, k=k, v=v)
    window = two_bounds(window_size_left, window_size_right)
    flags = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    options = read(q.shape[0], q.shape[2], *flags)
    with torch.no_grad():
        found = whole(q, k, v, None, options, lse=True, signed=return_softmax)
    return _passed("_flash_attn_forward", found, q, k, v)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> Passed:
    """Run the forward pass of ``flash_attn_varlen_func``, whose arguments these are.

    Besides, ``leftpad_k``, integer [sequences], says how many keys at the beginning of each do not
    count, and ``seqused_k`` how many keys of each there are, instead of all. ``zero_tensors`` is of
    no effect: rows without keys are 0 anyway.

    Returns:
        out [Tq, Hq, Dv]; softmax_lse [Hq, Tq]; S_dmask and rng_state as ``_flash_attn_forward``.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: dropout with a block_table, leftpad_k or seqused_k.
    """
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    check_packed(packing, block_table is not None, q, k=k, v=v)
    window = two_bounds(window_size_left, window_size_right)
    flags = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    options = read(cu_seqlens_q.shape[0] - 1, q.shape[1], *flags)
    with torch.no_grad():
        if block_table is None and leftpad_k is None and seqused_k is None:
            found = whole(q, k, v, packing, options, lse=True, signed=return_softmax)
        else:
            found = paged(q, k, v, packing, options, block_table, leftpad_k, seqused_k)
    return _passed("_flash_attn_varlen_forward", found, q, k, v)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients of ``_flash_attn_forward`` into dq, dk and dv.

    Pass the q, k, v, flags and (with dropout) ``rng_state`` of the forward pass. The softmax of
    dout, out [B, M, Hq, Dv] and softmax_lse [B, Hq, M] may cover more keys than k has. Give dq, dk
    and dv the shapes and dtypes of q, k and v, with any strides; None skips a gradient.

    Returns:
        softmax_d, [B, Hq, M up to a multiple of 128]: (1 - dropout_p) * sum over Dv of dout * out,
        and 0 behind the last row.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: float32 in a ring of ring-flash-attention or yunchang, which would be wrong.
    """
    _refuse_sums_in_place(q)
    check_dense(dout=dout, q=q, k=k, v=v, out=out)
    window = two_bounds(window_size_left, window_size_right)
    flags = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    options = read(q.shape[0], q.shape[2], *flags)
    _check_rows(dout, q, v, out, softmax_lse, (q.shape[0], q.shape[2], q.shape[1]))
    seed = _seed_of(rng_state, options)
    with torch.no_grad():
        given = [each.transpose(1, 2) for each in (dout, q, k, v, out)]
        buffers = [None if x is None else x.transpose(1, 2) for x in _checked(dq, dk, dv, q, k, v)]
        delta = _delta(given, options)  # now: dq may be the memory of dout
        _write_gradients(given, softmax_lse, buffers, options, seed, None)
        return torch.nn.functional.pad(delta, (0, -delta.shape[-1] % _PIECE))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Write the gradients of ``_flash_attn_varlen_forward`` into dq, dk and dv.

    The arguments are those of ``_flash_attn_backward`` for packed tensors: dout and out
    [Tq, Hq, Dv], softmax_lse [Hq, Tq]. ``zero_tensors`` is of no effect.

    Returns:
        softmax_d, [Hq, Tq + 128 sequences]: that of row i of sequence b, which begins at row s, at
        s + 128 b + i, and 0 elsewhere.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: as ``_flash_attn_backward``.
    """
    _refuse_sums_in_place(q)
    packing = Packing((cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    check_packed(packing, False, q, k=k, v=v, dout=dout, out=out)
    window = two_bounds(window_size_left, window_size_right)
    flags = (dropout_p, softmax_scale, causal, window, softcap, alibi_slopes)
    sequences = cu_seqlens_q.shape[0] - 1
    options = read(sequences, q.shape[1], *flags)
    _check_rows(dout, q, v, out, softmax_lse, (q.shape[1], q.shape[0]))
    seed = _seed_of(rng_state, options)
    with torch.no_grad():
        given = [dout, q, k, v, out]
        buffers = _checked(dq, dk, dv, q, k, v)
        delta = _delta(given, options)  # now: dq may be the memory of dout
        _write_gradients(given, softmax_lse, buffers, options, seed, packing.starts)
        starts = cu_seqlens_q.contiguous()
        rows = torch.arange(q.shape[0], device=q.device, dtype=starts.dtype)
        own = torch.searchsorted(starts, rows, right=True) - 1
        found = delta.new_zeros(delta.shape[0], q.shape[0] + _PIECE * sequences)
        return found.index_copy(1, rows + _PIECE * own, delta)


def _passed(name: str, found: Answer, q: Tensor, k: Tensor, v: Tensor) -> Passed:
    """Return what a forward pass returns, tied to the arguments that may want a gradient."""
    assert found.lse is not None
    given = {"q": q, "k": k, "v": v}
    out, lse = forward_only(name, _FIX, (found.out, found.lse), given)
    state = torch.zeros(2, dtype=torch.int64, device=q.device)
    if found.seed is not None:
        state = torch.stack((found.seed, state[1]))
    return out, lse, found.signed, state


def _refuse_sums_in_place(q: Tensor) -> None:
    """Refuse float32 to callers whose sums of gradients would lie in the buffers of a block.

    ``buffer.to(torch.float32)`` copies a buffer of 16 bits, the only kind that flash-attn takes. It
    returns a float32 buffer as it is, and the pass over the next block overwrites the sum.
    """
    if q.dtype is not torch.float32 or torch.compiler.is_compiling():
        return
    caller = str(sys._getframe(2).f_globals.get("__name__", ""))
    if caller.startswith(("ring_flash_attn.", "yunchang.")) and "llama3" not in caller:
        raise Unsupported(
            f"float32 in a ring of {caller}: it adds up gradients in the buffers of a block",
            fix="use bfloat16 or float16 there, or tilewise.distributed.context_parallel_attention",
        )


def _seed_of(rng_state: Tensor | None, options: Options) -> Tensor | None:
    """Return the seed of the forward pass; None without dropout."""
    if not options.dropout_p:
        return None
    required = "what the forward pass returned, an int64 tensor [2], as dropout_p is not 0"
    rng_state = check_tensor("rng_state", rng_state, required)
    if rng_state.dtype is not torch.int64 or tuple(rng_state.shape) != (2,):
        came = f"a tensor of {rng_state.dtype}, shape {tuple(rng_state.shape)}"
        raise InvalidArgument("rng_state", came, required)
    return rng_state[0]


def _check_rows(
    dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: object, rows: tuple[int, ...]
) -> None:
    """dout, out and softmax_lse have the rows of q; the first two the width of v."""
    due = (*q.shape[:-1], v.shape[-1])
    for name, tensor in (("dout", dout), ("out", out)):
        if tuple(tensor.shape) != due:
            raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", f"{due}, as of the output")
        if tensor.dtype != q.dtype or tensor.device != q.device:
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"q's, {q.dtype} on {q.device}")
    check_rank("softmax_lse", lse, "[B, H, M]" if len(rows) == 3 else "[H, T]")
    assert isinstance(lse, Tensor)
    if tuple(lse.shape) != rows:
        raise InvalidArgument("softmax_lse", f"shape {tuple(lse.shape)}", f"{rows}, as of the rows")
    if not lse.dtype.is_floating_point or lse.device != q.device:
        came = f"{lse.dtype} on {lse.device}"
        raise InvalidArgument("softmax_lse", came, f"{statistics_dtype(q.dtype)} on {q.device}")


def _checked(
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor | None]:
    """Return the buffers of the gradients, which have room for them."""
    for name, buffer, like in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        if buffer is None:
            continue
        required = f"a tensor of {like.dtype}, shape {tuple(like.shape)}, on {like.device}, or None"
        check_tensor(name, buffer, required)
        if (buffer.shape, buffer.dtype, buffer.device) != (like.shape, like.dtype, like.device):
            came = f"one of {buffer.dtype}, shape {tuple(buffer.shape)}, on {buffer.device}"
            raise InvalidArgument(name, came, required)
    return [dq, dk, dv]


def _write_gradients(
    given: list[Tensor],
    lse: Tensor,
    buffers: list[Tensor | None],
    options: Options,
    seed: Tensor | None,
    packed: tuple[Tensor, Tensor] | None,
) -> None:
    """Compute the gradients that have a buffer, and copy them there.

    ``given`` are dout, q, k, v and out, with heads before rows where they are dense.
    """
    dout, *operands, out = given
    flags = (options.mask, options.score(), options.scale, float(options.dropout_p))
    keywords = read_keywords(*flags, None, None, packed)
    q, k, v = operands
    of_q, of_k, of_v = (buffer is not None for buffer in buffers)
    forward = Forward(q, k, v, out, lse)
    gradients = gradients_of(forward, dout, keywords, seed, (of_q, of_k, of_v))
    for buffer, gradient in zip(buffers, gradients, strict=True):
        if buffer is not None:
            buffer.copy_(gradient)


def _delta(given: list[Tensor], options: Options) -> Tensor:
    """(1 - dropout_p) * sum over the width of dout * out: [B, Hq, M], packed [Hq, Tq]."""
    dout, *_, out = given
    wide = statistics_dtype(dout.dtype)
    found = (dout.to(wide) * out.to(wide)).sum(-1) * (1 - options.dropout_p)
    return found if found.dim() == 3 else found.transpose(0, 1)
