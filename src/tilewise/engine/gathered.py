"""Attention over key lists, as attention of small dense problems.

The query rows and heads that share a list are the rows of one small problem, whose keys and values
are those of the list. So every mask, score and statistic is there, on every backend, and the same
kernels do the work. Memory is O(M K) for the lists, and no M x N is anywhere.

* Forward, a list is the block table of a paged call: kernels read its keys where they lie.
* Backward, keys and values are copied together for a few lists at a time. The gradients of the
  copies are added up list after list, in the order of the rows. So they do not depend on the number
  of threads. The sums are in the dtype of the statistics.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.engine import registry
from tilewise.engine.dispatch import PLANS, plan_problem
from tilewise.engine.listed_memory import Lists, Table
from tilewise.errors import Unsupported
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
_NUMBERS = 1 << 20  # of keys in the lists of one forward call
_MOST_PAGES = (1 << 31) - 1  # block tables are int32


class Variant(NamedTuple):
    """Mask or score of a call with its tensors, in kernel form."""

    program: Program
    tensors: tuple[Tensor, ...]


class _Copied(NamedTuple):
    """A few lists with copies of their keys and values."""

    lists: slice
    plan: Plan
    operands: Operands
    outer: Tensor  # with ``inner`` [lists, Hk or 1, K] where the keys lie
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
        self.problem, self.lists = problem, lists
        self.q, self.k, self.v = q, k, v
        self._backend, self._heads = registry.check_name(backend), problem.kv_heads
        self._mask, self._score = mask, score
        share = problem.heads // self._heads
        self._programs = [
            gathered(fitted(each.program), kind, rows, share) if each.program else ()
            for kind, each in (("mask", mask), ("score", score))
        ]

    def _plan(self, small: Problem, backend: str | None) -> Plan:
        key = ("lists", small, backend)
        plan = PLANS.find(key)
        if plan is None:
            plan = plan_problem(small, backend)
            PLANS.add(key, plan)
        return plan

    def _small(self, lists: slice) -> Problem:
        """Return the problem of some lists, with everything but what cuts them off."""
        problems = (lists.stop - lists.start) * self._heads
        small = small_problem(self.problem, problems, self.q.shape[2], self.lists.width)
        return small._replace(mask=self._programs[0], score=self._programs[1])

    def _captured(
        self, lists: slice, keys: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors that the programs of some lists read."""
        if not (self._mask.program or self._score.program):
            return (), ()
        count = lists.stop - lists.start
        heads = torch.arange(self._heads, device=keys.device)
        first_head = (heads * (self.problem.heads // self._heads)).expand(count, -1)
        columns = [each[lists, None].expand_as(first_head) for each in self.lists.groups]
        columns.insert(1, first_head)
        shared = torch.stack(columns, dim=-1).flatten(0, 1), self._of_heads(keys)
        mask, score = (
            (*each.tensors, *shared) if each.program else () for each in (self._mask, self._score)
        )
        return mask, score

    def _of_heads(self, x: Tensor) -> Tensor:
        """Return something of lists [lists, Hk or 1, ...] for each problem: [lists * Hk, ...]."""
        rest = (-1,) * (x.dim() - 2)
        return x.expand(-1, self._heads, *rest).flatten(0, 1).contiguous()

    def _tables(self, size: int) -> tuple[Table, Table]:
        """Return keys and values as tables with pages that have the same numbers in both."""
        k, v = Table.of(self.k, size), Table.of(self.v, size)
        if k.steps != v.steps or len(k.pages) > _MOST_PAGES:
            k, v = (Table.of(x.contiguous(), size) for x in (self.k, self.v))
        if len(k.pages) > _MOST_PAGES:
            what = f"{len(k.pages)} keys in all batch items and heads, with key lists"
            raise Unsupported(what, fix=f"call with {_MOST_PAGES} or fewer, e.g. one batch item")
        return k, v

    def forward(self, statistics: Statistics, for_backward: bool) -> Result:
        """Return the result in the form of ``q``: out [T, Hk, rows, Dv], lse [T, Hk, rows]."""
        rows, dtype = self.q.shape[:3], statistics_dtype(self.q.dtype)
        out = self.q.new_empty((*rows, self.problem.value_dim))
        lse = self.q.new_empty(rows, dtype=dtype)
        stats = self.q.new_empty((3 if statistics else 2, *rows), dtype=dtype)
        max_logit, entropy = (torch.empty_like(lse) for _ in range(2))
        top = torch.empty_like(lse, dtype=torch.int64)
        total, size = self.k.shape[2], max(1, _NUMBERS // (self._heads * self.lists.width))
        tables = self._tables(self.lists.page_of(total)) if rows[0] else None
        for start in range(0, rows[0], size):
            lists = slice(start, min(start + size, rows[0]))
            assert tables is not None
            keys = self.lists.keys(lists)
            found = self._paged(lists, keys, tables, statistics, for_backward)
            shape = lse[lists].shape
            out[lists] = found.out.view(*shape, -1)
            lse[lists] = found.lse.view(shape)
            stats[:, lists] = found.stats.view(-1, *shape)
            if statistics:
                assert found.max_logit is not None
                assert found.entropy is not None
                max_logit[lists] = found.max_logit.view(shape)
                entropy[lists] = found.entropy.view(shape)
            if found.top_key is not None:
                at = found.top_key.view(shape)
                keys = keys.expand(-1, shape[1], -1)
                top[lists] = torch.where(at < 0, at, keys.gather(-1, at.clamp(min=0)))
        if not statistics:
            return Result(out, lse, stats)
        return Result(out, lse, stats, max_logit, entropy, top if statistics == "top1" else None)

    def _paged(
        self,
        lists: slice,
        keys: Tensor,
        tables: tuple[Table, Table],
        statistics: Statistics,
        for_backward: bool,
    ) -> Result:
        """Return the result of some lists, read where their keys lie."""
        k, v = tables
        size = k.pages.shape[2]
        # The first key of a page says where it is.
        outer, inner = self.lists.places(lists, keys[..., ::size], self.k.shape[2])
        numbers = k.numbers(outer, inner.div(size, rounding_mode="floor"), self._heads)
        small = self._small(lists)._replace(page_size=size)
        mask, score = self._captured(lists, keys)
        operands = Operands(
            self.q[lists].reshape(small.batch, 1, -1, small.head_dim),
            k.pages,
            v.pages,
            mask,
            score,
            block_table=numbers.flatten(0, 1).to(torch.int32),
            key_lengths=self._of_heads(self.lists.listed.counts[lists]).to(torch.int32),
            for_backward=for_backward,
        )
        found: Result = self._plan(small, self._backend).forward(operands, statistics)
        return found

    def _copies(self, backend: str, summed: int) -> Iterator[_Copied]:
        """Give all lists with copies of what they name, a few at a time, in their order."""
        total = self.q.shape[0] if self.k.shape[2] else 0
        size, width = self._at_once(summed), self.lists.width
        # On a device nobody waits to know whether all lists are full.
        full = self.q.is_cpu and bool((self.lists.listed.counts == width).all())
        tables = [Table.of(x) for x in (self.k, self.v)] if total else []
        for start in range(0, total, size):
            lists = slice(start, min(start + size, total))
            keys = self.lists.keys(lists)
            places = self.lists.places(lists, keys, self.k.shape[2])
            small = self._small(lists)
            mask, score = self._captured(lists, keys)
            if not full:
                cut: Program = (Instr("below", (), (len(mask),)),)
                small = small._replace(mask=(*small.mask, *cut, Instr("and")) if mask else cut)
                mask = (*mask, self._of_heads(self.lists.listed.counts[lists]))
            k, v = (
                table.rows.index_select(0, table.numbers(*places, self._heads).flatten())
                for table in tables
            )
            operands = Operands(
                self.q[lists].reshape(small.batch, 1, -1, small.head_dim),
                k.view(small.batch, 1, width, -1),
                v.view(small.batch, 1, width, -1),
                mask,
                score,
                for_backward=True,
            )
            yield _Copied(lists, self._plan(small, backend), operands, *places)

    def _at_once(self, summed: int) -> int:
        """Return how many lists to copy at a time.

        Args:
            summed: bytes of the score's gradients. Each time adds up all of them, so the copies
                are as large; and their sums may not depend on the number of threads.
        """
        problem, many = self.problem, self._heads * self.lists.width
        widths = problem.head_dim + problem.value_dim
        of_one = max(1, many * widths * self.q.element_size())
        if not self.q.is_cpu:
            return max(1, max(_DEVICE_BYTES, summed) // of_one)
        if summed:
            return max(1, max(8 * _CACHED_BYTES, summed) // of_one)
        threads = torch.get_num_threads()
        flops = max(1, 2 * many * widths * self.q.shape[2])
        wanted = max(_CACHED_BYTES // of_one, -(-_LEAST_FLOPS // flops), 1) * threads
        return min(wanted, max(1, 8 * _CACHED_BYTES // of_one))

    def backward(
        self,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
        """Return the gradients of q (in its form here), k, v and the score's tensors.

        Args:
            result: of ``forward``.
            grad_out: [T, Hk, rows, Dv].
            grad_lse: [T, Hk, rows], or None.
            grad_entropy: [T, Hk, rows], or None.
            needs: which are wanted.
        """
        dtype, q = statistics_dtype(self.q.dtype), self.q
        by_q = torch.zeros_like(q) if needs.q else None
        sums = [
            Table.of(torch.zeros(x.shape, dtype=dtype, device=x.device)) if need else None
            for x, need in zip((self.k, self.v), (needs.k, needs.v), strict=True)
        ]
        of_score: list[Tensor | None] = [
            torch.zeros_like(each) if need else None
            for each, need in zip(self._score.tensors, needs.score_tensors, strict=True)
        ]
        unread = (False, False) if self._score.program else ()
        small = needs._replace(score_tensors=(*needs.score_tensors, *unread))
        # The backend that the forward pass took: it reads its statistics.
        paged = self._small(slice(0, 1))._replace(page_size=self.lists.page_of(self.k.shape[2]))
        summed = sum(total.nbytes for total in of_score if total is not None)
        for part in self._copies(self._plan(paged, self._backend).backend, summed):
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
                    places = table.numbers(part.outer, part.inner, self._heads).flatten()
                    _add_rows(table.rows, places, found.reshape(-1, found.shape[-1]).to(dtype))
            for total, found in zip(of_score, grads.score_tensors, strict=False):
                if total is not None and found is not None:
                    total += found
        by_k, by_v = (
            None if table is None else table.rows.view(x.shape).to(q.dtype)
            for table, x in zip(sums, (self.k, self.v), strict=True)
        )
        return by_q, by_k, by_v, of_score


def _add_rows(table: Tensor, places: Tensor, rows: Tensor) -> None:
    """Add rows to those of a table in a fixed order, also where several go to one place."""
    if table.is_cpu:
        table.index_add_(0, places, rows)
    else:  # index_add_ takes atomics there; this sorts
        table.index_put_((places,), rows, accumulate=True)
