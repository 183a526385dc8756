"""Gradients of attention from an output and an lse that other libraries keep between two passes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine.call import Keywords, build_problem
from tilewise.variants.lower import Extent, lower_score, statistics_dtype
from tilewise.variants.program import encode, fitted


class Forward(NamedTuple):
    """Operands and results of a forward pass, [B, heads, rows, ...] or packed [rows, heads, ...].

    ``out`` and ``lse`` may be of more keys than k has: those of merged results.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


def gradients_of(
    forward: Forward,
    dout: Tensor,
    keywords: Keywords,
    seed: Tensor | None,
    needed: tuple[bool, bool, bool] = (True, True, True),
) -> list[Tensor]:
    """Return the gradients of q, k and v, in their shapes; what is not needed is empty.

    Args:
        forward: the forward pass. An lse of -inf or +inf is that of a row without keys.
        dout: the gradient of its output.
        keywords: its keywords, with the starts of packed sequences.
        seed: of its dropout; None without.
        needed: which gradients to compute.
    """
    q, k, v, out, lse = forward
    problem = build_problem(q, k, v, keywords)
    program, captured = keywords.score.program, keywords.score.captured
    packed = keywords.cu_seqlens
    sizes = (0, 0) if packed else (problem.queries, problem.keys)
    extent = Extent(problem.batch, problem.heads, *sizes, packed is not None, check_values=False)
    lowered = lower_score(program, captured, extent, q.dtype, q.device)
    lse = lse.to(statistics_dtype(q.dtype)).contiguous()
    lse = torch.where(lse == torch.inf, -torch.inf, lse)  # rows without keys, as tilewise has them
    found: list[Tensor] = torch.ops.tilewise.attention_backward(
        dout,
        None,
        None,
        out,
        lse,
        None,  # of the stats that the kernels keep
        [*needed, False, *(False for _ in lowered)],
        q,
        k,
        v,
        list(keywords.mask.captured),
        list(lowered),
        None,
        seed,
        *(packed or (None, None)),
        keywords.mask.text,
        encode(fitted(program)),
        None if keywords.scale is None else problem.scale,
        problem.dropout_p,
        None,
        True,  # out and lse may be of more keys than these
    )
    return found[:3]
