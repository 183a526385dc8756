"""Attention over key lists, as attention of small dense problems.

The query rows and heads that share a list are the rows of one small problem, whose keys and values
are those of the list. So every mask, score and statistic is there, on every backend, and the same
kernels do the work. Memory is O(M K) for the lists, and no M x N is anywhere.

* Forward, a list is the block table of a paged call: kernels read its keys where they lie.
* Backward, a backend that can reads them in place too (``kernels.Prepared.in_place``).
* For the others keys and values are copied together for a few lists at a time. The gradients of the
  copies are added up list after list, in the order of the rows. So they do not depend on the number
  of threads. Either way the sums are in the dtype of the statistics.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.engine.dispatch import check_name, plan_of
from tilewise.engine.key_lists import Lists, Table, of_heads
from tilewise.errors import Unsupported
from tilewise.kernels import Places
from tilewise.kernels.key_lists import add_rows, copied_rows, zero_rows
from tilewise.plan import Plan
from tilewise.problem import UNSEEN, Grads, Needs, Operands, Problem, Result, Statistics
from tilewise.variants.graphs import gathered
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.program import Instr, Program, fitted

# Of copied keys and values at a time: what stays in a core's cache, unless the calls get so small
# that starting them counts.
_CACHED_BYTES = 1 << 20
_LEAST_FLOPS = 1 << 24
_DEVICE_BYTES = 1 << 28
_NUMBERS = 1 << 20  # of keys in the lists of one forward call
_PLACED = 1 << 17  # of keys whose places are found at once, before they are copied
# Of keys in the lists of one backward call that reads in place, which walks over all keys once.
# Sorting them takes about 60 bytes of each.
_INVERTED = 1 << 22
_MOST_PAGES = (1 << 31) - 1  # block tables are int32
_new = tuple.__new__


def lists_at_once(heads: int, width: int) -> int:
    """Return how many lists one backward call in place takes, of ``width`` keys in each head."""
    return max(1, _INVERTED // (heads * width))


class Variant(NamedTuple):
    """Mask or score of a call with its tensors, in kernel form."""

    program: Program
    tensors: tuple[Tensor, ...]


class Sums(NamedTuple):
    """Gradients that all lists add to, k's and v's in the dtype of the statistics."""

    by_k: Tensor | None
    by_v: Tensor | None
    of_score: list[Tensor | None]


class _Upstream(NamedTuple):
    """What the backward of a call goes by, as small problems have it: a row for each of them."""

    result: Result
    grad_out: Tensor
    grad_lse: Tensor | None
    grad_entropy: Tensor | None

    def some(
        self, problems: slice, packed: bool = False
    ) -> tuple[Result, Tensor, Tensor | None, Tensor | None]:
        """Return those of some problems; ``packed`` as a variable-length call has them."""
        result, grad_out, *grads = self
        wide = [x[problems] for x in (result.out, grad_out)]
        numbers = [None if x is None else x[problems] for x in (result.lse, *grads)]
        stats = result.stats[:, problems]
        if packed:
            wide = [x.flatten(0, 2)[:, None] for x in wide]
            numbers = [None if x is None else x.flatten()[None] for x in numbers]
            stats = stats.flatten(1)[:, None]
        (out, upstream), (lse, by_lse, by_entropy) = wide, numbers
        assert lse is not None
        return Result(out, lse, stats), upstream, by_lse, by_entropy


def _by_problem(
    result: Result, grad_out: Tensor, grad_lse: Tensor | None, grad_entropy: Tensor | None
) -> _Upstream:
    """Return what has the form of ``q``, [T, Hk, rows, W], as [T * Hk, 1, rows, W]."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(0, 1).unsqueeze(1)

    by_lse, by_entropy = (None if x is None else flat(x) for x in (grad_lse, grad_entropy))
    stats = result.stats.flatten(1, 2).unsqueeze(2)
    found = Result(flat(result.out), flat(result.lse), stats)
    return _Upstream(found, flat(grad_out), by_lse, by_entropy)


class _Copied(NamedTuple):
    """A few lists with copies of their keys and values."""

    lists: slice
    plan: Plan
    operands: Operands
    numbers: list[Tensor]  # of the rows of each sum that their gradients go to


def small_problem(
    problem: Problem,
    problems: int,
    rows: int,
    keys: int,
    mask: Program = (),
    score: Program = (),
    page_size: int = 0,
) -> Problem:
    """Return what is computed of some lists and heads."""
    return problem._replace(
        batch=problems,
        heads=1,
        kv_heads=1,
        queries=rows,
        keys=keys,
        layout="dense",
        mask=mask,
        score=score,
        sinks=False,
        page_size=page_size,
    )


def _packed(small: Problem, operands: Operands, keys: Tensor) -> tuple[Problem, Operands]:
    """Return small problems as sequences of a variable-length call; ``keys`` [problems] are theirs.

    Their keys lie one after the other, and nobody reads what is behind them. So lists of any
    lengths have the plan of full ones.
    """
    queries = torch.full_like(keys, small.queries)
    of_queries, of_keys = (functional.pad(x.cumsum(0), (1, 0)) for x in (queries, keys))
    q, k, v = (x.flatten(0, 2)[:, None] for x in operands[:3])
    problem = small._replace(layout="varlen", queries=len(q), keys=len(k))
    packed = operands._replace(q=q, k=k, v=v, cu_seqlens_q=of_queries, cu_seqlens_k=of_keys)
    return problem, packed


def _numbers_of(tables: list[Table], places: tuple[Tensor, Tensor], heads: int) -> list[Tensor]:
    """Return the numbers of places in each table, made once for tables of the same steps."""
    found: dict[tuple[int, int, int], Tensor] = {}
    for table in tables:
        if table.steps not in found:
            found[table.steps] = table.numbers(*places, heads)
    return [found[table.steps] for table in tables]


@lru_cache(maxsize=256)
def _program(
    program: Program, kind: Literal["mask", "score"], rows: int, share: int, block: int
) -> Program:
    """Return the mask or score of small problems; rewriting one takes longer than a short call."""
    return gathered(fitted(program), kind, rows, share, block) if program or block else ()


class Gathering:
    """A call with key lists, for both of its passes. It has no dropout and no sinks.

    Args:
        problem, mask, score, backend: of the call; an expression of the score reads float tensors
            of the statistics' dtype.
        q: [T, Hk, rows, D], rows of a group: ``rows`` query rows times the heads that share keys.
        k, v: [outer, Hk, n, D] and [outer, Hk, n, Dv].
        lists: where the keys are.
        scales: of the rows of k and v in pages of 8 bits, float32 [outer, Hk, n] each; else ().
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
        scales: tuple[Tensor, ...] = (),
    ) -> None:
        self.problem, self.lists = problem, lists
        self.q, self.k, self.v, self._scales = q, k, v, scales
        self._backend, self._heads = check_name(backend), problem.kv_heads
        self._mask, self._score = mask, score
        share = problem.heads // self._heads
        hidden = 0 if lists.readers is None else lists.block
        self._programs = (
            _program(mask.program, "mask", rows, share, hidden),
            _program(score.program, "score", rows, share, 0),
        )
        self._varied = any(self._programs)

    def _small(self, lists: slice, width: int, page_size: int = 0) -> Problem:
        """Return the problem of some lists, with everything but what cuts them off."""
        problems = (lists.stop - lists.start) * self._heads
        sizes = (problems, self.q.shape[2], width)
        return small_problem(self.problem, *sizes, *self._programs, page_size)

    def _captured(
        self, lists: slice, keys: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the tensors that the programs of some lists read.

        ``keys`` [lists * Hk, K] may be None where there is no program.
        """
        if not self._varied:
            return (), ()
        assert keys is not None
        heads = self._heads
        positions = self.lists.positions
        if positions is None or positions.shape[0] != (lists.stop - lists.start) * heads:
            share = self.problem.heads // heads
            positions = self.lists.groups.of(lists).positions(heads, share)
        shared = positions, keys
        mask, score = (
            (*each.tensors, *shared) if program else ()
            for each, program in zip((self._mask, self._score), self._programs, strict=True)
        )
        if self.lists.readers is not None:
            mask = (*mask, of_heads(self.lists.readers[lists], heads).long())
        return mask, score

    def _problems(self, lists: slice) -> slice:
        """Return which small problems some lists are."""
        return slice(lists.start * self._heads, lists.stop * self._heads)

    def tables(self) -> tuple[Table, ...]:
        """Return keys and values as tables with pages that have the same numbers in both.

        Those in 8 bits come with tables of their scales, which may have other numbers.
        """
        size = self.lists.page_of(self.k.shape[2])
        k, v = Table.of(self.k, size), Table.of(self.v, size)
        if self._scales:
            return k, v, *(Table.of(x[..., None]) for x in self._scales)
        if k.steps != v.steps or k.pages.shape[0] > _MOST_PAGES:
            k, v = (Table.of(x.contiguous(), size) for x in (self.k, self.v))
        if k.pages.shape[0] > _MOST_PAGES:
            what = f"{k.pages.shape[0]} keys in all batch items and heads, with key lists"
            raise Unsupported(what, fix=f"call with {_MOST_PAGES} or fewer, e.g. one batch item")
        return k, v

    def forward(
        self, statistics: Statistics, for_backward: bool, out_alone: bool = False
    ) -> Result:
        """Return the result in the form of ``q``: out [T, Hk, rows, Dv], lse [T, Hk, rows].

        With ``out_alone`` it may have no more than the output.
        """
        rows = self.q.shape[:3]
        size = max(1, _NUMBERS // (self._heads * self.lists.width))
        parts = [slice(at, min(at + size, rows[0])) for at in range(0, rows[0], size)]
        if len(parts) == 1:
            return self._some(parts[0], self.tables(), statistics, for_backward, out_alone)
        dtype = statistics_dtype(self.q.dtype)
        out = self.q.new_empty((*rows, self.problem.value_dim))
        lse = self.q.new_empty(rows, dtype=dtype)
        stats = self.q.new_empty((3 if statistics else 2, *rows), dtype=dtype)
        max_logit, entropy = (torch.empty_like(lse) for _ in range(2))
        top = torch.empty_like(lse, dtype=torch.int64)
        tables = self.tables() if parts else None
        for lists in parts:
            assert tables is not None
            found = self._some(lists, tables, statistics, for_backward, False)
            out[lists], lse[lists], stats[:, lists] = found[:3]
            for whole, part in zip((max_logit, entropy, top), found[3:], strict=True):
                if part is not None:
                    whole[lists] = part
        if not statistics:
            return Result(out, lse, stats)
        return Result(out, lse, stats, max_logit, entropy, top if statistics == "top1" else None)

    def _some(
        self,
        lists: slice,
        tables: tuple[Table, ...],
        statistics: Statistics,
        for_backward: bool,
        out_alone: bool,
    ) -> Result:
        """Return the result of some lists in the form of ``q``, read where their keys lie."""
        small, operands, keys = self._in_pages(lists, tables, for_backward, statistics == "top1")
        plan = plan_of(small, self._backend)
        shape = (lists.stop - lists.start, *self.q.shape[1:3])
        if out_alone:
            if plan.output is not None and not self._varied:
                table, lengths = operands.block_table, operands.key_lengths
                out = plan.output(operands.q, operands.k, operands.v, table, lengths, None)
            else:
                out = plan.forward(operands._replace(out_alone=True), "").out
            return _new(Result, (out.view(*shape, -1), *UNSEEN))
        out, lse, stats, max_logit, entropy, top = plan.forward(operands, statistics)
        if top is not None:
            assert keys is not None
            top = torch.where(top < 0, top, keys[:, None].gather(-1, top.clamp(min=0)))
        numbers = (None if x is None else x.view(shape) for x in (max_logit, entropy, top))
        return Result(out.view(*shape, -1), lse.view(shape), stats.view(-1, *shape), *numbers)

    def _in_pages(
        self,
        lists: slice,
        tables: tuple[Table, ...],
        for_backward: bool,
        with_keys: bool = False,
    ) -> tuple[Problem, Operands, Tensor | None]:
        """Return the problem of some lists, and its operands, whose block tables are the lists.

        Then their keys [lists * Hk, K], which are there ``with_keys`` or with a program.
        """
        wanted = self._varied or with_keys
        table, lengths, keys = self.lists.located(
            lists, tables[:2], self.k.shape[2], self._heads, wanted
        )
        pages, own = [x.pages for x in tables], self._apart(tables)
        if own:
            pages, table = self._own_pages(lists, tables)
        if wanted and keys is None:
            keys = of_heads(self.lists.keys(lists), self._heads)
        small = self._small(lists, self.lists.width, pages[0].shape[2])
        mask, score = self._captured(lists, keys)
        k, v, *scales = pages
        k_scale, v_scale = (x[..., 0] for x in scales) if scales else (None, None)
        q = self.q if self.q.shape[0] == lists.stop - lists.start else self.q[lists]
        operands = Operands(
            q.reshape(small.batch, 1, -1, small.head_dim),
            k,
            v,
            mask,
            score,
            block_table=table,
            key_lengths=lengths,
            k_scale=k_scale,
            v_scale=v_scale,
            for_backward=for_backward,
            whole_pages=not own,
        )
        return small, operands, keys

    def _apart(self, tables: tuple[Table, ...]) -> bool:
        """Return whether rows in 8 bits and their scales have no numbers in common."""
        first = tables[0]
        many = first.pages.shape[0]
        differ = any(x.steps != first.steps for x in tables) or many > _MOST_PAGES
        return bool(self._scales) and many > 0 and differ

    def _own_pages(self, lists: slice, tables: tuple[Table, ...]) -> tuple[list[Tensor], Tensor]:
        """Return pages that hold the rows of one list each, and their block table.

        A kernel finds a row and its scale by one number. If they have none in common (as scales
        that are expanded from a few), it could only read copies of all scales in another order.
        So this copies the rows and scales that lists name: K of them, where there are N.
        """
        places = self.lists.places(lists, self.lists.keys(lists), self.k.shape[2])
        pages = []
        for table, numbers in zip(tables, _numbers_of([*tables], places, self._heads), strict=True):
            # As bytes: torch does not index float8 everywhere. A sequence without keys may name any
            # page.
            rows = table.rows.view(torch.uint8)
            rows = rows.index_select(0, numbers.flatten().clamp(0, len(rows) - 1))
            rows = rows.view(table.pages.dtype)
            pages.append(rows.view(-1, 1, self.lists.width, rows.shape[-1]))
        count = torch.arange(len(pages[0]), dtype=torch.int32, device=self.q.device)
        return pages, count[:, None]

    def _copies(self, backend: str, summed: int, sums: list[Table]) -> Iterator[_Copied]:
        """Give all lists with copies of what they name, a few at a time, in their order."""
        total, heads = self.q.shape[0] if self.k.shape[2] else 0, self._heads
        width, counts = self.lists.width, self.lists.listed.counts
        # Lists that are not full are packed one after the other, so that how a list is padded
        # changes no bit. On a device nobody waits to know, and a mask hides what pads them.
        packed = False
        if self.q.is_cpu and total:
            width = max(1, int(counts.max()))
            packed = bool((counts < width).any())
        size = self._at_once(summed, width)
        tables = [Table.of(x) for x in (self.k, self.v)] if total else []
        sources = [x.rows for x in tables]
        # Used again for the next lists: new memory would come page by page.
        rooms = [x.new_empty(min(size, total) * heads * width, x.shape[1]) for x in sources]
        # Torch's operations on a single list take longer than what they do.
        many = size * max(1, _PLACED // (size * heads * width))
        for first in range(0, total, many):
            placed = slice(first, min(first + many, total))
            all_keys = self.lists.keys(placed)[..., :width]
            places = self.lists.places(placed, all_keys, self.k.shape[2])
            all_numbers = [x.flatten() for x in _numbers_of([*tables, *sums], places, heads)]
            all_own = of_heads(counts[placed], heads)
            if packed:
                there = (torch.arange(width, device="cpu") < all_own[:, None]).flatten()
                all_numbers = [each[there] for each in all_numbers]
            at = 0
            for start in range(first, placed.stop, size):
                lists = slice(start, min(start + size, total))
                small = self._small(lists, width)
                of_keys = None
                if self._varied:
                    of_keys = of_heads(all_keys[start - first : lists.stop - first], heads)
                mask, score = self._captured(lists, of_keys)
                problems = slice((start - first) * heads, (lists.stop - first) * heads)
                own = all_own[problems]
                if not self.q.is_cpu:
                    cut: Program = (Instr("below", (), (len(mask),)),)
                    small = small._replace(mask=(*small.mask, *cut, Instr("and")) if mask else cut)
                    mask = (*mask, own)
                named = slice(at, at + (int(own.sum()) if packed else small.batch * width))
                at = named.stop
                numbers = [each[named] for each in all_numbers]
                for rows, each, room in zip(sources, numbers[:2], rooms, strict=True):
                    copied_rows(rows, each, room[: len(each)])
                k, v = (x[: small.batch * width].view(small.batch, 1, width, -1) for x in rooms)
                q = self.q[lists].reshape(small.batch, 1, -1, small.head_dim)
                operands = Operands(q, k, v, mask, score, for_backward=True)
                if packed:
                    small, operands = _packed(small, operands, own)
                yield _Copied(lists, plan_of(small, backend), operands, numbers[2:])

    def _at_once(self, summed: int, width: int) -> int:
        """Return how many lists of ``width`` keys to copy at a time.

        ``summed`` are the bytes of the score's gradients. Each time adds up all of them, so the
        copies are as large; and their sums may not depend on the number of threads.
        """
        problem, many = self.problem, self._heads * width
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

    def sums(self, needs: Needs) -> Sums:
        """Return zeros for the gradients of k, v and the score's tensors, where they are wanted."""
        dtype = statistics_dtype(self.q.dtype)
        by_k, by_v = (
            zero_rows(x, dtype) if need else None
            for x, need in zip((self.k, self.v), (needs.k, needs.v), strict=True)
        )
        of_score = [
            torch.zeros_like(each) if need else None
            for each, need in zip(self._score.tensors, needs.score_tensors, strict=True)
        ]
        return Sums(by_k, by_v, of_score)

    def backward(
        self,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        needs: Needs,
        sums: Sums,
    ) -> Tensor | None:
        """Return the gradient of q (in its form here), and add those of the others to ``sums``.

        ``result`` is that of ``forward``; the gradients of its parts are shaped as these, or None.
        """
        by_q = torch.zeros_like(self.q) if needs.q else None
        by_k, by_v, of_score = sums
        unread = (False, False) if self._score.program else ()
        small = needs._replace(score_tensors=(*needs.score_tensors, *unread))
        # The backend that the forward pass took, here of one list: it reads its statistics.
        size = self.lists.page_of(self.k.shape[2])
        paged = self._small(slice(0, 1), self.lists.width, size)
        plan = plan_of(paged, self._backend)
        given = _by_problem(result, grad_out, grad_lse, grad_entropy)
        if plan.in_place is None:
            summed = sum(total.nbytes for total in of_score if total is not None)
            parts = self._by_copies(given, small, by_k, by_v, plan.backend, summed)
        else:
            parts = self._in_place(given, small, by_k, by_v)
        for lists, grads in parts:
            if by_q is not None:
                assert grads.q is not None
                by_q[lists] = grads.q.view_as(by_q[lists])
            for total, found in zip(of_score, grads.score_tensors, strict=False):
                if total is not None and found is not None:
                    total += found
        return by_q

    def _by_copies(
        self,
        given: _Upstream,
        needs: Needs,
        by_k: Tensor | None,
        by_v: Tensor | None,
        backend: str,
        summed: int,
    ) -> Iterator[tuple[slice, Grads]]:
        """Give the gradients of a few lists at a time, and add up those of keys and values."""
        sums = [Table.of(x) for x in (by_k, by_v) if x is not None]
        totals = [x.rows for x in sums]
        for part in self._copies(backend, summed, sums):
            packed = part.operands.cu_seqlens_q is not None
            given_some = given.some(self._problems(part.lists), packed)
            result, grad_out, grad_lse, grad_entropy = given_some
            grads = part.plan.backward(
                part.operands, result, grad_out, grad_lse, needs, grad_entropy
            )
            wanted = [
                found
                for total, found in zip((by_k, by_v), (grads.k, grads.v), strict=True)
                if total is not None
            ]
            for rows, numbers, found in zip(totals, part.numbers, wanted, strict=True):
                assert found is not None
                add_rows(rows, numbers, found.reshape(-1, found.shape[-1])[: len(numbers)])
            yield part.lists, grads

    def placed(
        self, lists: slice, tables: tuple[Table, ...], by_k: Tensor | None, by_v: Tensor | None
    ) -> tuple[Problem, Operands, Places]:
        """Return the call of ``kernels.Prepared.in_place`` for some lists.

        ``by_k`` and ``by_v`` are the sums that gradients are added to; None where not wanted.
        """
        keys = self.lists.keys(lists)
        small, operands, _ = self._in_pages(lists, tables, True)
        outer, inner = self.lists.places(lists, keys, self.k.shape[2])
        lines = outer[:, :, 0] * self._heads + torch.arange(self._heads, device=keys.device)
        inner = of_heads(inner.to(torch.int32), self._heads)
        return small, operands, Places(self.k, self.v, lines.flatten(), inner, by_k, by_v)

    def _in_place(
        self, given: _Upstream, needs: Needs, by_k: Tensor | None, by_v: Tensor | None
    ) -> Iterator[tuple[slice, Grads]]:
        """Do as ``_by_copies``, with keys and values read where they lie."""
        total = self.q.shape[0] if self.k.shape[2] else 0
        size = lists_at_once(self._heads, self.lists.width)
        tables = self.tables() if total else None
        for start in range(0, total, size):
            lists = slice(start, min(start + size, total))
            assert tables is not None
            small, operands, places = self.placed(lists, tables, by_k, by_v)
            result, grad_out, grad_lse, grad_entropy = given.some(self._problems(lists))
            in_place = plan_of(small, self._backend).in_place
            assert in_place is not None
            yield (
                lists,
                in_place(operands, result, grad_out, grad_lse, needs, places, grad_entropy),
            )
