"""The rectangles that the references work on: one problem of a call, and a block of its pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Operands, Problem
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.program import EXPR, Program


class Block(NamedTuple):
    """A rectangle of the score matrix of a sequence pair with M queries and N keys.

    ``batches`` and ``heads`` are the batch items (or the sequence) and query heads that share it.
    ``floats`` is the dtype that expressions compute in. A mask's expression does too, so it decides
    which pairs the mask shows.
    """

    queries: range
    keys: range
    total_queries: int
    total_keys: int
    batches: range
    heads: range
    floats: torch.dtype = torch.float32

    def places(self, device: torch.device) -> dict[str, Any]:
        """Return the positions of the pairs and the lengths, as ``evaluate`` takes them."""
        spans = (self.queries, 1), (self.keys, 0), (self.batches, 3), (self.heads, 2)
        found = {
            name: torch.arange(span.start, span.stop, device=device).view(-1, *[1] * dims)
            for name, (span, dims) in zip("mnbh", spans, strict=True)
        }
        return found | {"queries": self.total_queries, "keys": self.total_keys}


class Walk(NamedTuple):
    """How a reference goes over the score matrix."""

    # Both: the largest tile that it works on at once.
    query_tile: int = 128
    key_tile: int = 128
    # What is told of every access to slow memory (``tests/orders/ledger.py``); None for nobody.
    ledger: Any = None


WALK = Walk()


class Part(NamedTuple):
    """One rectangular problem of a call: the whole batch (dense) or one sequence (varlen).

    ``queries`` and ``keys`` are the rows of the packed tensors that the part covers, or the batch
    items if they are dense. ``keys`` is empty with pages. ``first_batch`` is the index of its first
    batch entry, which enters the dropout counter. ``walk`` is the order in which it is visited.
    ``page_size`` is that of the pages its keys are gathered from (0: from none).
    """

    problem: Problem
    operands: Operands
    first_batch: int
    queries: slice
    keys: slice
    walk: Walk = WALK
    page_size: int = 0

    def block(self, queries: range, keys: range) -> Block:
        """Return a rectangle of this part."""
        problem = self.problem
        return Block(
            queries,
            keys,
            problem.queries,
            problem.keys,
            range(self.first_batch, self.first_batch + problem.batch),
            range(problem.heads),
            statistics_dtype(problem.dtype),
        )


def parts(problem: Problem, operands: Operands, walk: Walk | None = None) -> Iterator[Part]:
    """Yield the rectangular problems of a call, in order: one if dense, else one per sequence.

    In a varlen part, q, k and v are ``[1, H, S, D]`` views. Captured tensors are cut to the
    sequence (batch entry b, its first m queries and first n keys). Tensors of an expression stay
    whole, because it indexes them by the sequence. With pages, too, there is a part per sequence;
    its keys and values are gathered. ``walk`` None is ``WALK``.
    """
    walk = walk or WALK
    if problem.page_size:
        yield from _paged_parts(problem, operands, walk)
        return
    if problem.layout == "dense":
        every = slice(None)
        yield Part(problem, operands, 0, every, every, walk)
        return
    assert operands.cu_seqlens_q is not None
    assert operands.cu_seqlens_k is not None
    bounds_q, bounds_k = operands.cu_seqlens_q.tolist(), operands.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        rows, columns = slice(*bounds_q[b : b + 2]), slice(*bounds_k[b : b + 2])
        m, n = rows.stop - rows.start, columns.stop - columns.start
        own = _of_sequence(operands, problem, b, m, n)
        q, k, v = (
            packed[at].transpose(0, 1)[None]
            for packed, at in zip(operands[:3], (rows, columns, columns), strict=True)
        )
        small = problem._replace(layout="dense", batch=1, queries=m, keys=n)
        yield Part(small, own._replace(q=q, k=k, v=v), b, rows, columns, walk)


def _of_sequence(operands: Operands, problem: Problem, b: int, m: int, n: int) -> Operands:
    """Return the operands of sequence ``b``, of m queries and n keys; q, k and v stay whole."""
    return operands._replace(
        mask_tensors=cut(problem.mask, operands.mask_tensors, b, m, n),
        score_tensors=cut(problem.score, operands.score_tensors, b, m, n),
        cu_seqlens_q=None,
        cu_seqlens_k=None,
        block_table=None,
        key_lengths=None,
        q_scale=_row(operands.q_scale, b),
        k_scale=_row(operands.k_scale, b),
        v_scale=_row(operands.v_scale, b),
    )


def _row(scale: Tensor | None, b: int) -> Tensor | None:
    """Return the scales of sequence ``b``, [1, H]."""
    return None if scale is None else scale[b : b + 1]


def multiplied(tensor: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return [B, H, S, D] in ``dtype``, times the scales [B, H] of heads or [B, H, S] of rows."""
    if scale is not None and scale.dim() == 3:
        wide = torch.promote_types(dtype, torch.float32)
        return (tensor.to(wide) * scale[..., None].to(wide)).to(dtype)
    numbers = tensor.to(dtype)
    return numbers if scale is None else numbers * scale.to(dtype)[:, :, None, None]


def of_keys(scale: Tensor | None, keys: slice) -> Tensor | None:
    """Return the scales of some keys: a part of those of rows, all of those of heads."""
    return scale[..., keys] if scale is not None and scale.dim() == 3 else scale


def _paged_parts(problem: Problem, operands: Operands, walk: Walk) -> Iterator[Part]:
    """Yield one part per sequence, with a copy of its keys and values."""
    assert operands.block_table is not None
    assert operands.key_lengths is not None
    bounds = None if operands.cu_seqlens_q is None else operands.cu_seqlens_q.tolist()
    for b, n in enumerate(operands.key_lengths.tolist()):
        rows = slice(b, b + 1) if bounds is None else slice(*bounds[b : b + 2])
        m = problem.queries if bounds is None else rows.stop - rows.start
        q = operands.q[rows] if bounds is None else operands.q[rows].transpose(0, 1)[None]
        used = operands.block_table[b, : -(-n // problem.page_size)].long()
        k, v = (_gathered(pages, used, n) for pages in (operands.k, operands.v))
        own = _of_sequence(operands, problem, b, m, n)._replace(q=q, k=k, v=v)
        if problem.stored is not None:  # with a scale for each row
            scales = (operands.k_scale, operands.v_scale)
            k_scale, v_scale = (None if x is None else _gathered(x, used, n) for x in scales)
            own = own._replace(k_scale=k_scale, v_scale=v_scale)
        small = problem._replace(layout="dense", batch=1, queries=m, keys=n, page_size=0)
        yield Part(small, own, b, rows, slice(0, 0), walk, problem.page_size)


def _gathered(pages: Tensor, used: Tensor, keys: int) -> Tensor:
    """Return the first keys of pages [pages, Hk, page_size, ...], as [1, Hk, keys, ...]."""
    return pages[used.to(pages.device)].transpose(0, 1).flatten(1, 2)[None, :, :keys]


def cut(program: Program, tensors: Sequence[Tensor], b: int, m: int, n: int) -> tuple[Tensor, ...]:
    """Views of captured tensors for sequence ``b`` with ``m`` queries and ``n`` keys."""
    views = list(tensors)
    for instr in program:
        for position, slot in enumerate(() if instr.op == EXPR else instr.slots):
            tensor = tensors[slot]
            view = tensor[b : b + 1] if tensor.size(0) > 1 else tensor
            if instr.op == "same_document":
                view = view[:, : (m, n)[position]]
            elif instr.op in ("dense", "bias"):
                view = view[:, :, : m if view.size(2) > 1 else 1, : n if view.size(3) > 1 else 1]
            views[slot] = view
    return tuple(views)


def sum_to(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` summed over the dimensions in which ``like`` has size 1.

    One dimension at a time: torch splits a full reduction among threads, which would make the
    bits depend on their number.
    """
    for dim in reversed(range(tensor.dim())):
        if like.size(dim) == 1 and tensor.size(dim) != 1:
            tensor = tensor.sum(dim, keepdim=True)
    return tensor
