"""The GPU kernels: the chips and blocks they know, and what a pass launches.

Importing this module imports no Triton; making launches does. A ``Launch`` is a value: run it, or
compile it for a chip that is not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from tilewise.engine.call import read_keywords
from tilewise.engine.key_lists import KeyBlocks
from tilewise.engine.listed import lists_call, work_of
from tilewise.kernels.gpu import Launch, run
from tilewise.kernels.gpu.backend import chip_of, empty_result, why_unfit
from tilewise.kernels.gpu.config import (
    FAMILIES,
    KINDS,
    MEASURED,
    PASSES,
    UNPROVEN,
    WIDTHS,
    Blocks,
    Config,
    Family,
    Pass,
    config_for,
    decodes,
    family_of,
    holds,
    place_of,
    shared_need,
    table_blocks,
)
from tilewise.problem import Grads, Needs, Operands, Problem, Result
from tilewise.variants.values import Mask, Score

if TYPE_CHECKING:
    from tilewise.kernels.gpu.expressions import Variant

__all__ = [
    "FAMILIES",
    "KERNELS",
    "KINDS",
    "MEASURED",
    "PASSES",
    "UNPROVEN",
    "WIDTHS",
    "Family",
    "Launch",
    "Overrides",
    "Pass",
    "backward_launches",
    "chip_of",
    "cross_entropy_launches",
    "empty_result",
    "family_of",
    "forward_launches",
    "holds",
    "listed_launches",
    "place_of",
    "run",
    "shared_need",
    "table_blocks",
    "why_unfit",
]

# The kernel of each pass that walks over the pairs, whose blocks are those of the pass.
KERNELS: Mapping[Pass, str] = {
    "forward": "attend",
    "dkdv": "key_kernel",
    "dq": "query_kernel",
    "decode": "attend_split",
    "fused": "keys_in_groups",
    "grouped": "attend_in_groups",
    "grouped8": "attend_in_groups",
}
# Blocks of passes in the place of the family's own.
Overrides: TypeAlias = Sequence[tuple[Pass, Blocks]]


def forward_launches(
    problem: Problem, operands: Operands, result: Result, family: str, overrides: Overrides = ()
) -> Sequence[Launch]:
    """Return the launches of the forward pass, or of the decode pass where that serves the call.

    Args:
        problem: what to compute.
        operands: on any device, ``meta`` included.
        result: memory for the results, as ``empty_result`` makes it.
        family: a name of ``FAMILIES``.
        overrides: blocks in the place of the family's own.
    """
    from tilewise.kernels.gpu.forward import Forward, attend, decode

    make = decode.decode_launches if decodes(problem) else attend.forward_launches
    config, variant = _config(family, overrides), _variant(problem, operands)
    return make(Forward(problem, operands, result, config, variant))


def backward_launches(
    problem: Problem,
    operands: Operands,
    result: Result,
    cotangents: tuple[Tensor, Tensor | None],
    needs: Needs,
    grads: Grads,
    family: str,
    overrides: Overrides = (),
) -> Sequence[Launch]:
    """Return the launches of the backward pass.

    Args:
        problem: what to compute.
        operands: on any device, ``meta`` included.
        result: of the forward pass.
        cotangents: the gradients of the output [B, Hq, M, Dv] (packed [Tq, Hq, Dv]) and of lse
            [B, Hq, M] (packed [Hq, Tq]), the latter None where it is not used.
        needs: which gradients are wanted.
        grads: memory for these.
        family: a name of ``FAMILIES``.
        overrides: blocks in the place of the family's own.
    """
    from tilewise.kernels.gpu.backward import Upstream, backward_of, passes

    config, variant = _config(family, overrides), _variant(problem, operands)
    incoming = Upstream(*cotangents)
    call = backward_of(problem, operands, result, incoming, needs, config, variant)
    return passes.backward_launches(call, grads)


def listed_launches(
    inputs: tuple[Tensor, Tensor, Tensor],
    mask: Mask | None,
    score: Score | None,
    lists: KeyBlocks,
    family: str,
    overrides: Overrides = (),
    *,
    forward: bool = False,
) -> Sequence[Launch]:
    """Return the launches of a pass of a call with key lists: the backward with every gradient.

    Args:
        inputs: q [B, Hq, M, D], k [B, Hk, N, D] and v [B, Hk, N, Dv], on any device, ``meta``
            included.
        mask: of the call, or None.
        score: of the call, or None.
        lists: of keys; all of them are taken at once.
        family: a name of ``FAMILIES``.
        overrides: blocks in the place of the family's own.
        forward: the forward pass in place of the backward.
    """
    from tilewise.kernels.gpu.backward import Upstream, backward_of
    from tilewise.kernels.gpu.backward.listed import listed_launches as launches_of

    keywords = read_keywords(mask, score, None, 0.0, None, None)
    (part,) = work_of(*lists_call(*inputs, keywords, lists), alone=True).parts
    gathering = part.gathering
    by_k, by_v = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in inputs[1:])
    every = slice(0, len(gathering.q))
    problem, operands, places = gathering.placed(every, gathering.tables(), by_k, by_v)
    result = empty_result(problem, operands.q, "")
    if forward:
        return forward_launches(problem, operands, result, family, overrides)
    learned = tuple(x.is_floating_point() for x in operands.score_tensors)
    scores = tuple(
        torch.empty_like(x) if wanted else None
        for x, wanted in zip(operands.score_tensors, learned, strict=True)
    )
    call = backward_of(
        problem,
        operands,
        result,
        Upstream(torch.empty_like(result.out)),
        Needs(True, True, True, learned),
        _config(family, overrides),
        _variant(problem, operands),
    )
    return launches_of(call, places, Grads(torch.empty_like(operands.q), None, None, scores))


def cross_entropy_launches(
    logits: Tensor, targets: Tensor, scales: Tensor, *, first: int | None, options: bool
) -> Sequence[Launch]:
    """Return the launches of ``linear_cross_entropy`` over a block of logits: its gradient in it.

    Args:
        logits: [T', V'], on any device, ``meta`` included.
        targets: int64 [T'].
        scales: float32 [T'].
        first: which word the first column is, where lse is known; None for all words and the loss.
        options: label smoothing, z-loss and softcap, or none of them.
    """
    from tilewise.kernels.cross_entropy import Loss
    from tilewise.kernels.gpu import cross_entropy

    losses, lse = (
        (None if first is not None else torch.empty_like(scales)),
        torch.empty_like(scales),
    )
    loss = Loss(-100, 0.1, 1e-4, 30.0) if options else Loss(-100, 0.0, 0.0, 0.0)
    words = logits.shape[1] * (1 if first is None else 2)
    return cross_entropy.cross_entropy_launches(
        logits, targets, losses, lse, scales, loss, first or 0, words
    )


def _config(family: str, overrides: Overrides) -> Config:
    return config_for(family)._replace(overrides=tuple(overrides))


def _variant(problem: Problem, operands: Operands) -> Variant:
    from tilewise.kernels.gpu.expressions import variant_of

    masks, scores = operands.mask_tensors, operands.score_tensors
    return variant_of(problem, tuple(x.dim() for x in masks), tuple(x.dim() for x in scores))
