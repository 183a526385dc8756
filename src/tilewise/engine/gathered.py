"""Attention over key lists, as attention of a small dense problem over gathered keys.

The query rows and heads that share a list are the rows of one small problem; its keys and values
are copied together from where the list says. So every mask, score and statistic is there, on every
backend, and the same kernels do the work. What a list names is copied for a few lists at a time:
memory is O(M K) for the lists, and no M x N is anywhere.

The gradients of keys and values are added up list after list, in the order of the rows. So they do
not depend on the number of threads. The copies are of the operands' dtype; the sums are in that of
the statistics.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine import registry
from tilewise.engine.dispatch import PLANS, plan_problem
from tilewise.engine.key_lists import Listed
from tilewise.plan.plan import Plan
from tilewise.problem import Needs, Operands, Problem, Result, Statistics
from tilewise.variants.extent import statistics_dtype
from tilewise.variants.gathering import gathered
from tilewise.variants.program import Instr, Program, fitted

# Of copied keys and values at a time: what stays in a core's cache, unless the calls get so small
# that starting them counts.
_CACHED_BYTES = 1 << 20
_LEAST_FLOPS = 1 << 24
_DEVICE_BYTES = 1 << 28


class Groups(NamedTuple):
    """The row groups of a call: rows of queries that share a list; int64 [T] each.

    Args:
        item: batch item or sequence.
        first: first row, counted in its sequence.
        queries, keys: the lengths M and N of the sequence.
    """

    item: Tensor
    first: Tensor
    queries: Tensor
    keys: Tensor


class Pages(NamedTuple):
    """What finds key n of sequence b in pages: row n % size of page table[b, n // size]."""

    table: Tensor
    size: int


class Lists(NamedTuple):
    """Where the keys of a call's lists are.

    Args:
        listed: T lists, for all heads or for each.
        groups: T row groups.
        block: keys that one index stands for.
        starts: int64 [B], first key of each sequence where they are packed; None where they have a
            dimension of their own.
        pages: of a paged call, or None.
    """

    listed: Listed
    groups: Groups
    block: int
    starts: Tensor | None = None
    pages: Pages | None = None


class Variant(NamedTuple):
    """Mask or score of a call with its tensors, in kernel form."""

    program: Program
    tensors: tuple[Tensor, ...]


class _Table(NamedTuple):
    """Keys or values [outer, Hk, n, D] as rows of one matrix, and how to find a row in it."""

    rows: Tensor  # [some, D]
    outer: int
    head: int
    key: int

    @staticmethod
    def of(x: Tensor) -> "_Table":
        x = x if x.stride(3) == 1 else x.contiguous()
        sizes, strides = x.shape[:3], x.stride()[:3]
        # Rows may overlap: values may be the first part of keys.
        unit = math.gcd(*strides) or x.shape[3]
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        rows = x.as_strided((last // unit + 1, x.shape[3]), (unit, 1))
        return _Table(rows, *(stride // unit for stride in strides))

    def places(self, outer: Tensor, key: Tensor, heads: Tensor) -> Tensor:
        """Return the rows [lists, Hk, K] of keys [lists, Hk or 1, K] that lie at (outer, key)."""
        return outer * self.outer + key * self.key + heads * self.head


class _Part(NamedTuple):
    """A few lists with their keys and values."""

    lists: slice
    plan: Plan
    operands: Operands
    keys: Tensor  # int32 [lists, Hk or 1, K]
    outer: Tensor  # int64 [lists, Hk or 1, K], with ``inner`` where these keys lie
    inner: Tensor


def small_problem(problem: Problem, problems: int, rows: int, keys: int) -> Problem:
    """Return what is computed of some lists and heads: without mask and score."""
    return problem._replace(
        batch=problems,
        heads=1,
        kv_heads=1,
        queries=rows,
        keys=keys,
        layout="dense",
        mask=(),
        score=(),
        sinks=False,
        page_size=0,
    )


class Gathering:
    """A call with key lists, for both of its passes.

    Args:
        problem: of the call; no dropout and no sinks.
        q: [T, Hk, rows, D], rows of a group: query rows times the heads that share keys.
        k: [outer, Hk, n, D].
        v: [outer, Hk, n, Dv].
        lists: where the keys are.
        mask: of the call.
        score: of the call; an expression of it reads float tensors of the statistics' dtype.
        rows: query rows of a group.
        backend: a name, or None.
    """

    def __init__(
        self,
        problem: Problem,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        lists: Lists,
        mask: Variant,
        score: Variant,
        rows: int,
        backend: str | None,
    ) -> None:
        self.problem, self.q, self.lists, self.rows = problem, q, lists, rows
        self._k, self._v = _Table.of(k), _Table.of(v)
        self._mask, self._score, self._backend = mask, score, registry.check_name(backend)
        self._heads = torch.arange(problem.kv_heads, device=q.device)[:, None]
        width = lists.listed.indices.shape[-1] * lists.block
        self._width = width
        full = q.is_cpu and bool((lists.listed.counts == width).all())
        self._cut = not full

    def parts(self) -> Iterator[_Part]:
        """Give all lists with what they name, a few at a time, in their order."""
        total, size = self.q.shape[0], self._size()
        for start in range(0, total, size):
            lists = slice(start, min(start + size, total))
            keys, (outer, inner) = self._keys(lists)
            k, v = (
                table.rows.index_select(0, table.places(outer, inner, self._heads).flatten())
                for table in (self._k, self._v)
            )
            problems = (lists.stop - start) * self.problem.kv_heads
            plan = self._plan(problems)
            mask, score = self._variants(lists, keys)
            operands = Operands(
                self.q[lists].reshape(problems, 1, -1, self.problem.head_dim),
                k.view(problems, 1, self._width, -1),
                v.view(problems, 1, self._width, -1),
                mask,
                score,
                # Autograd is above the op: it may always ask for gradients.
                for_backward=True,
            )
            yield _Part(lists, plan, operands, keys, outer, inner)

    def _size(self) -> int:
        """Return how many lists to do at a time."""
        problem, many = self.problem, self.problem.kv_heads * self._width
        widths = problem.head_dim + problem.value_dim
        of_one = max(1, many * widths * self.q.element_size())
        if not self.q.is_cpu:
            return max(1, _DEVICE_BYTES // of_one)
        threads = torch.get_num_threads()
        flops = max(1, 2 * many * widths * self.q.shape[2])
        wanted = max(_CACHED_BYTES // of_one, -(-_LEAST_FLOPS // flops), 1) * threads
        return min(wanted, max(1, 8 * _CACHED_BYTES // of_one))

    def _keys(self, lists: slice) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the keys of some lists [lists, Hk or 1, K], and where they lie."""
        listed, groups, block, starts, pages = self.lists
        keys = listed.indices[lists].long()
        if block > 1:
            inside = torch.arange(block, device=keys.device)
            keys = (keys[..., None] * block + inside).flatten(-2)
        item = groups.item[lists, None, None]
        # Beyond its count a list may name what is not there. Some key stands there, unread.
        last = groups.keys[lists, None, None] - 1
        keys = torch.minimum(keys, last).clamp_(min=0)
        if pages is not None:
            page = pages.table[item, keys.div(pages.size, rounding_mode="floor")].long()
            return keys, (page, keys % pages.size)
        if starts is None:
            return keys, (item.expand_as(keys), keys)
        # The last sequence may have no key: then there is no row after the one before it.
        inner = (keys + starts[item]).clamp_(max=self.problem.keys - 1)
        return keys, (torch.zeros_like(inner), inner)

    def _variants(
        self, lists: slice, keys: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors of mask and score of some lists."""
        heads = self.problem.kv_heads
        shared: tuple[Tensor, ...] = ()
        if self._mask.program or self._score.program:
            first_head = self._heads.flatten() * (self.problem.heads // heads)
            first_head = first_head.expand(keys.shape[0], heads)
            columns = [each[lists, None].expand_as(first_head) for each in self.lists.groups]
            columns.insert(1, first_head)
            places = torch.stack(columns, dim=-1).flatten(0, 1)
            shared = places, keys.expand(-1, heads, -1).flatten(0, 1)
        mask, score = (
            (*each.tensors, *shared) if each.program else () for each in (self._mask, self._score)
        )
        if self._cut:
            counts = self.lists.listed.counts[lists].expand(-1, heads).flatten()
            mask = (*mask, counts.contiguous())
        return mask, score

    def _plan(self, problems: int) -> Plan:
        """Return the plan of the small problems."""
        problem, share = self.problem, self.problem.heads // self.problem.kv_heads
        mask: Program = ()
        score: Program = ()
        if self._mask.program:
            mask = gathered(fitted(self._mask.program), "mask", self.rows, share)
        if self._cut:
            # Counts come after what the mask's expression may read.
            slot = len(self._mask.tensors) + 2 if mask else 0
            cut = (Instr("below", (), (slot,)),)
            mask = (*mask, *cut, Instr("and")) if mask else cut
        if self._score.program:
            score = gathered(fitted(self._score.program), "score", self.rows, share)
        small = small_problem(problem, problems, self.q.shape[2], self._width)
        small = small._replace(mask=mask, score=score)
        key = ("gathered", small, self._backend)
        plan = PLANS.find(key)
        if plan is None:
            plan = plan_problem(small, self._backend)
            PLANS.add(key, plan)
        return plan

    def forward(self, statistics: Statistics) -> Result:
        """Return the result in the form of ``q``: out [T, Hk, rows, Dv], lse [T, Hk, rows]."""
        rows, dtype = self.q.shape[:3], statistics_dtype(self.q.dtype)
        out = self.q.new_empty((*rows, self.problem.value_dim))
        lse = self.q.new_empty(rows, dtype=dtype)
        stats = self.q.new_empty((3 if statistics else 2, *rows), dtype=dtype)
        max_logit, entropy = (torch.empty_like(lse) for _ in range(2))
        top = torch.empty_like(lse, dtype=torch.int64)
        for part in self.parts():
            found = part.plan.forward(part.operands, statistics)
            lists, shape = part.lists, lse[part.lists].shape
            out[lists] = found.out.view(*shape, -1)
            lse[lists] = found.lse.view(shape)
            stats[:, lists] = found.stats.view(-1, *shape)
            if statistics:
                max_logit[lists] = found.max_logit.view(shape)
                entropy[lists] = found.entropy.view(shape)
            if statistics == "top1":
                at = found.top_key.view(shape)
                keys = part.keys.expand(-1, shape[1], -1)
                top[lists] = torch.where(at < 0, at, keys.gather(-1, at.clamp(min=0)))
        if not statistics:
            return Result(out, lse, stats)
        return Result(out, lse, stats, max_logit, entropy, top if statistics == "top1" else None)

    def backward(
        self,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        needs: Needs,
        shapes: tuple[torch.Size, torch.Size],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
        """Return the gradients of q (in its form here), k, v and the score's tensors.

        Args:
            result: of ``forward``.
            grad_out: [T, Hk, rows, Dv].
            grad_lse: [T, Hk, rows], or None.
            grad_entropy: [T, Hk, rows], or None.
            needs: which are wanted.
            shapes: of k and v.
        """
        dtype, q = statistics_dtype(self.q.dtype), self.q
        by_q = torch.empty_like(q) if needs.q else None
        sums = [
            _Table.of(q.new_zeros(shape, dtype=dtype)) if need else None
            for shape, need in zip(shapes, (needs.k, needs.v), strict=True)
        ]
        of_score: list[Tensor | None] = [
            torch.zeros_like(each) if need else None
            for each, need in zip(self._score.tensors, needs.score_tensors, strict=True)
        ]
        unread = (False, False) if self._score.program else ()
        small = needs._replace(score_tensors=(*needs.score_tensors, *unread))
        for part in self.parts():
            lists, flat = part.lists, (part.operands.q.shape[0], 1, -1)
            grads = part.plan.backward(
                part.operands,
                Result(
                    result.out[lists].reshape(*flat, self.problem.value_dim),
                    result.lse[lists].reshape(flat),
                    result.stats[:, lists].reshape(result.stats.shape[0], *flat),
                ),
                grad_out[lists].reshape(*flat, self.problem.value_dim),
                None if grad_lse is None else grad_lse[lists].reshape(flat),
                small,
                None if grad_entropy is None else grad_entropy[lists].reshape(flat),
            )
            if by_q is not None:
                by_q[lists] = grads.q.view_as(by_q[lists])
            for table, found in zip(sums, (grads.k, grads.v), strict=True):
                if table is not None:
                    places = table.places(part.outer, part.inner, self._heads).flatten()
                    _add_rows(table.rows, places, found.reshape(-1, found.shape[-1]).to(dtype))
            for total, found in zip(of_score, grads.score_tensors, strict=False):
                if total is not None and found is not None:
                    total += found
        by_k, by_v = (
            None if table is None else table.rows.view(shape).to(q.dtype)
            for table, shape in zip(sums, shapes, strict=True)
        )
        return by_q, by_k, by_v, of_score


def _add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows to those of a table in a fixed order, also where several go to one place."""
    if table.is_cpu:
        table.index_add_(0, places, rows)
    else:  # index_add_ takes atomics there; this sorts
        table.index_put_((places,), rows, accumulate=True)
