"""Attention of some rows over some keys of a call: the small problems that it consists of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine.call import Keywords, ragged_extent, reads_on_device
from tilewise.engine.dispatch import plan_of
from tilewise.kernels import stats_of
from tilewise.problem import START, Grads, Needs, Operands, Problem, Result
from tilewise.reference.blocks import Block, cut
from tilewise.reference.programs import Cover, cover
from tilewise.variants.lower import Extent, lower_mask, lower_score, statistics_dtype
from tilewise.variants.outside import refuse_outside
from tilewise.variants.placing import Place, Placed, placed
from tilewise.variants.program import Program, fitted


class Starts(NamedTuple):
    """Where the sequences of packed rows begin, and where the last one ends."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]


class Piece(NamedTuple):
    """A small problem of a call."""

    place: Place  # where it lies
    problem: Problem  # with the call's mask (without one where no pair is hidden) and score
    rows: slice  # which rows of those that it was cut from
    columns: slice  # which keys likewise
    starts: Starts | None = None  # of its sequences, where it is packed


class Whole(NamedTuple):
    """A call over whole sequences, of which every position computes parts.

    Tensors are [B, H, S, D] here, of packed rows too, which are [1, H, T, D].
    """

    problem: Problem  # of all rows and keys, with the heads that are computed here
    heads: range  # which of the call's heads these are
    mask_tensors: tuple[Tensor, ...]  # in kernel form, for all rows, keys and heads
    score_tensors: tuple[Tensor, ...]  # likewise
    seed: int | Tensor  # of dropout
    backend: str | None  # a name, or None
    starts: Starts | None = None  # of packed sequences; None for a dense call

    @classmethod
    def of(
        cls,
        problem: Problem,
        keywords: Keywords,
        starts: Starts | None,
        seed: int | Tensor,
        device: torch.device,
    ) -> Whole:
        """Return the call over the whole sequence, with all heads; the problem is without sinks."""
        extent = Extent(problem.batch, problem.heads, problem.queries, problem.keys)
        if starts is not None:
            extent = ragged_extent(problem, *starts)
        mask, score = keywords.mask, keywords.score
        refuse_outside(mask.program, score.program, mask.captured, score.captured, extent)
        checks = extent if problem.device == "cpu" else extent._replace(check_values=False)
        return cls(
            problem._replace(mask=fitted(mask.program), score=fitted(score.program)),
            range(problem.heads),
            lower_mask(mask.program, mask.captured, checks, device, problem.dtype),
            lower_score(score.program, score.captured, extent, problem.dtype, device),
            seed,
            keywords.backend,
            starts,
        )

    @property
    def floats(self) -> torch.dtype:
        """The dtype of lse and of sums."""
        return statistics_dtype(self.problem.dtype)

    @property
    def items(self) -> int:
        """The first dimension of its tensors: B, and 1 of packed rows."""
        return self.problem.batch if self.starts is None else 1

    @property
    def key_numbers(self) -> int:
        """Numbers of a key and its value, of all key heads and items: what travels of a row."""
        problem = self.problem
        return self.items * problem.kv_heads * (problem.head_dim + problem.value_dim)

    def of_heads(self, heads: range, kv_heads: int) -> Whole:
        """Return the call for some of its heads, beside so many key heads."""
        problem = self.problem._replace(heads=len(heads), kv_heads=kv_heads)
        return self._replace(problem=problem, heads=heads)

    def pieces(self, rows: range, columns: range) -> Iterator[Piece]:
        """Yield the problems of some rows over some keys, none of them without a pair to see.

        A dense call has one. Of packed sequences those that lie in both ranges are one, and each
        that is cut by them is one.
        """
        if not rows or not columns or not self.heads:
            return
        if self.starts is None:
            every = range(self.problem.batch)
            sizes = self.problem.queries, self.problem.keys
            place = Place(every, self.heads, rows, columns, *sizes)
            yield from self._dense(place, slice(0, len(rows)), slice(0, len(columns)))
            return
        inside: list[int] = []
        starts, ends = self.starts.queries, self.starts.queries[1:]
        for item in range(bisect_right(ends, rows.start), bisect_left(starts, rows.stop)):
            row, last_row = self.starts.queries[item : item + 2]
            key, last_key = self.starts.keys[item : item + 2]
            m = range(max(row, rows.start), min(last_row, rows.stop))
            n = range(max(key, columns.start), min(last_key, columns.stop))
            if not m or not n:
                continue
            counts = last_row - row, last_key - key
            if (len(m), len(n)) == counts:
                inside.append(item)
                continue
            places = range(m.start - row, m.stop - row), range(n.start - key, n.stop - key)
            place = Place(range(item, item + 1), self.heads, *places, *counts)
            yield from self._dense(place, _within(m, rows), _within(n, columns))
        # Neighbours are one call; between them may be sequences without rows or keys.
        for first, last in _runs(inside):
            yield self._packed(range(first, last + 1), rows, columns)

    def any_pair(self, rows: range, columns: range) -> bool:
        """Return whether there is something to compute of some rows and keys."""
        return next(self.pieces(rows, columns), None) is not None

    def everything(self) -> Piece:
        """Return the whole call as one problem, whether it sees a pair or not."""
        rows, columns = range(self.problem.queries), range(self.problem.keys)
        if self.starts is not None:
            return self._packed(range(self.problem.batch), rows, columns)
        sizes = self.problem.queries, self.problem.keys
        place = Place(range(self.problem.batch), self.heads, rows, columns, *sizes)
        return Piece(place, self.problem, slice(None), slice(None))

    def _dense(self, place: Place, rows: slice, columns: slice) -> Iterator[Piece]:
        problem = self.problem
        assert place.rows is not None
        assert place.columns is not None
        seen = self.sees(place)
        if seen is Cover.EMPTY:
            return
        small = problem._replace(
            batch=len(place.items),
            queries=len(place.rows),
            keys=len(place.columns),
            layout="dense",
            mask=() if seen is Cover.FULL else problem.mask,
        )
        yield Piece(place, small, rows, columns)

    def sees(self, place: Place) -> Cover:
        """Return whether the rows of a place see none, some or all of its keys."""
        assert place.rows is not None
        assert place.columns is not None
        sizes = place.queries, place.keys
        block = Block(place.rows, place.columns, *sizes, place.items, self.heads, self.floats)
        mask, tensors = self.problem.mask, self.mask_tensors
        if not tensors:
            return _cover(mask, block)
        if self.starts is not None:
            tensors = cut(mask, tensors, place.items.start, *sizes)
        return cover(mask, tensors, block)

    def _packed(self, items: range, rows: range, columns: range) -> Piece:
        """Return the problem of whole sequences, one after the other."""
        assert self.starts is not None
        queries, keys = (each[items.start : items.stop + 1] for each in self.starts)
        small = self.problem._replace(
            batch=len(items),
            queries=queries[-1] - queries[0],
            keys=keys[-1] - keys[0],
        )
        at = (
            _within(range(queries[0], queries[-1]), rows),
            _within(range(keys[0], keys[-1]), columns),
        )
        own = Starts(*(tuple([x - each[0] for x in each]) for each in (queries, keys)))
        return Piece(Place(items, self.heads), small, *at, own)


@lru_cache(maxsize=1 << 16)
def _cover(mask: Program, block: Block) -> Cover:
    return cover(mask, (), block)


def _within(part: range, whole: range) -> slice:
    return slice(part.start - whole.start, part.stop - whole.start)


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the first and the last of each run of neighbouring numbers."""
    for at, number in enumerate(numbers):
        if not at or numbers[at - 1] != number - 1:
            first = number
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield first, number


class Rows(NamedTuple):
    """What the backward knows of some rows: results over all keys, and their gradients."""

    out: Tensor
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None

    def cut(self, at: slice) -> Rows:
        """Return some of them, as kernels take them."""
        return Rows(*[None if x is None else x[:, :, at].contiguous() for x in self])  # type: ignore[arg-type]


class Stated(NamedTuple):
    """A piece as a problem that counts its rows and keys from 0, and what it reads."""

    problem: Problem  # with the mask and the score of the piece
    # Both: what these read.
    mask_tensors: tuple[Tensor, ...]
    score_tensors: tuple[Tensor, ...]
    # cu_seqlens of queries and of keys; Nones where it is not packed.
    starts: tuple[Tensor | None, ...]
    score: Placed  # where the tensors of the score are in those of the whole


def stated(whole: Whole, piece: Piece) -> Stated:
    """Return a piece of a call as a problem of its own."""
    place, small, _, _, starts = piece
    mask = placed(small.mask, "mask", place) if small.mask else Placed(())
    score = placed(small.score, "score", place)
    return Stated(
        small._replace(mask=mask.program, score=score.program),
        mask.tensors(whole.mask_tensors, small.dtype),
        score.tensors(whole.score_tensors, small.dtype),
        (None, None) if starts is None else tuple([torch.tensor(each) for each in starts]),
        score,
    )


class Part:
    """A piece of a call with what it takes to compute it, forward and backward."""

    def __init__(self, whole: Whole, piece: Piece) -> None:
        place, small, self.rows, self.columns, starts = piece
        self._whole, self._packed = whole, starts is not None
        own = stated(whole, piece)
        self._captured = own.mask_tensors, own.score_tensors
        self._starts, self._score = own.starts, own.score
        self.plan = plan_of(own.problem, whole.backend)
        self._origin = START
        if small.dropout_p:
            item, head, row, key = (0 if part is None else part.start for part in place[:4])
            self._origin = item, head, row, key

    def operands(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> Operands:
        """Return the operands of the part, from rows and keys that it lies in."""
        own = q[:, :, self.rows], k[:, :, self.columns], v[:, :, self.columns]
        q, k, v = (self._form(x) for x in own)
        place = q.device if reads_on_device(self.plan.backend) else torch.device("cpu")
        cu_q, cu_k = (None if each is None else each.to(place) for each in self._starts)
        return Operands(
            *(q, k, v, *self._captured, None),
            cu_q,
            cu_k,
            self._whole.seed,
            self._origin,
            for_backward=for_backward,
        )

    def _form(self, x: Tensor) -> Tensor:
        """Return [1, H, T, D] packed as [T, H, D]; others stay."""
        return x[0].transpose(0, 1) if self._packed else x

    def _back(self, x: Tensor) -> Tensor:
        """Return the inverse of ``_form``."""
        return x.transpose(0, 1)[None] if self._packed else x

    def forward(self, q: Tensor, k: Tensor, v: Tensor, for_backward: bool) -> tuple[Tensor, Tensor]:
        """Return out and lse of its rows over its keys alone."""
        result: Result = self.plan.forward(self.operands(q, k, v, for_backward))
        return self.back(result.out, result.lse)

    def back(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Return out and lse of the kernels as [B, H, rows, ...]."""
        return self._back(out), lse[None] if self._packed else lse

    def backward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, needs: Needs) -> Grads:
        """Return its gradients, from the results over all keys of the rows that it lies in."""
        out, lse, grad_out, grad_lse = rows.cut(self.rows)
        if self._packed:
            lse, grad_lse = lse[0], None if grad_lse is None else grad_lse[0]
        slots = tuple([needs.score_tensors[slot] for slot in self._score.slots])
        grads: Grads = self.plan.backward(
            self.operands(q, k, v, for_backward=True),
            Result(self._form(out), lse, stats_of(lse, self.plan.row_max_unit)),
            self._form(grad_out),
            grad_lse,
            needs._replace(score_tensors=slots, partial=True),
        )
        own = [None if x is None else self._back(x) for x in grads[:3]]
        return grads._replace(q=own[0], k=own[1], v=own[2])

    def add_score_gradients(self, sums: list[Tensor | None], grads: Grads) -> None:
        """Add the gradients of what the score reads to those of the whole tensors."""
        found = zip(self._score.slots, self._score.cuts, grads.score_tensors, strict=True)
        for slot, of, grad in found:
            into = sums[slot]
            if into is not None and grad is not None:
                of.view(into).add_(grad.to(into.dtype))


class Running:
    """The attention of rows of q [B, H, rows, D] over the keys so far, in the dtype of sums."""

    def __init__(self, q: Tensor, width: int, floats: torch.dtype) -> None:
        self._out = q.new_zeros((*q.shape[:3], width), dtype=floats)
        self._lse = q.new_full(q.shape[:3], -torch.inf, dtype=floats)
        self._dtype = q.dtype

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some of the rows over more keys: ``merge_partial``, in place."""
        into, own = self._out[:, :, rows], self._lse[:, :, rows]
        total = torch.logaddexp(own, lse)
        # A row that has seen no key yet: its weight is 0, and so is its output.
        before, more = (
            torch.where(each == -torch.inf, 0.0, torch.exp(each - total))[..., None]
            for each in (own, lse)
        )
        into.mul_(before).addcmul_(out.to(into.dtype), more)
        own.copy_(total)

    def close(self) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype, and lse."""
        return self._out.to(self._dtype), self._lse
