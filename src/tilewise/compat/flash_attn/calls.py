"""The forward calls of flash-attn with their flags read: dense, packed, and over pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.flash_attn.arguments import Options, as_flash_attn, check_tensor
from tilewise.compat.flash_attn.cache import (
    Cache,
    attend,
    check_blocks,
    check_integers,
    check_lengths,
)
from tilewise.compat.flash_attn.probabilities import signed_probabilities
from tilewise.engine.seeds import draw_seed
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import AttentionResult, attention, attention_varlen
from tilewise.validation import check_cu_seqlens


class Answer(NamedTuple):
    """Result of a forward call.

    Args:
        out: [B, M, Hq, Dv] or [Tq, Hq, Dv].
        lse: [B, Hq, M] or [Hq, Tq], +inf for a row without keys; None where not asked for.
        signed: the signed probabilities; empty where not asked for, or without dropout.
        seed: of dropout; None without it.
    """

    out: Tensor
    lse: Tensor | None
    signed: Tensor
    seed: Tensor | None = None


class Packing(NamedTuple):
    """Starts of packed sequences, and the longest ones, which set the size of S_dmask."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def starts(self) -> tuple[Tensor, Tensor]:
        """Return both cu_seqlens."""
        return self.cu_seqlens_q, self.cu_seqlens_k


def check_dense(**tensors: object) -> None:
    """All are tensors [B, S, H, D].

    Raises:
        InvalidArgument, InvalidType: one is not.
    """
    for name, tensor in tensors.items():
        check_tensor(name, tensor, "[B, S, H, D]")


def check_packed(packing: Packing, pages: bool, q: object, **keys: object) -> None:
    """Queries are packed, [T, H, D]; keys too, or pages; cu_seqlens have one dimension.

    Raises:
        InvalidArgument, InvalidType: something has another shape, or is no tensor.
    """
    check_tensor("q", q, "[T, H, D]")
    for name, tensor in keys.items():
        check_tensor(name, tensor, "[blocks, page size, H, D]" if pages else "[T, H, D]")
    for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), packing.starts, strict=True):
        check_tensor(name, tensor, "[sequences + 1]")


def dense(q: Tensor, k: Tensor, v: Tensor, options: Options, lse: bool, signed: bool) -> Answer:
    """Attention of [B, S, H, D] tensors.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        options: the flags.
        lse: ask for it.
        signed: ask for signed probabilities, which are there with dropout only.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    seed = draw_seed(q.device) if options.dropout_p else None
    keywords = options.keywords(seed)
    nothing = q.new_empty(0)
    if not lse:
        out = attention(q, k, v, **keywords).transpose(1, 2)
        return Answer(out, None, nothing, seed)
    found = attention(q, k, v, **keywords, return_lse=True)
    probabilities = nothing
    if signed and seed is not None:
        probabilities = signed_probabilities(q, k, v, found.lse, options, seed)
    return Answer(found.out.transpose(1, 2), as_flash_attn(found.lse), probabilities, seed)


def packed(
    q: Tensor, k: Tensor, v: Tensor, packing: Packing, options: Options, lse: bool, signed: bool
) -> Answer:
    """Attention of packed sequences; the other arguments are those of ``dense``.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    starts, longest = packing.starts, (packing.max_seqlen_q, packing.max_seqlen_k)
    seed = draw_seed(q.device) if options.dropout_p else None
    keywords = options.keywords(seed)
    nothing = q.new_empty(0)
    if not lse:
        return Answer(attention_varlen(q, k, v, *starts, **keywords), None, nothing, seed)
    found = attention_varlen(q, k, v, *starts, **keywords, return_lse=True)
    probabilities = nothing
    if signed and seed is not None:
        found_lse = found.lse
        probabilities = signed_probabilities(q, k, v, found_lse, options, seed, starts, longest)
    return Answer(found.out, as_flash_attn(found.lse), probabilities, seed)


def paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    options: Options,
    block_table: Tensor | None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Answer:
    """Attention of packed queries to keys that a table finds, without dropout. Forward only.

    Args:
        q: [Tq, Hq, D].
        k: pages [blocks, page size, Hk, D] with a block_table, else packed [Tk, Hk, D].
        v: as k, with width Dv.
        packing: of the queries and of the keys.
        options: the flags.
        block_table: integer [sequences, blocks]; None where keys are packed.
        leftpad_k: integer [sequences]: how many keys at the beginning of each do not count.
        seqused_k: integer [sequences]: how many keys of each there are, instead of all.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
        Unsupported: dropout.
    """
    given = {"q": q, "k": k, "v": v, "alibi_slopes": options.slopes}
    if options.dropout_p:
        raise Unsupported(
            f"dropout_p = {options.dropout_p} with a block_table, leftpad_k or seqused_k",
            fix="set dropout_p=0.0, or pass the keys packed, without these",
        )
    rows, keys = packing.starts
    sequences, device = keys.shape[0] - 1, q.device.type
    check_integers("cu_seqlens_q", rows, (sequences + 1,), device)
    check_integers("cu_seqlens_k", keys, (sequences + 1,), device)
    for name, tensor in (("leftpad_k", leftpad_k), ("seqused_k", seqused_k)):
        if tensor is not None:
            check_integers(name, tensor, (sequences,), device)
    if rows.is_cpu:
        check_cu_seqlens("cu_seqlens_q", rows, q.shape[0])
    if block_table is None:
        k, v, block_table = _as_pages(k, v, packing, seqused_k)
    else:
        check_integers("block_table", block_table, (sequences, None), device)
    lengths = keys.diff() if seqused_k is None else seqused_k
    cache = Cache(k, v, lengths, block_table, leftpad_k)
    check_lengths(cache, "cu_seqlens_k" if seqused_k is None else "seqused_k")
    check_blocks(cache)
    found: AttentionResult = attend(q, cache, options, given, cu_seqlens_q=rows)
    return Answer(found.out, as_flash_attn(found.lse), q.new_empty(0))


def _as_pages(k: Tensor, v: Tensor, packing: Packing, seqused_k: Tensor | None) -> Any:
    """Packed keys and values as pages of one row each, and the table that finds them."""
    keys = packing.cu_seqlens_k
    width = packing.max_seqlen_k
    if keys.is_cpu:
        check_cu_seqlens("cu_seqlens_k", keys, k.shape[0])
        lengths = keys.diff()
        width = int(lengths.max()) if lengths.numel() else 0
        if seqused_k is not None and bool((seqused_k > lengths).any()):
            came, most = str(seqused_k.tolist()), lengths.tolist()
            raise InvalidArgument("seqused_k", came, f"at most the sequences' lengths, {most}")
    rows = keys[:-1].long()[:, None] + torch.arange(max(width, 1), device=keys.device)
    table = rows.clamp_max(max(k.shape[0] - 1, 0))
    return k[:, None], v[:, None], table
