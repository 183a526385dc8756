"""The plain mathematics of attention: the whole N x N matrix, in any dtype, nothing clever.

For every query head h and query m, over the keys n that the mask lets through::

    s[m, n] = score(scale * q[m] . k[n])
    z[m]    = sum_n exp(s[m, n]) (+ exp(sink[h]))
    p[m, n] = exp(s[m, n]) / z[m]
    out[m]  = sum_n dropout(p[m, n]) v[n]
    lse[m]  = log z[m]
    entropy[m] = -sum_n p[m, n] log p[m, n]     with a sink: it is one of the outcomes

torch's autograd differentiates it. In float64 it is the oracle of the tests; in the problem's own
dtype it is the plain implementation whose error the kernels are measured against.

In float8 e4m3 this means:

* q and k times their scales are multiplied in float32;
* p, after the softmax, is multiplied by 2^8, rounded to e4m3 and divided by 2^8 again, so that
  values under 2^-9, the least e4m3 number, are not lost;
* p v is summed in float32 over the stored numbers of v, then multiplied by v's scale and rounded to
  bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.inspect.calls import Part, apply_score, keep_mask, multiplied, parts, visible
from tilewise.problem import Operands, Problem, Result
from tilewise.variants.float8 import FLOAT8, output_dtype

LOG2E = math.log2(math.e)
_RAISED = 256.0  # times a probability at most 1: of the 448 that e4m3 has


def dense(problem: Problem, operands: Operands, *, dtype: torch.dtype = torch.float64) -> Result:
    """Attention with all arithmetic in ``dtype``, differentiable by autograd.

    Operands are of any floating dtype, and converted differentiably.

    Returns:
        ``Result`` in ``dtype`` (float8: out in bfloat16, the rest in float32): out
        ``[B, Hq, M, Dv]`` (varlen ``[Tq, Hq, Dv]``), lse ``[B, Hq, M]`` (varlen ``[Hq, Tq]``),
        stats ``[2, *lse.shape]`` (detached), and the row statistics max_logit (detached), entropy
        and top_key.
    """
    results = [_attend(part, dtype) for part in parts(problem, operands)]
    if problem.layout == "dense" and results:
        return results[0] if len(results) == 1 else _joined(results, (0, 0, 1, 0, 0, 0))
    if not results:
        like, kind = operands.q.to(output_dtype(dtype)), torch.float32 if dtype is FLOAT8 else dtype
        out = like[..., :1].expand(*like.shape[:-1], problem.value_dim)
        rows = (out[..., 0] if problem.layout == "dense" else out[..., 0].T).to(kind)
        return Result(out, rows, rows.new_empty(2, *rows.shape), rows, rows, rows.long())
    packed = [
        (
            out[0].transpose(0, 1),
            lse[0],
            stats[:, 0],
            *(fact[0] for fact in facts if fact is not None),
        )
        for out, lse, stats, *facts in results
    ]
    return _joined(packed, (0, 1, 2, 1, 1, 1))


def _joined(results: Sequence[tuple[Any, ...]], dims: Sequence[int]) -> Result:
    """Return the fields of some results one after the other, each along its dimension."""
    fields = zip(zip(*results, strict=True), dims, strict=True)
    return Result(*(torch.cat(tensors, dim) for tensors, dim in fields))


def _attend(part: Part, dtype: torch.dtype) -> Result:
    problem, operands = part.problem, part.operands
    group = problem.heads // problem.kv_heads if problem.kv_heads else 1
    fp8 = dtype is FLOAT8
    dtype, out_dtype = torch.float32 if fp8 else dtype, output_dtype(dtype)
    v_scale = operands.v_scale
    q = multiplied(operands.q, operands.q_scale, dtype)
    k = multiplied(operands.k, operands.k_scale, dtype).repeat_interleave(group, dim=1)
    v = multiplied(operands.v, None if fp8 else v_scale, dtype).repeat_interleave(group, dim=1)
    block = part.block(range(problem.queries), range(problem.keys))
    s = (q @ k.transpose(-1, -2)) * problem.scale
    seen = None
    if problem.mask:
        seen = visible(problem.mask, operands.mask_tensors, block, s.device)
    s, _ = apply_score(problem.score, operands.score_tensors, s, block, seen)
    if seen is not None:
        s = s.masked_fill(~seen, -math.inf)
    logits = s
    if operands.sinks is not None:
        sink = operands.sinks.to(dtype)[:, None, None].expand(*s.shape[:3], 1)
        logits = torch.cat([s, sink], dim=-1)
    # A row without a single finite logit has no softmax: its output is 0 and its lse -inf.
    dead = (logits == -math.inf).all(-1)
    safe = logits.masked_fill(dead[..., None], 0.0)
    whole = torch.softmax(safe, dim=-1).masked_fill(dead[..., None], 0.0)
    # An outcome of no weight has no part in the entropy, and no derivative (0 * inf) either.
    logs = torch.log_softmax(safe, dim=-1).masked_fill(whole == 0, 0.0)
    entropy = -(whole * logs).sum(-1)
    p = whole[..., : problem.keys]
    if fp8:
        p = (p * _RAISED).to(FLOAT8).to(dtype) / _RAISED
    # As torch.logsumexp, but its gradient stays a softmax where log z vanishes next to the maximum.
    top = safe.detach().amax(-1) if safe.size(-1) else safe.new_zeros(dead.shape)
    lse = (top + torch.exp(safe - top[..., None]).sum(-1).log()).masked_fill(dead, -math.inf)
    if problem.dropout_p:
        p = torch.where(_keep(part), p / (1 - problem.dropout_p), 0.0)
    stats, max_logit, top_key = _stats(s.detach())
    out = p @ v
    if fp8 and v_scale is not None:
        out = out * v_scale.repeat_interleave(group, dim=1)[:, :, None, None]
    return Result(out.to(out_dtype), lse, stats, max_logit, entropy, top_key)


def _keep(part: Part) -> Tensor:
    problem = part.problem
    return keep_mask(
        part.operands.seed,
        problem.dropout_p,
        batches=range(part.first_batch, part.first_batch + problem.batch),
        heads=range(problem.heads),
        queries=range(problem.queries),
        keys=range(problem.keys),
    )


def _stats(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Row maximum in base-2 units and row sum, the maximum in natural units, and its first key.

    ``[2, B, Hq, M]``, ``[B, Hq, M]`` and again; the key of a row that sees none is -1.
    """
    if s.size(-1):
        top, place = s.max(-1)
    else:
        top = s.new_full(s.shape[:-1], -math.inf)
        place = torch.zeros_like(top, dtype=torch.int64)
    base = torch.where(top == -math.inf, 0.0, top)
    stats = torch.stack([top * LOG2E, torch.exp(s - base[..., None]).sum(-1)])
    return stats, top, torch.where(top == -math.inf, -1, place)
