"""User input as a Problem: every check of it but of what a variant captures.

Captured tensors are checked where they are lowered (``variants/lower.py``). Letters are those of
``problem.py``.
"""

import math
from numbers import Real
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from tilewise.checks import FLOATING, INDICES, check_tensor, named
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.problem import DTYPES, Problem
from tilewise.variants.float8 import FLOAT8, STORED, fix_for
from tilewise.variants.lower import check_caps, largest_factor, statistics_dtype
from tilewise.variants.program import Program

_SYMBOLS = (torch.SymInt, torch.SymFloat)
_NUMBERS = (int, float, *_SYMBOLS, Real)
_Sizes: TypeAlias = tuple[int, int, int, int, int, int, int]  # B, Hq, Hk, M, N, D and Dv


def dense_problem(q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Problem:
    """Return the problem of ``attention``, checked; ``asked`` are the keywords of ``_problem``."""
    _check_tensors(q, k, v, rank=4, shape="[B, H, S, D]")
    (batch, heads, queries, head_dim), (_, kv_heads, keys, _) = q.shape, k.shape
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[0] != batch:
            raise InvalidArgument(
                name,
                f"batch {tensor.shape[0]} (shape {tuple(tensor.shape)})",
                f"q's batch, {batch}",
                "Batches do not broadcast; expand() costs no memory.",
            )
    _check_pairing(q, k, v, keys_dim=2)
    sizes = (batch, heads, kv_heads, queries, keys, head_dim, v.shape[3])
    return _problem(q, sizes, "dense", **asked)


def varlen_problem(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **asked: Any
) -> Problem:
    """Return the problem of ``attention_varlen``, checked but for the values of cu_seqlens."""
    _check_tensors(q, k, v, rank=3, shape="[T, H, D]")
    _check_pairing(q, k, v, keys_dim=0)
    check_cu_tensors(cu_seqlens_q, cu_seqlens_k)
    (queries, heads, head_dim), (keys, kv_heads, _) = q.shape, k.shape
    batch = cu_seqlens_q.shape[0] - 1
    sizes = (batch, heads, kv_heads, queries, keys, head_dim, v.shape[2])
    return _problem(q, sizes, "varlen", **asked)


def check_paged(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    cu_seqlens_q: Tensor | None,
) -> None:
    """Tensors of pages have the right types, and shapes that fit q's."""
    rank, shape = (4, "[B, Hq, M, D]") if cu_seqlens_q is None else (3, "[T, Hq, D]")
    _check_tensors(q, k_pages, v_pages, rank=rank, shape=shape, paged=True)
    _check_pairing(q, k_pages, v_pages, keys_dim=2, paged=True)
    check_page_tensors(block_table, key_lengths, cu_seqlens_q)


def paged_problem(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    cu_seqlens_q: Tensor | None,
    **asked: Any,
) -> Problem:
    """Return the problem of ``attention_paged``, checked but for the values of integer tensors."""
    check_paged(q, k_pages, v_pages, block_table, key_lengths, cu_seqlens_q)
    packed = cu_seqlens_q is not None
    batch, slots = block_table.shape
    if not packed and q.shape[0] != batch:
        raise InvalidArgument(
            "block_table", f"{batch} rows", f"one for each of q's {q.shape[0]} batch items"
        )
    _, kv_heads, page_size, head_dim = k_pages.shape
    queries, heads = (q.shape[0], q.shape[1]) if packed else (q.shape[2], q.shape[1])
    sizes = (batch, heads, kv_heads, queries, slots * page_size, head_dim, v_pages.shape[3])
    if v_pages.dtype != k_pages.dtype:
        required = f"the dtype of k_pages, {k_pages.dtype}"
        raise InvalidArgument("v_pages", f"{v_pages.dtype}", required)
    stored = None if k_pages.dtype == q.dtype else k_pages.dtype
    return _problem(q, sizes, "varlen" if packed else "dense", page_size, stored, **asked)


def _problem(
    q: Tensor,
    sizes: _Sizes,
    layout: str,
    page_size: int = 0,
    stored: torch.dtype | None = None,
    *,
    mask: Program,
    score: Program,
    scale: float | None,
    sinks: Tensor | None,
    dropout_p: float = 0.0,
) -> Problem:
    """Check what has nothing to do with keys and values; the programs are built already."""
    check_caps(score, q.dtype)
    numbers = check_scale(scale, q.shape[-1], q.dtype), check_probability("dropout_p", dropout_p)
    rest = (*numbers, check_sinks(sinks, q.shape[1], q.device.type), page_size, stored)
    return Problem(*sizes, q.dtype, q.device.type, layout, mask, score, *rest)


def check_page_tensors(
    block_table: Tensor, key_lengths: Tensor, cu_seqlens_q: Tensor | None
) -> None:
    """Types, dtypes and shapes of what finds pages (their values: ``engine/pages.py``)."""
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
    check_tensor(name, tensor, f"an int32 or int64 tensor {shape}", INDICES, dims=rank)


def check_cu_tensors(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    """Types, dtypes and shapes of cu_seqlens (their values: ``check_cu_seqlens``)."""
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
    """Check and return the values of cu_seqlens: from 0, never falling, up to ``total``."""
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


def _check_tensors(q: Any, k: Any, v: Any, *, rank: int, shape: str, paged: bool = False) -> None:
    of_keys = (4, "[pages, Hk, page_size, D]") if paged else (rank, shape)
    k_name, v_name = _key_names(paged)
    for name, tensor, dims, form in (
        ("q", q, rank, shape),
        (k_name, k, *of_keys),
        (v_name, v, *of_keys),
    ):
        if not isinstance(tensor, Tensor):
            raise InvalidType(name, named(tensor), f"a tensor {form}")
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
        if paged and tensor is not q and tensor.dtype in STORED and q.dtype is not FLOAT8:
            continue  # of its scales and strides: ``engine/paged.py``
        if tensor.dtype not in DTYPES:
            names = ", ".join([str(dtype) for dtype in DTYPES])
            raise InvalidArgument(name, f"{tensor.dtype}", f"one of {names}", fix_for(tensor.dtype))
        if tensor.dtype != q.dtype:
            raise InvalidArgument(
                name, f"{tensor.dtype}", f"q's dtype, {q.dtype}", "Cast one of them, or autocast."
            )


def _key_names(paged: bool) -> tuple[str, str]:
    return ("k_pages", "v_pages") if paged else ("k", "v")


def _check_pairing(q: Tensor, k: Tensor, v: Tensor, *, keys_dim: int, paged: bool = False) -> None:
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
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads:
        raise InvalidArgument(v_name, f"{v.shape[1]} heads", f"k's heads, {kv_heads}")
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


def check_scale(scale: object, width: int, dtype: torch.dtype) -> float:
    """Return the scale of a call, 1/sqrt(width) for None; finite in what ``dtype`` computes in."""
    if scale is None:
        return 1.0 / math.sqrt(width)
    number = check_real("scale", scale, "a finite number, or None for 1/sqrt(D)")
    largest = largest_factor(dtype)
    # A comparison, and not math.isfinite: torch.compile traces it for a symbolic scale.
    if not -largest <= number <= largest:
        required = f"a finite number, for {dtype} up to {largest:.2g}"
        raise InvalidArgument("scale", str(number), required)
    return number


def check_probability(name: str, value: object) -> float:
    """Return a probability of dropping, below 1."""
    required = "a probability in [0, 1)"
    rate = check_real(name, value, required)
    if not 0.0 <= rate < 1.0:
        raise InvalidArgument(name, str(rate), required)
    return rate


def check_real(name: str, value: object, required: str) -> float:
    """Return a number as a float, a symbolic one as it is; InvalidType where it is none."""
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        fix = "Multiply q by a tensor scale." if name == "scale" else ""
        raise InvalidType(name, named(value), required, fix)
    # A symbolic number of a traced call stands for a float and stays as it is.
    return cast(float, value) if isinstance(value, _SYMBOLS) else float(value)


def check_sinks(sinks: object, heads: int, device: str) -> bool:
    """Return whether there are sinks, which must then be a floating tensor [Hq] on ``device``."""
    if sinks is None:
        return False
    required = f"a floating tensor [Hq] with Hq = {heads} on q's device, {device}"
    check_tensor("sinks", sinks, required, FLOATING, shape=(heads,), device=device)
    return True


def lower_sinks(sinks: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Sinks as kernels read them: contiguous, in the dtype of the statistics; differentiable."""
    return None if sinks is None else sinks.to(statistics_dtype(dtype)).resolve_neg().contiguous()
