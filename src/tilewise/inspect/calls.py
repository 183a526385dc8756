"""A call as the kernels see it: its problem, its operands, and what mask and score mean.

``lowered`` makes the problem and the operands. ``parts`` cuts them into rectangles of pairs, one
for each sequence. ``visible`` and ``apply_score`` evaluate the mask and the score on a ``Block`` of
such a rectangle in plain torch. ``keep_mask`` draws its dropout. ``backend_of`` reads from a graph
which backend a call ran on.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.engine.call import Call, build_operands, build_problem, read_keywords
from tilewise.engine.pages import packed_or_paged
from tilewise.functional import MaskLike, ScoreLike
from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Block, Part, multiplied, parts
from tilewise.reference.philox import keep_mask
from tilewise.reference.programs import apply_score, visible
from tilewise.variants.float8 import scales_of

__all__ = [
    "Block",
    "Part",
    "apply_score",
    "backend_of",
    "keep_mask",
    "lowered",
    "multiplied",
    "parts",
    "visible",
]


def lowered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    *,
    mask: MaskLike = None,
    score: ScoreLike = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | Tensor | None = None,
    block_table: Tensor | None = None,
    key_lengths: Tensor | None = None,
    q_scale: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Problem, Operands]:
    """Return the problem of a call, and its operands in kernel form. Nothing is computed.

    Every argument is as in ``tilewise.attention``, ``attention_varlen`` and ``attention_paged``:
    q [B, Hq, M, D], k [B, Hk, N, D] and v [B, Hk, N, Dv], or packed, or in pages. The tensors may
    be on the ``meta`` device.

    Raises:
        InvalidArgument, InvalidType: as the call.
    """
    packed, pages = packed_or_paged(cu_seqlens_q, cu_seqlens_k, block_table, key_lengths, dropout_p)
    scales = scales_of(q_scale, k_scale, v_scale)
    keywords = read_keywords(
        mask, score, scale, dropout_p, sinks, backend, packed, pages, scales=scales
    )
    problem = build_problem(q, k, v, keywords)
    return problem, build_operands(problem, q, k, v, keywords, seed)


def backend_of(node: Any) -> str | None:
    """Return the backend that runs the backward pass of a node of an autograd graph.

    Args:
        node: a ``grad_fn``, or what one's ``next_functions`` name.

    Returns:
        The backend's name, or None for a node that is no eager attention of tilewise.
    """
    call = getattr(node, "call", None)
    if isinstance(call, Call):
        return call.plan.backend
    used = getattr(node, "tilewise_backend", None)  # of attention that several processes share
    return used if isinstance(used, str) else None
