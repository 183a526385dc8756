"""The forward calls of flash-attn with their flags read: dense, packed, and over pages.

``signed_probabilities`` makes ``S_dmask`` by the reference, in N x N memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.compat.flash_attn.arguments import Options, as_flash_attn, check_rank
from tilewise.compat.flash_attn.cache import (
    Cache,
    attend,
    check_blocks,
    check_integers,
    check_lengths,
)
from tilewise.engine.call import build_operands, build_problem, draw_seed, read_keywords
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.functional import AttentionResult, attention, attention_varlen
from tilewise.reference.blocks import Part, parts
from tilewise.reference.philox import keep_mask
from tilewise.reference.programs import apply_score, visible
from tilewise.validation import check_cu_seqlens
from tilewise.variants.lower import statistics_dtype


class Answer(NamedTuple):
    """Result of a forward call."""

    out: Tensor  # [B, M, Hq, Dv] or [Tq, Hq, Dv]
    # [B, Hq, M] or [Hq, Tq], +inf for a row without keys; None where not asked for.
    lse: Tensor | None
    signed: Tensor  # the signed probabilities; empty where not asked for, or without dropout
    seed: Tensor | None = None  # of dropout; None without it


class Packing(NamedTuple):
    """Packed sequences of queries and of keys."""

    starts: tuple[Tensor, Tensor]  # cu_seqlens
    longest: tuple[int, int]  # max_seqlens, which set the size of S_dmask


def check_dense(**tensors: object) -> None:
    """All are tensors [B, S, H, D]."""
    for name, tensor in tensors.items():
        check_rank(name, tensor, "[B, S, H, D]")


def check_packed(packing: Packing, pages: bool, q: object, **keys: object) -> None:
    """Queries are packed, [T, H, D]; keys too, or pages; cu_seqlens have one dimension."""
    check_rank("q", q, "[T, H, D]")
    for name, tensor in keys.items():
        check_rank(name, tensor, "[blocks, page size, H, D]" if pages else "[T, H, D]")
    for name, tensor in zip(("cu_seqlens_q", "cu_seqlens_k"), packing.starts, strict=True):
        check_rank(name, tensor, "[sequences + 1]")


def whole(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing | None,
    options: Options,
    lse: bool,
    signed: bool,
) -> Answer:
    """Attention of [B, S, H, D] tensors, or of packed sequences [T, H, D] where there is a packing.

    ``signed`` asks for signed probabilities, which are there with dropout only.
    """
    seed = draw_seed(q.device) if options.dropout_p else None
    keywords = options.keywords(seed)
    nothing = q.new_empty(0)
    if packing is None:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = attention(q, k, v, **keywords, return_lse=lse)
    else:
        found = attention_varlen(q, k, v, *packing.starts, **keywords, return_lse=lse)
    out = found.out if lse else found
    if packing is None:
        out = out.transpose(1, 2)
    if not lse:
        return Answer(out, None, nothing, seed)
    probabilities = nothing
    if signed and seed is not None:
        of_packed = () if packing is None else (packing.starts, packing.longest)
        probabilities = signed_probabilities(q, k, v, found.lse, options, seed, *of_packed)
    return Answer(out, as_flash_attn(found.lse), probabilities, seed)


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

    q is [Tq, Hq, D]. k and v are pages [blocks, page size, Hk, D or Dv] with a block_table, integer
    [sequences, blocks]; else packed [Tk, Hk, D or Dv]. ``leftpad_k``, integer [sequences], says how
    many keys at the beginning of each do not count, and ``seqused_k`` how many keys of each there
    are, instead of all.
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
    keys, width = packing.starts[1], packing.longest[1]
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


@torch.no_grad()
def signed_probabilities(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    options: Options,
    seed: Tensor,
    packed: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
) -> Tensor:
    """exp(s - lse), negated where dropout drops the pair (-0.0 for a pair of no weight).

    q, k and v are [B, H, S, D]; packed [T, H, D], where ``packed`` are cu_seqlens_q and
    cu_seqlens_k. The lse of the call is [B, Hq, M]; packed [Hq, Tq]; -inf for a row without keys.
    The seed is that of its dropout.

    Returns:
        [B, Hq, M, N] in q's dtype; packed [sequences, Hq, *longest], 0 past each sequence.

    Raises:
        InvalidArgument: a sequence is longer than ``longest``.
    """
    keywords = (options.mask, options.score(), options.scale, options.dropout_p, None, None, packed)
    wanted = read_keywords(*keywords)
    problem = build_problem(q, k, v, wanted)
    operands = build_operands(problem, q, k, v, wanted, seed)
    shape = longest if packed else (problem.queries, problem.keys)
    found = q.new_zeros(problem.batch, problem.heads, *shape)
    for part in parts(problem, operands):
        rows, columns = part.problem.queries, part.problem.keys
        for name, count, limit in zip(
            ("max_seqlen_q", "max_seqlen_k"), (rows, columns), shape, strict=True
        ):
            if count > limit:
                raise InvalidArgument(name, str(limit), f"the longest sequence's, {count}")
        first = part.first_batch
        own = lse if packed is None else lse[None, :, part.queries]
        found[first : first + part.problem.batch, :, :rows, :columns] = _of(part, own)
    return found


def _of(part: Part, lse: Tensor) -> Tensor:
    problem, operands = part.problem, part.operands
    wide = statistics_dtype(problem.dtype)
    block = part.block(range(problem.queries), range(problem.keys))
    group = problem.heads // problem.kv_heads
    k = operands.k.to(wide).repeat_interleave(group, dim=1)
    s = (operands.q.to(wide) @ k.transpose(-1, -2)) * problem.scale
    seen = torch.ones((), dtype=torch.bool, device=s.device)
    if problem.mask:
        seen = visible(problem.mask, operands.mask_tensors, block, s.device)
    s, _ = apply_score(problem.score, operands.score_tensors, s, block, seen)
    p = torch.exp(s - lse[..., None]).masked_fill(~seen, 0.0)
    places = {name: getattr(block, name) for name in ("batches", "heads", "queries", "keys")}
    kept = keep_mask(operands.seed, problem.dropout_p, **places).to(s.device)
    return torch.where(kept, p, -p)
