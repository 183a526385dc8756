"""Masks and scores as functions of tensors, which FlexAttention takes, from their programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilelab.peers.work import Work
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, Score

Function = Callable[..., Any]


def flex_mask(work: Work) -> Function | None:
    """Return the mask as a function (b, h, m, n); None where only its whole matrix can say it."""
    mask = work.drawn_mask
    if not isinstance(mask, Mask):
        return mask if callable(mask) else None
    stack: list[Function] = []
    for instr in mask.program:
        if instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(_joined(first, second, instr.op))
            continue
        leaf = _leaf(instr, [mask.captured[slot] for slot in instr.slots], work.keys - work.queries)
        if leaf is None:
            return None
        stack.append(leaf)
    return stack.pop()


def _joined(first: Function, second: Function, word: str) -> Function:
    if word == "and":
        return lambda b, h, m, n: first(b, h, m, n) & second(b, h, m, n)
    return lambda b, h, m, n: first(b, h, m, n) | second(b, h, m, n)


def _leaf(instr: Instr, captured: list[Tensor], beyond: int) -> Function | None:
    """Return an operation of a mask; ``beyond`` is how many more keys there are than queries."""
    if instr.op == "same_document":
        queries, keys = (_lookup(ids) for ids in captured)
        return lambda b, h, m, n: queries(b, m) == keys(b, n)
    if instr.op == "below" and not captured:
        (length,) = instr.params
        return lambda b, h, m, n: n < length
    if instr.op != "band":
        return None
    left, right, anchor = (int(number) for number in instr.params)
    shift = beyond * anchor
    if left < 0:
        return lambda b, h, m, n: n <= m + (shift + right)
    if right < 0:
        return lambda b, h, m, n: m - n <= left - shift
    return lambda b, h, m, n: (m - n <= left - shift) & (n - m <= shift + right)


def flex_score(work: Work) -> Function | None:
    """Return the score as a function (s, b, h, m, n); None where it is none and has no such one."""
    score = work.drawn_score
    if not isinstance(score, Score):
        return score if callable(score) else None
    if len(score.program) > 1:
        return None
    ((op, params, slots),) = score.program
    captured = [_lookup(score.captured[slot]) for slot in slots]
    if op == "softcap":
        cap = params[0]
        return lambda s, b, h, m, n: cap * torch.tanh(s / cap)
    if op == "bias":
        return lambda s, b, h, m, n: s + captured[0](b, h, m, n)
    if op != "alibi" or work.queries != work.keys:
        return None
    if work.mask == ("causal",):  # no distance is below 0
        return lambda s, b, h, m, n: s - captured[0](b, h) * (m - n)
    return lambda s, b, h, m, n: s - captured[0](b, h) * torch.abs(m - n)


def _lookup(tensor: Tensor) -> Function:
    """Return what reads a tensor at a place; dimensions of 1 and absent ones do not count."""
    kept = [index - tensor.dim() for index, size in enumerate(tensor.shape) if size > 1]
    table = tensor.squeeze()
    return lambda *place: table[tuple([place[index] for index in kept])]
