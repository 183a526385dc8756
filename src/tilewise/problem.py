"""Floor 2: what is asked (Problem), with what (Operands), and what comes back (Result, Grads).

All validation of user input that does not concern a variant's captured tensors is here too; those
are checked where they are lowered (``variants/lower.py``).

Letters: B batch, Hq query heads, Hk key/value heads (Hq % Hk == 0), M queries, N keys, D query/key
width, Dv value width; in a variable-length call Tq and Tk are the packed totals.
"""

import math
from numbers import Real
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.float8 import FLOAT8, fix_for, output_dtype
from tilewise.variants.lower import check_caps, largest_factor, statistics_dtype
from tilewise.variants.program import Program

__all__ = [
    "DTYPES",
    "Grads",
    "Needs",
    "Operands",
    "Problem",
    "Result",
    "Statistics",
    "check_cu_seqlens",
    "check_cu_tensors",
    "check_page_tensors",
    "check_sinks",
    "dense_problem",
    "lower_sinks",
    "output_like",
    "paged_problem",
    "varlen_problem",
]

# What a call wants to know about its rows: nothing, the statistics, or the top key too.
Statistics: TypeAlias = Literal["", "rows", "top1"]

_SYMBOLS = (torch.SymInt, torch.SymFloat)
_NUMBERS = (int, float, *_SYMBOLS, Real)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, FLOAT8)


class Problem(NamedTuple):
    """What is asked: immutable, hashable, no tensors.

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


class Operands(NamedTuple):
    """The tensors of one call, in kernel form (see ``variants/lower.py``).

    Args:
        q, k, v: [B, Hq, M, D], [B, Hk, N, D], [B, Hk, N, Dv] with any strides; varlen
            [Tq, Hq, D], [Tk, Hk, D], [Tk, Hk, Dv].
        mask_tensors, score_tensors: what the programs captured, in slot order. In a
            variable-length call their first dimension counts sequences, their rows and keys
            count within a sequence and may be longer than any of them.
        sinks: [Hq], contiguous, float32 (float64 for float64), or None.
        cu_seqlens_q, cu_seqlens_k: int64 [B + 1], contiguous; None if dense. On the CPU, checked;
            for the GPU backend's tensors on their device, where their values are not read.
        seed: 64 random bits as a number in [0, 2**64); 0 without dropout.
        block_table: int32 [B, P], contiguous: key n of sequence b is row ``n % page_size`` of page
            ``block_table[b, n // page_size]``; k and v are then [pages, Hk, page_size, D or Dv] of
            any strides. Entries beyond a sequence's keys are not looked at. None without pages.
        key_lengths: int32 [B], contiguous: how many keys each sequence has, at most P * page_size.
        q_scale, k_scale, v_scale: float32 [B, Hq], [B, Hk], [B, Hk] (one row per sequence in a
            variable-length call), contiguous: what a stored float8 number stands for is it times
            its head's scale. None where it is 1.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask_tensors: tuple[Tensor, ...] = ()
    score_tensors: tuple[Tensor, ...] = ()
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seed: int = 0
    block_table: Tensor | None = None
    key_lengths: Tensor | None = None
    q_scale: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class Result(NamedTuple):
    """What a forward pass gives.

    Args:
        out: [B, Hq, M, Dv] in q's dtype (bfloat16 for float8) and memory order; varlen
            [Tq, Hq, Dv].
        lse: natural-log sum of exponentials of each row, sink included, [B, Hq, M] (varlen
            [Hq, Tq]), float32 (float64 for float64); -inf for a row that sees nothing.
        stats: [2, *lse.shape] in lse's dtype, before sinks: row_max in base-2 units
            (log2(e) * score), and row_sum = sum of exp2(score2 - row_max). For the backward pass.
            With statistics [3, *lse.shape]: row_mean too, the mean under the probabilities (the
            sink's among them) of the logits less the largest of them, in base-2 units.
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


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool
    k: bool
    v: bool
    score_tensors: tuple[bool, ...] = ()
    sinks: bool = False


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


def dense_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Program,
    score: Program,
    scale: float | None,
    dropout_p: float,
    sinks: Tensor | None,
) -> Problem:
    """The problem of ``attention``, checked (arguments as there; programs already built).

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_tensors(q, k, v, rank=4, shape="[B, H, S, D]")
    check_caps(score, q.dtype)
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != batch:
            raise InvalidArgument(
                name,
                f"batch {tensor.shape[0]} (shape {tuple(tensor.shape)})",
                f"q's batch, {batch}",
                "Batches do not broadcast; expand() costs no memory.",
            )
    _check_pairing(q, k, v, heads_dim=1, keys_dim=2)
    sizes = (batch, heads, kv_heads, queries, keys, head_dim, v.shape[3])
    numbers = _check_numbers(scale, dropout_p, q)
    has_sinks = check_sinks(sinks, heads, q.device.type)
    return Problem(*sizes, q.dtype, q.device.type, "dense", mask, score, *numbers, has_sinks)


def varlen_problem(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    mask: Program,
    score: Program,
    scale: float | None,
    dropout_p: float,
    sinks: Tensor | None,
) -> Problem:
    """The problem of ``attention_varlen``, checked but for the values of cu_seqlens.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    _check_tensors(q, k, v, rank=3, shape="[T, H, D]")
    _check_pairing(q, k, v, heads_dim=1, keys_dim=0)
    check_cu_tensors(cu_seqlens_q, cu_seqlens_k)
    check_caps(score, q.dtype)
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    batch = cu_seqlens_q.shape[0] - 1
    sizes = (batch, heads, kv_heads, queries, keys, head_dim, v.shape[2])
    numbers = _check_numbers(scale, dropout_p, q)
    has_sinks = check_sinks(sinks, heads, q.device.type)
    return Problem(*sizes, q.dtype, q.device.type, "varlen", mask, score, *numbers, has_sinks)


def paged_problem(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    *,
    mask: Program,
    score: Program,
    scale: float | None,
    sinks: Tensor | None,
) -> Problem:
    """The problem of ``attention_paged``, checked but for the values of its integer tensors.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    packed = cu_seqlens_q is not None
    _check_tensors(
        q,
        k_pages,
        v_pages,
        rank=3 if packed else 4,
        shape="[T, Hq, D]" if packed else "[B, Hq, M, D]",
        paged=True,
    )
    _check_pairing(q, k_pages, v_pages, heads_dim=1, keys_dim=2, paged=True)
    check_caps(score, q.dtype)
    check_page_tensors(block_table, key_lengths, cu_seqlens_q)
    batch, slots = block_table.shape
    if not packed and q.shape[0] != batch:
        raise InvalidArgument(
            "block_table", f"{batch} rows", f"one for each of q's {q.shape[0]} batch items"
        )
    _, kv_heads, page_size, head_dim = k_pages.shape
    queries, heads = (q.shape[0], q.shape[1]) if packed else (q.shape[2], q.shape[1])
    sizes = (batch, heads, kv_heads, queries, slots * page_size, head_dim, v_pages.shape[3])
    layout = "varlen" if packed else "dense"
    numbers = _check_numbers(scale, 0.0, q)
    rest = (*numbers, check_sinks(sinks, heads, q.device.type), page_size)
    return Problem(*sizes, q.dtype, q.device.type, layout, mask, score, *rest)


def check_page_tensors(
    block_table: Tensor, key_lengths: Tensor, cu_seqlens_q: Tensor | None
) -> None:
    """Types, dtypes and shapes of what finds pages (their values: ``engine/pages.py``).

    Raises:
        InvalidArgument, InvalidType: naming the one that is wrong.
    """
    _check_integers("block_table", block_table, 2, "[sequences, pages of the longest]")
    _check_integers("key_lengths", key_lengths, 1, "[sequences]")
    batch = block_table.shape[0]
    if key_lengths.shape[0] != batch:
        raise InvalidArgument(
            "key_lengths",
            f"{key_lengths.shape[0]} entries",
            f"one for each row of block_table, {batch}",
        )
    if cu_seqlens_q is None:
        return
    _check_integers("cu_seqlens_q", cu_seqlens_q, 1, "[sequences + 1]")
    if cu_seqlens_q.shape[0] != batch + 1:
        raise InvalidArgument(
            "cu_seqlens_q",
            f"{cu_seqlens_q.shape[0]} entries",
            f"one more than block_table has rows, {batch + 1}",
        )


def _check_integers(name: str, tensor: object, rank: int, shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidType(name, _named(tensor), f"an int32 or int64 tensor {shape}")
    if tensor.dtype not in (torch.int32, torch.int64):
        raise InvalidArgument(name, f"a tensor of {tensor.dtype}", "torch.int32 or torch.int64")
    if tensor.dim() != rank:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", shape)


def check_cu_tensors(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Types, dtypes and shapes of cu_seqlens (their values: ``check_cu_seqlens``).

    Raises:
        InvalidArgument, InvalidType: naming the one that is wrong.
    """
    for name, tensor in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        _check_integers(name, tensor, 1, "[sequences + 1]")
        if tensor.shape[0] < 1:
            raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", "[sequences + 1]")
    if cu_seqlens_q.shape[0] != cu_seqlens_k.shape[0]:
        raise InvalidArgument(
            "cu_seqlens_k",
            f"{cu_seqlens_k.shape[0]} entries",
            f"as many as cu_seqlens_q, {cu_seqlens_q.shape[0]}",
        )


def check_cu_seqlens(name: str, tensor: Tensor, total: int) -> list[int]:
    """The values of cu_seqlens: 0 at the start, never falling, ``total`` at the end.

    Raises:
        InvalidArgument: where they are not.
    """
    values: list[int] = tensor.tolist()
    if values[0] != 0:
        raise InvalidArgument(name, f"{values[0]} as its first entry", "0 as the first entry")
    if values[-1] != total:
        past = "past" if values[-1] > total else "before"
        raise InvalidArgument(
            name,
            f"{values[-1]} as its last entry, {past} the end of the packed rows",
            f"the number of packed rows, {total}",
            "" if values[-1] > total else "Slice the rows off, or end with a sequence for them.",
        )
    if values != sorted(values):
        index = next(i for i in range(1, len(values)) if values[i] < values[i - 1])
        raise InvalidArgument(
            name,
            f"{values[index - 1]} followed by {values[index]} at entry {index}",
            "entries that never decrease",
        )
    return values


def _named(value: object) -> str:
    return f"a {type(value).__name__}"


def _check_tensors(q: Any, k: Any, v: Any, *, rank: int, shape: str, paged: bool = False) -> None:
    of_keys = (4, "[pages, Hk, page_size, D]") if paged else (rank, shape)
    k_name, v_name = _key_names(paged)
    for name, tensor, dims, form in (
        ("q", q, rank, shape),
        (k_name, k, *of_keys),
        (v_name, v, *of_keys),
    ):
        if not isinstance(tensor, Tensor):
            raise InvalidType(name, _named(tensor), f"a tensor {form}")
        if tensor.is_nested or tensor.layout is not torch.strided:
            came = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise InvalidArgument(name, came, "strided, or packed for attention_varlen")
        if tensor.dim() != dims:
            fix = ""
            if dims == 4 and tensor.dim() == 3 and not paged:
                fix = "For packed sequences call attention_varlen; else add the batch: x[None]."
            raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", f"{form}, rank {dims}", fix)
        if tensor.device != q.device:
            raise InvalidArgument(name, f"device {tensor.device}", f"q's device, {q.device}")
        if tensor.dtype not in DTYPES:
            names = ", ".join([str(dtype) for dtype in DTYPES])
            raise InvalidArgument(name, f"{tensor.dtype}", f"one of {names}", fix_for(tensor.dtype))
        if tensor.dtype != q.dtype:
            raise InvalidArgument(
                name, f"{tensor.dtype}", f"q's dtype, {q.dtype}", "Cast one of them, or autocast."
            )


def _key_names(paged: bool) -> tuple[str, str]:
    return ("k_pages", "v_pages") if paged else ("k", "v")


def _check_pairing(
    q: Tensor, k: Tensor, v: Tensor, *, heads_dim: int, keys_dim: int, paged: bool = False
) -> None:
    """K and v belong together, and q's heads divide over theirs."""
    k_name, v_name = _key_names(paged)
    if k.shape[-1] != q.shape[-1]:
        raise InvalidArgument(k_name, f"width D = {k.shape[-1]}", f"q's width, {q.shape[-1]}")
    if v.shape[keys_dim] != k.shape[keys_dim]:
        raise InvalidArgument(
            v_name, f"{v.shape[keys_dim]} keys", f"k's number of keys, {k.shape[keys_dim]}"
        )
    if paged and k.shape[2] == 0:
        raise InvalidArgument(k_name, "page_size 0", "at least one row in a page")
    if paged and v.shape[0] != k.shape[0]:
        raise InvalidArgument(
            v_name, f"{v.shape[0]} pages", f"k_pages' number of pages, {k.shape[0]}"
        )
    heads, kv_heads = q.shape[heads_dim], k.shape[heads_dim]
    if v.shape[heads_dim] != kv_heads:
        raise InvalidArgument(v_name, f"{v.shape[heads_dim]} heads", f"k's heads, {kv_heads}")
    if kv_heads == 0 or heads == 0:
        name, came = (k_name, kv_heads) if kv_heads == 0 else ("q", heads)
        raise InvalidArgument(name, f"{came} heads", "at least one head")
    if heads % kv_heads != 0:
        raise InvalidArgument(
            k_name,
            f"{kv_heads} key/value heads for {heads} query heads",
            "a number of heads that divides q's",
            "Grouped-query attention shares each key head among Hq / Hk query heads.",
        )
    for name, width in (("q", q.shape[-1]), (v_name, v.shape[-1])):
        if width == 0:
            raise InvalidArgument(name, "width 0", "a width of at least 1")


def _check_numbers(scale: object, dropout_p: object, q: Tensor) -> tuple[float, float]:
    if scale is None:
        number = 1.0 / math.sqrt(q.shape[-1])
    else:
        number = _real("scale", scale, "a finite number, or None for 1/sqrt(D)")
        largest = largest_factor(q.dtype)
        # A comparison, and not math.isfinite: torch.compile traces it for a symbolic scale.
        if not -largest <= number <= largest:
            required = f"a finite number, for {q.dtype} up to {largest:.2g}"
            raise InvalidArgument("scale", str(number), required)
    rate = _real("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0.0 <= rate < 1.0:
        raise InvalidArgument("dropout_p", str(rate), "a probability in [0, 1)")
    return number, rate


def _real(name: str, value: object, required: str) -> float:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        fix = "Multiply q by a tensor scale." if name == "scale" else ""
        raise InvalidType(name, _named(value), required, fix)
    # A symbolic number of a traced call stands for a float and stays as it is.
    return cast(float, value) if isinstance(value, _SYMBOLS) else float(value)


def check_sinks(sinks: object, heads: int, device: str) -> bool:
    """Whether there are sinks, which must then be a floating tensor [Hq] on ``device``.

    Raises:
        InvalidArgument, InvalidType: where they are not.
    """
    if sinks is None:
        return False
    required = f"a floating tensor [Hq] with Hq = {heads}"
    if not isinstance(sinks, Tensor):
        raise InvalidType("sinks", _named(sinks), required)
    if not sinks.dtype.is_floating_point:
        raise InvalidArgument("sinks", f"a tensor of {sinks.dtype}", required)
    if sinks.dim() != 1 or sinks.shape[0] != heads:
        raise InvalidArgument("sinks", f"shape {tuple(sinks.shape)}", required)
    if sinks.device.type != device:
        raise InvalidArgument("sinks", f"device {sinks.device}", f"q's device, {device}")
    return True


def lower_sinks(sinks: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Sinks as kernels read them: contiguous, in the dtype of the statistics; differentiable."""
    return None if sinks is None else sinks.to(statistics_dtype(dtype)).resolve_neg().contiguous()


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
