"""Tiles with their derivative in a direction: what tangents and second derivatives walk over.

A direction is an ``Operands`` of tangents: how fast q, k, v, the score's tensors and the sinks
move. The scores of a tile then move by

    ds = scale * (dq k^T + q dk^T), carried through the score program

torch's autograd differentiates each step of a score program on the tile, twice if a second
derivative needs it. So every step that ``apply_score`` knows has both. A bias is the exception: its
derivative is plain, and its tensor may be as large as the score matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Operands
from tilewise.reference.blocks import Block, Part
from tilewise.reference.programs import apply_score, score_gradient
from tilewise.reference.tiles import base2, inner_product, keep_tile, key_tiles
from tilewise.variants.program import Instr, Program


def direction(
    operands: Operands,
    q: Tensor | None,
    k: Tensor | None,
    v: Tensor | None,
    sinks: Tensor | None,
    score_tensors: Sequence[Tensor | None],
) -> Operands:
    """Return tangents in the form of the operands that they belong to; None means zero.

    A zero tangent takes no memory of its own. Masks, cu_seqlens and the seed are kept.
    """

    def filled(tangent: Tensor | None, like: Tensor) -> Tensor:
        return like.new_zeros(()).expand(like.shape) if tangent is None else tangent

    return operands._replace(
        q=filled(q, operands.q),
        k=filled(k, operands.k),
        v=filled(v, operands.v),
        score_tensors=tuple(
            filled(tangent, like)
            for tangent, like in zip(score_tensors, operands.score_tensors, strict=True)
        ),
        sinks=None if operands.sinks is None else filled(sinks, operands.sinks),
    )


class Rows(NamedTuple):
    """A tile of query rows: which, and q and its tangent ``[B, Hq, m, D]`` (compute dtype)."""

    queries: range
    q: Tensor
    q_t: Tensor


def rows_of(part: Part, toward: Part, queries: range, dtype: torch.dtype) -> Rows:
    """Return a tile of query rows."""
    span = slice(queries.start, queries.stop)
    q, q_t = (each.operands.q[:, :, span].to(dtype) for each in (part, toward))
    return Rows(queries, q, q_t)


class _Step(NamedTuple):
    """An instruction of a score program, with the scores and tangents that it was given.

    ``seen`` says which pairs attend: what an expression makes of the others must not get into the
    gradients of what it loads.
    """

    instr: Instr
    s: Tensor
    s_t: Tensor
    seen: Tensor | None


class JetTile(NamedTuple):
    """A tile of the score matrix and its derivative in the direction."""

    # Both: ``[B, Hq, n, .]``, 0 where no row of the tile sees the key.
    k: Tensor
    v: Tensor
    # Both: their tangents, likewise.
    k_t: Tensor
    v_t: Tensor
    s: Tensor  # final scores ``[B, Hq, m, n]`` in units of exp2, -inf where hidden
    s_t: Tensor  # tangents of the final scores in natural units, 0 where hidden
    steps: list[_Step]  # what ``pull_score`` needs
    seen: Tensor | None  # which pairs attend; None for all
    block: Block


def jet_tiles(part: Part, toward: Part, rows: Rows) -> Iterator[JetTile]:
    """Yield the tiles that the mask leaves for a tile of queries, with their tangents."""
    problem = part.problem
    group = problem.heads // problem.kv_heads
    for tile in key_tiles(part, rows.queries, rows.q):
        span = slice(tile.block.keys.start, tile.block.keys.stop)
        k_t, v_t = (
            tensor[:, :, span].to(rows.q.dtype).repeat_interleave(group, dim=1)
            for tensor in (toward.operands.k, toward.operands.v)
        )
        if tile.seen is not None:
            used = tile.seen.any(-2)[..., None]
            k_t, v_t = torch.where(used, k_t, 0.0), torch.where(used, v_t, 0.0)
        s_t = inner_product(rows.q_t, tile.k) + inner_product(rows.q, k_t)
        s_t = s_t * problem.scale
        steps: list[_Step] = []
        if problem.score:
            s = inner_product(rows.q, tile.k) * problem.scale
            s_t, steps = _push_score(part, toward, s, s_t, tile.block, tile.seen)
        if tile.seen is not None:
            s_t = torch.where(tile.seen, s_t, 0.0)
        s = base2(tile.scores)
        yield JetTile(tile.k, tile.v, k_t, v_t, s, s_t, steps, tile.seen, tile.block)


def drop(part: Part, block: Block, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each ``[B, Hq, m, n]`` with what dropout drops set to 0, and the rest divided by 1 - p."""
    dropout_p = part.problem.dropout_p
    if not dropout_p:
        return list(tensors)
    keep = keep_tile(part, block)
    return [torch.where(keep, tensor / (1 - dropout_p), 0.0) for tensor in tensors]


def _push_score(
    part: Part, toward: Part, s: Tensor, s_t: Tensor, block: Block, seen: Tensor | None
) -> tuple[Tensor, list[_Step]]:
    """Tangents of the final scores from those of ``scale * q.k``, and the steps on the way."""
    tensors, tangents = part.operands.score_tensors, toward.operands.score_tensors
    steps = []
    for instr in part.problem.score:
        steps.append(_Step(instr, s, s_t, seen))
        if instr.op == "bias":
            s, _ = apply_score((instr,), tensors, s, block)
            s_t, _ = apply_score((instr,), tangents, s_t, block)
        else:
            s, s_t = _push(steps[-1], tensors, tangents, block)
    return s_t, steps


class _Local(NamedTuple):
    """A step of a score program as a function of leaves that autograd follows."""

    leaves: list[Tensor]  # the scores before the step, then its floating captured tensors
    slots: list[int]  # the slots of those tensors
    after: Tensor  # the scores after the step


def _localise(step: _Step, tensors: Sequence[Tensor], block: Block) -> _Local:
    """To be called with gradients enabled."""
    instr = step.instr
    slots = [slot for slot in dict.fromkeys(instr.slots) if tensors[slot].is_floating_point()]
    replaced = list(tensors)
    for slot in slots:
        replaced[slot] = tensors[slot].detach().requires_grad_()
    before = step.s.detach().requires_grad_()
    program: Program = (instr,)
    after, _ = apply_score(program, replaced, before, block, step.seen)
    return _Local([before, *(replaced[slot] for slot in slots)], slots, after)


def _push(
    step: _Step, tensors: Sequence[Tensor], tangents: Sequence[Tensor], block: Block
) -> tuple[Tensor, Tensor]:
    """Return the scores and tangents after a step: reverse mode of reverse mode is forward mode."""
    with torch.enable_grad():
        local = _localise(step, tensors, block)
        if not local.after.requires_grad:
            return local.after, torch.zeros_like(local.after)
        # The gradient is linear in its cotangent; the derivative by that is the Jacobian.
        cotangent = torch.zeros_like(local.after).requires_grad_()
        pulled = torch.autograd.grad(
            local.after, local.leaves, cotangent, create_graph=True, allow_unused=True
        )
        moves = [step.s_t, *(tangents[slot] for slot in local.slots)]
        outputs, weights = _connected(pulled, moves)
        (after_t,) = torch.autograd.grad(outputs, cotangent, weights, allow_unused=True)
    after = local.after.detach()
    return after, torch.zeros_like(after) if after_t is None else after_t


def _connected(
    tensors: Sequence[Tensor | None], weights: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that depend on something, and their weights in the tensors' dtypes."""
    pairs = [
        (tensor, weight.to(tensor.dtype))
        for tensor, weight in zip(tensors, weights, strict=True)
        if tensor is not None and tensor.requires_grad
    ]
    return [tensor for tensor, _ in pairs], [weight for _, weight in pairs]


def pull_score(
    part: Part,
    toward: Part,
    tile: JetTile,
    grads: tuple[Tensor, Tensor],
    totals: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Gradients before a score program, of ``scale * q.k`` and of its tangent, from those after it.

    ``grads`` are the gradients of the final scores and of their tangents, 0 where hidden. Those of
    the captured tensors are added to ``totals``, one for each tensor (None where not wanted).
    """
    tensors, tangents = part.operands.score_tensors, toward.operands.score_tensors
    grad_s, grad_s_t = grads
    for step in reversed(tile.steps):
        if step.instr.op == "bias":
            score_gradient((step.instr,), tensors, (), grad_s, tile.block, totals)
            continue
        grad_s, grad_s_t, by_slot = _pull(step, tensors, tangents, (grad_s, grad_s_t), tile.block)
        if tile.seen is not None:
            # A hidden pair may have a NaN score: its gradient stays 0.
            grad_s = torch.where(tile.seen, grad_s, 0.0)
            grad_s_t = torch.where(tile.seen, grad_s_t, 0.0)
        for slot, grad in by_slot.items():
            accumulator = totals[slot]
            if accumulator is not None:
                accumulator += grad
    return grad_s, grad_s_t


def _pull(
    step: _Step,
    tensors: Sequence[Tensor],
    tangents: Sequence[Tensor],
    grads: tuple[Tensor, Tensor],
    block: Block,
) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
    """Gradients of ``<a, after> + <b, after_t>`` by a step's scores, their tangents, its tensors.

    ``grads`` are a and b. ``<b, after_t>`` equals the derivative of ``<b, after>`` in the
    direction: a reverse mode whose gradient is weighed with the tangents and differentiated again.
    """
    grad_s, grad_s_t = grads
    with torch.enable_grad():
        local = _localise(step, tensors, block)
        if not local.after.requires_grad:
            return torch.zeros_like(grad_s), torch.zeros_like(grad_s), {}
        first = torch.autograd.grad(
            local.after, local.leaves, grad_s_t, create_graph=True, allow_unused=True
        )
        moves = [step.s_t, *(tangents[slot] for slot in local.slots)]
        outputs, weights = _connected(first, moves)
        second = torch.autograd.grad(
            [local.after, *outputs], local.leaves, [grad_s, *weights], allow_unused=True
        )
    found = [
        torch.zeros_like(leaf) if grad is None else grad
        for grad, leaf in zip(second, local.leaves, strict=True)
    ]
    before_t = torch.zeros_like(grad_s) if first[0] is None else first[0].detach()
    return found[0], before_t, dict(zip(local.slots, found[1:], strict=True))
