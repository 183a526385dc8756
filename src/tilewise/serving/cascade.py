"""Attention of many sequences whose keys begin alike: the common keys are read once for all."""

from typing import Any

import torch
from torch import Tensor

from tilewise.checks import check_whole
from tilewise.errors import InvalidArgument
from tilewise.functional import AttentionResult, MaskLike, ScoreLike, attention_paged
from tilewise.merging import merge
from tilewise.validation import check_paged
from tilewise.variants.expr import decode
from tilewise.variants.masks import causal
from tilewise.variants.program import EXPR
from tilewise.variants.values import as_mask, as_score

_CAUSAL = causal()
_POSITIONS = frozenset("bhmnMN")
# Up to 8 rows have another kernel on the CPU, which rounds otherwise. The common keys always meet
# more, so that the bits of a sequence do not depend on how many share them.
_LEAST_ROWS = 9


def cascade_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_table: Tensor,
    key_lengths: Tensor,
    shared: int,
    cu_seqlens_q: Tensor | None = None,
    *,
    mask: MaskLike = _CAUSAL,
    score: ScoreLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:
    """Compute ``attention_paged`` when all sequences have their first keys in the same pages.

    The queries of all sequences, and of all heads that share keys, attend to the common keys as one
    block of rows. So the common keys are read once and not once for each sequence. Then each
    sequence's queries attend to its other keys, and ``merge`` joins the two. The result is the same
    except for rounding. Forward only.

    Args:
        q: [B, Hq, M, D]; or packed [Tq, Hq, D], with cu_seqlens_q.
        k_pages: [pages, Hk, page_size, D].
        v_pages: [pages, Hk, page_size, Dv].
        block_table: int32 (or int64) [B, P]; its first shared / page_size columns are the same
            for all sequences.
        key_lengths: int32 (or int64) [B], of all keys; with a causal mask ``shared`` and the number
            of the sequence's queries at least, so that every query sees every common key.
        shared: how many keys are common, a multiple of the page size.
        cu_seqlens_q: int32 or int64 [B + 1], or None.
        mask: ``masks.causal()``, or None for no mask: others may hide common keys.
        score: one that depends on the score alone, such as ``scores.softcap``: the common keys meet
            rows of all sequences and heads at once.
        scale: s = scale * q.k; 1/sqrt(D) if None.
        sinks: floating [Hq], as in ``attention``.
        k_scale: of pages in 8 bits, as in ``attention_paged``.
        v_scale: of pages in 8 bits, as in ``attention_paged``.
        return_lse: ask for an AttentionResult with lse.
        backend: None (choose), or a name of ``explain``.

    Returns:
        The output [B, Hq, M, Dv] (packed [Tq, Hq, Dv]), or an AttentionResult.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong. Values of tensors are
            looked at on the CPU only.
        Unsupported: as ``attention_paged``.

    Source: Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding",
    FlashInfer, 2024; Juravsky et al., "Hydragen", 2024, section 3.
    """
    _check_variants(mask, score)
    check_paged(q, k_pages, v_pages, block_table, key_lengths, cu_seqlens_q)
    common: dict[str, Any] = {"score": score, "scale": scale, "backend": backend}
    common |= {"k_scale": k_scale, "v_scale": v_scale}
    pages = _shared_pages(k_pages, block_table, shared)
    if pages == 0 or q.numel() == 0:
        more = {**common, "mask": mask, "sinks": sinks, "return_lse": return_lse}
        arguments = (q, k_pages, v_pages, block_table, key_lengths, cu_seqlens_q)
        return attention_paged(*arguments, **more)
    if block_table.is_cpu and key_lengths.is_cpu:
        _check_values(q, block_table[:, :pages], key_lengths, shared, cu_seqlens_q, mask)
    first = _of_common(q, k_pages, v_pages, block_table[:1, :pages], shared, common)
    rest: AttentionResult = attention_paged(
        q,
        k_pages,
        v_pages,
        block_table[:, pages:],
        key_lengths - shared,
        cu_seqlens_q,
        mask=mask,
        return_lse=True,
        **common,
    )
    result = merge(first, rest, sinks=sinks)
    return result if return_lse else result.out


def _of_common(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    shared: int,
    keywords: dict[str, Any],
) -> AttentionResult:
    """All rows against the common keys: those of a group's heads are rows of their keys' head."""
    packed = q.dim() == 3
    heads_first = q.transpose(0, 1) if packed else q.transpose(0, 1).flatten(1, 2)
    heads, count, width = heads_first.shape  # [Hq, rows, D]
    kv_heads = k_pages.shape[1]
    rows = heads_first.reshape(1, kv_heads, heads // kv_heads * count, width)
    real = rows.shape[2]
    if real < _LEAST_ROWS:
        rows = torch.cat([rows, rows.new_zeros(1, kv_heads, _LEAST_ROWS - real, width)], 2)
    length = torch.full((1,), shared, dtype=torch.int32, device=table.device)
    found = attention_paged(rows, k_pages, v_pages, table, length, return_lse=True, **keywords)
    out = found.out[:, :, :real].reshape(heads, count, v_pages.shape[3])
    lse = found.lse[:, :, :real].reshape(heads, count)
    if packed:
        return AttentionResult(out.transpose(0, 1), lse, None)
    sizes = (heads, q.shape[0], q.shape[2])
    out, lse = out.unflatten(1, sizes[1:]), lse.reshape(sizes)
    return AttentionResult(out.transpose(0, 1), lse.transpose(0, 1), None)


def _check_variants(mask: MaskLike, score: ScoreLike) -> None:
    program = () if mask is None else as_mask(mask).program
    if program not in ((), _CAUSAL.program):
        required = "masks.causal() or None: others may hide keys of the common part"
        raise InvalidArgument("mask", "another mask", required, "Call attention_paged.")
    for instr in () if score is None else as_score(score).program:
        free = instr.op == "softcap"
        if instr.op == EXPR:
            nodes = decode(str(instr.params[0])).nodes
            free = not any(node.op in _POSITIONS for node in nodes)
        if not free:
            required = "one of the score alone, such as scores.softcap"
            came = f"{instr.op}, which knows sequences, heads or positions"
            raise InvalidArgument("score", came, required, "Call attention_paged.")


def _shared_pages(k_pages: Tensor, block_table: Tensor, shared: int) -> int:
    """Return how many pages the common keys fill."""
    check_whole("shared", shared)
    size, slots = k_pages.shape[2], block_table.shape[-1]
    if shared % size or shared // size > slots:
        required = f"a multiple of the page size {size} from 0 to {slots * size}"
        raise InvalidArgument("shared", str(shared), required)
    return shared // size


def _check_values(
    q: Tensor,
    common: Tensor,
    key_lengths: Tensor,
    shared: int,
    cu_seqlens_q: Tensor | None,
    mask: MaskLike,
) -> None:
    """The sequences share their first pages, and no query is among the keys in them."""
    differs = (common != common[:1]).any(1)
    if bool(differs.any()):
        came = f"other pages for sequence {int(differs.nonzero()[0])} than for sequence 0"
        required = f"the same first {common.shape[1]} pages, of {shared} keys, for all"
        raise InvalidArgument("block_table", came, required)
    if cu_seqlens_q is not None and not cu_seqlens_q.is_cpu:
        return
    counts = torch.tensor(q.shape[-2]) if cu_seqlens_q is None else cu_seqlens_q.diff()
    short = key_lengths < shared + (0 if mask is None else counts)
    if bool(short.any()):
        index = int(short.nonzero()[0])
        came = f"{int(key_lengths[index])} keys for sequence {index}"
        required = f"{shared} common ones and one for each of its queries at least"
        raise InvalidArgument("key_lengths", came, required)
