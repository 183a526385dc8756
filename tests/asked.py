"""The problem and the operands that a public call makes of its arguments.

Without the engine's checks, which ``tilewise.inspect.calls.lowered`` makes too: tests give kernels
scores whose indices lie outside of their tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.problem import Operands, Problem
from tilewise.validation import dense_problem, lower_sinks, varlen_problem
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.values import Mask, Score


def asked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor] | None = None,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    seed: int = 0,
) -> tuple[Problem, Operands]:
    """The problem of a dense call, or with ``starts`` (both cu_seqlens) of a packed one."""
    mask = Mask(()) if mask is None else mask
    score = Score(()) if score is None else score
    keywords: dict[str, Any] = {
        "mask": mask.program,
        "score": score.program,
        "scale": scale,
        "dropout_p": dropout_p,
        "sinks": sinks,
    }
    if starts is None:
        problem = dense_problem(q, k, v, **keywords)
        extent = Extent(problem.batch, problem.heads, problem.queries, problem.keys)
    else:
        problem = varlen_problem(q, k, v, *starts, **keywords)
        rows, keys = (int(cu.diff().max()) if problem.batch else 0 for cu in starts)
        extent = Extent(problem.batch, problem.heads, rows, keys, ragged=True)
    mask_tensors = lower_mask(mask.program, mask.captured, extent, q.device, q.dtype)
    score_tensors = lower_score(score.program, score.captured, extent, q.dtype, q.device)
    cu_q, cu_k = (None, None) if starts is None else (cu.long() for cu in starts)
    sinks = lower_sinks(sinks, q.dtype)
    return problem, Operands(q, k, v, mask_tensors, score_tensors, sinks, cu_q, cu_k, seed)
