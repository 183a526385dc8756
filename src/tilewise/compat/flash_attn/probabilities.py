"""``S_dmask``: the probabilities with what dropout did in their signs, by the reference. N x N."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.compat.flash_attn.arguments import Options
from tilewise.engine.call import build_operands, build_problem, read_keywords
from tilewise.errors import InvalidArgument
from tilewise.reference.blocks import Part, parts
from tilewise.reference.philox import keep_mask
from tilewise.reference.programs import apply_score, visible
from tilewise.variants.lower import statistics_dtype


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

    Args:
        q: [B, Hq, M, D]; packed [Tq, Hq, D].
        k: [B, Hk, N, D]; packed [Tk, Hk, D].
        v: [B, Hk, N, Dv]; packed [Tk, Hk, Dv].
        lse: of the call: [B, Hq, M]; packed [Hq, Tq]; -inf for a row without keys.
        options: the flags of the call.
        seed: of its dropout.
        packed: cu_seqlens_q and cu_seqlens_k, or None.
        longest: the result's rows and columns for packed sequences.

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
    sizes = (block.batches, block.heads, block.queries, block.keys)
    names = ("batches", "heads", "queries", "keys")
    places = dict(zip(names, sizes, strict=True))
    kept = keep_mask(operands.seed, problem.dropout_p, **places).to(s.device)
    return torch.where(kept, p, -p)
