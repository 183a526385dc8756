"""What a case should give: the plain formula in any dtype, and in more than float64.

The plain formula is written here once more, over the trees' own meaning in torch, so that it
shares nothing with the library but the random numbers of dropout. Problems in float64 are judged
by ``tilelab.oracles.extended`` (numpy's long double); the plain formula in float64 then says
whether that one was asked the right question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.build import Call, differentiate, keywords
from tests.fuzz.case import Case
from tilelab.oracles.extended import extended
from tilewise.problem import Operands, Problem
from tilewise.reference.philox import keep_mask
from tilewise.validation import dense_problem, lower_sinks, varlen_problem
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.values import Mask, Score, as_mask, as_score


class Rows(NamedTuple):
    """Results of one batch or sequence, [B, H, M, ...]; ``s`` is every score, -inf where hidden."""

    out: Tensor
    lse: Tensor
    max_logit: Tensor
    entropy: Tensor
    s: Tensor


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), x, y)


def _pair(function: Any) -> Any:
    return lambda x, y: function(torch.as_tensor(x), torch.as_tensor(y))


def _at(tensor: Tensor, *places: Any) -> Tensor:
    """The element of a tensor that broadcasts to all these places."""
    kept = places[len(places) - tensor.dim() :]
    index = [p if n > 1 else p * 0 for p, n in zip(kept, tensor.shape, strict=True)]
    return tensor[tuple(index)] if index else tensor


_MEANING: dict[str, Any] = {
    "torch": torch,
    "where": _where,
    "minimum": _pair(torch.minimum),
    "maximum": _pair(torch.maximum),
    "at": _at,
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Python's floats, and quotients of integers, become this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Tensors(NamedTuple):
    """The tensors of a call in one dtype, its leaves new ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor]
    sinks: Tensor | None
    leaves: dict[str, Tensor]


def converted(call: Call, dtype: torch.dtype) -> Tensors:
    """The floats of a call in another dtype."""
    given = call.operands()
    found = {
        name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in given.items()
    }
    leaves = {name: found[name].clone().requires_grad_() for name in call.leaves}
    found |= leaves
    tables = [found[f"t{i}"] for i in range(len(call.tables))]
    return Tensors(found["q"], found["k"], found["v"], tables, found.get("sinks"), leaves)


def _attend(
    case: Case, tensors: Tensors, q: Tensor, k: Tensor, v: Tensor, first: int, seed: int
) -> Rows:
    """The formula for q [B, H, M, D] and k, v [B, Hk, N, ...]."""
    batch, heads, M, _ = q.shape
    N, dtype = k.shape[2], q.dtype
    group = heads // case.kv_heads
    k, v = (each.repeat_interleave(group, dim=1) for each in (k, v))
    scale = 1 / math.sqrt(case.head_dim) if case.scale is None else case.scale
    s = (q @ k.transpose(-1, -2)) * scale
    names: dict[str, Any] = {
        **_MEANING,
        **{f"t{i}": table for i, table in enumerate(tensors.tables)},
        "b": first + torch.arange(batch)[:, None, None, None],
        "h": torch.arange(heads)[:, None, None],
        "m": torch.arange(M)[:, None],
        "n": torch.arange(N),
        "M": M,
        "N": N,
    }
    if s.numel():
        for node in case.scores:
            s = torch.as_tensor(eval(node.meaning(), {**names, "s": s})).to(dtype)
            s = s.expand(batch, heads, M, N)
        if case.mask is not None:
            seen = torch.as_tensor(eval(case.mask.meaning(), names))
            s = s.masked_fill(~seen, -math.inf)
    logits = s
    if tensors.sinks is not None:
        sink = tensors.sinks.to(dtype)[:, None, None].expand(batch, heads, M, 1)
        logits = torch.cat([s, sink], dim=-1)
    dead = (logits == -math.inf).all(-1)
    safe = logits.masked_fill(dead[..., None], 0.0)
    whole = torch.softmax(safe, dim=-1).masked_fill(dead[..., None], 0.0)
    logs = torch.log_softmax(safe, dim=-1).masked_fill(whole == 0, 0.0)
    entropy = -(whole * logs).sum(-1)
    p = whole[..., :N]
    top = safe.detach().amax(-1) if safe.size(-1) else safe.new_zeros(dead.shape)
    lse = (top + torch.exp(safe - top[..., None]).sum(-1).log()).masked_fill(dead, -math.inf)
    if case.dropout_p:
        span = {"heads": range(heads), "queries": range(M), "keys": range(N)}
        keep = keep_mask(seed, case.dropout_p, batches=range(first, first + batch), **span)
        p = torch.where(keep, p / (1 - case.dropout_p), 0.0)
    highest = s.detach().amax(-1) if N else s.new_full((batch, heads, M), -math.inf)
    return Rows(p @ v, lse, highest, entropy, s.detach())


def _rows(case: Case, call: Call, tensors: Tensors) -> tuple[Rows, list[Tensor]]:
    """Results in the shape of the public call's, and the scores of each sequence or the batch."""
    q, k, v = tensors.q, tensors.k, tensors.v
    if call.starts is None:
        rows = _attend(case, tensors, q, k, v, 0, call.seed)
        return rows, [rows.s]
    ends = [starts.tolist() for starts in call.starts]
    parts = []
    for i in range(len(ends[0]) - 1):
        own_q, own_k = (slice(*each[i : i + 2]) for each in ends)
        piece = [x[span].transpose(0, 1)[None] for x, span in ((q, own_q), (k, own_k), (v, own_k))]
        parts.append(_attend(case, tensors, piece[0], piece[1], piece[2], i, call.seed))
    none = q.new_zeros(case.heads, 0)
    out = torch.cat(
        [q.new_zeros(0, case.heads, case.value_dim)]
        + [part.out[0].transpose(0, 1) for part in parts]
    )
    facts = [
        torch.cat([none] + [fact[0] for fact in facts], dim=1)
        for facts in (
            [p.lse for p in parts],
            [p.max_logit for p in parts],
            [p.entropy for p in parts],
        )
    ]
    return Rows(out, facts[0], facts[1], facts[2], out), [part.s for part in parts]


class Outcome(NamedTuple):
    """Results by name, and the scores of each sequence (or of the batch)."""

    named: dict[str, Any]
    scores: list[Tensor]


def plain(case: Case, call: Call, dtype: torch.dtype) -> Outcome:
    """The plain formula with everything in ``dtype``, differentiated by autograd."""
    with default_dtype(dtype):
        tensors = converted(call, dtype)
        rows, scores = _rows(case, call, tensors)
        found: dict[str, Any] = {"out": rows.out.detach(), "lse": rows.lse.detach()}
        if case.stats:
            found |= {"max_logit": rows.max_logit, "entropy": rows.entropy.detach()}
        pairs = [(rows.out, call.grad_out.to(dtype))]
        if case.lse_grad:
            pairs.append((rows.lse, call.grad_lse.to(dtype)))
        if case.entropy_grad:
            pairs.append((rows.entropy, call.grad_entropy.to(dtype)))
        return Outcome(found | differentiate(case, pairs, tensors.leaves), scores)


def _asked(case: Case, call: Call, leaves: dict[str, Tensor]) -> tuple[Problem, Operands, Any]:
    """The problem that the public call makes, over tables that can be differentiated."""
    given = call.operands() | leaves
    tables = [given[f"t{i}"] for i in range(len(call.tables))]
    asked = keywords(case, replace(call, tables=tables))
    mask = as_mask(asked["mask"]) if "mask" in asked else Mask(())
    score = as_score(asked["score"]) if "score" in asked else Score(())
    more: dict[str, Any] = {
        "mask": mask.program,
        "score": score.program,
        "scale": case.scale,
        "dropout_p": case.dropout_p,
        "sinks": call.sinks,
    }
    q, k, v = call.q, call.k, call.v
    if call.starts is None:
        problem = dense_problem(q, k, v, **more)
        extent = Extent(*case.extents)
    else:
        problem = varlen_problem(q, k, v, *call.starts, **more)
        extent = Extent(*case.extents, ragged=True)
    lowered = lower_score(score.program, score.captured, extent, q.dtype, q.device)
    starts = [starts.long() for starts in call.starts] if call.starts else [None, None]
    operands = Operands(
        q,
        k,
        v,
        lower_mask(mask.program, mask.captured, extent, q.device, q.dtype),
        lowered,
        lower_sinks(call.sinks, q.dtype),
        starts[0],
        starts[1],
        call.seed,
    )
    return problem, operands, lowered


def wider(case: Case, call: Call) -> Outcome:
    """A float64 case in long double."""
    leaves = {
        name: leaf.detach().clone().requires_grad_()
        for name, leaf in call.leaves.items()
        if name.startswith("t")
    }
    problem, operands, lowered = _asked(case, call, leaves)
    differentiated = case.differentiated
    result = extended(
        problem,
        operands,
        call.grad_out if differentiated else None,
        call.grad_lse if case.lse_grad else None,
        call.grad_entropy if case.entropy_grad else None,
    )
    found: dict[str, Any] = {"out": result.out, "lse": result.lse}
    if case.stats:
        found |= {"max_logit": result.max_logit, "entropy": result.entropy}
    if result.grads is not None:
        for name in "qkv":
            found[f"grad of {name}"] = getattr(result.grads, name)
        found["grad of sinks"] = result.grads.sinks
        _of_tables(found, leaves, lowered, result.grads.score_tensors)
    return Outcome(found, [])


def _of_tables(
    found: dict[str, Any], leaves: dict[str, Tensor], lowered: Any, grads: tuple[Any, ...]
) -> None:
    """Through the lowering, which moves numbers and at most adds a few of them."""
    used = [
        (tensor, torch.from_numpy(np.asarray(grad, dtype=np.float64)).reshape(tensor.shape))
        for tensor, grad in zip(lowered, grads, strict=True)
        if tensor.requires_grad
    ]
    names = list(leaves)
    back: Any = [None] * len(names)
    if used and names:
        back = torch.autograd.grad(
            [tensor for tensor, _ in used],
            [leaves[name] for name in names],
            [grad for _, grad in used],
            allow_unused=True,
        )
    for name, grad in zip(names, back, strict=True):
        found[f"grad of {name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
