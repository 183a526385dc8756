"""A call with key lists over tensors with values: checked, its rows brought together by lists."""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.engine.call import (
    UNREADABLE,
    Keywords,
    build_operands,
    build_problem,
    keywords_key,
    reader,
)
from tilewise.engine.dispatch import Cache
from tilewise.engine.gathered import Gathering, Variant
from tilewise.engine.key_lists import (
    Groups,
    KeyBlocks,
    Listed,
    Lists,
    Paging,
    Rows,
    checked_key_lists,
    listed,
    row_groups,
)
from tilewise.engine.modes import transforms_active
from tilewise.engine.ops import OpCall
from tilewise.engine.paged import check_rows, check_undifferentiated
from tilewise.engine.pages import Pages
from tilewise.engine.shared_lists import may_share, shared
from tilewise.errors import Unsupported
from tilewise.problem import UNSEEN, Needs, Operands, Problem, Result, Statistics
from tilewise.variants.float8 import FLOAT8, NO_SCALES, Scales
from tilewise.variants.program import RAW, fitted

# Of a call whose facts are kept: a few tensors of so many numbers each.
_KEPT_LISTS = 1 << 10
_MOST_BLOCKS = (1 << 31) - 1  # sets of blocks are int32


class Frame(NamedTuple):
    """What calls of one signature share, which one call checks and makes for the next."""

    problem: Problem  # of the call, without sinks; its score as kernels read it
    # Both: keys in a block, and query rows that share a list, no longer than the call.
    block: int
    rows: int
    # Both: int64 [B], query rows and keys of each item. None if values say them.
    queries: Tensor | None = None
    counts: Tensor | None = None
    groups: Groups | None = None  # the row groups; None if values say them
    positions: Tensor | None = None  # of these groups, for programs; None if there is none


FRAMES: Cache[Frame] = Cache(256)
_new = tuple.__new__


def frame_of(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, lists: KeyBlocks) -> Frame:
    """Return the frame of a call; all but values and captured tensors is checked once.

    Raises:
        InvalidArgument, InvalidType, Unsupported: as the call.
    """
    indices, block, rows = lists
    try:
        of_lists = indices.shape, indices.device, block, rows
        key = reader()(q, k, v), keywords_key(keywords), of_lists
        found = FRAMES.young.get(key) or FRAMES.find(key)
    except UNREADABLE:
        # A tensor cannot be read, or something is not hashable: validation names it.
        return make_frame(q, k, v, keywords, lists)
    if found is None:
        found = make_frame(q, k, v, keywords, lists)
        FRAMES.add(key, found)
    return found


def make_frame(q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, lists: KeyBlocks) -> Frame:
    """Return the frame of a call, from nothing; raises as ``frame_of``."""
    frame = problem, _, rows = checked_call(q, k, v, keywords, lists)
    many = problem.batch * -(-problem.queries // rows)
    if problem.layout == "varlen" or many > _KEPT_LISTS or not q.is_cpu:
        return Frame(*frame)
    with torch.inference_mode(False):  # they may serve a call that is differentiated
        queries = torch.full((problem.batch,), problem.queries, device="cpu")
        counts = torch.full_like(queries, problem.keys)
        groups = row_groups(queries, counts, rows, total=many)
        if problem.page_size:  # lengths are values
            return Frame(*frame, queries, None, groups)
        positions = None
        if problem.mask or problem.score:
            share = problem.heads // problem.kv_heads
            positions = groups.positions(problem.kv_heads, share)
        return Frame(*frame, queries, counts, groups, positions)


def checked_call(
    q: Tensor, k: Tensor, v: Tensor, keywords: Keywords, lists: KeyBlocks
) -> tuple[Problem, int, int]:
    """Return the problem, the block and the rows of a ``Frame``; raises as ``frame_of``.

    Values are not read: tensors may be without.
    """
    refuse_others(q.dtype, keywords)
    problem = build_problem(q, k, v, keywords._replace(sinks=None))
    if keywords.sinks is not None:  # as one more set of keys, outside
        build_problem(q, k, v, keywords)
    if keywords.pages is not None:
        check_undifferentiated(q, k, v, keywords)
    _, block, rows = checked_key_lists(lists, problem, q.device)
    return problem._replace(score=fitted(problem.score)), block, rows


def refuse_others(dtype: torch.dtype, keywords: Keywords) -> None:
    """Refuse what no call with key lists can do."""
    if transforms_active():
        refuse_transforms()
    if keywords.dropout_p:
        refuse("dropout", "pass dropout_p=0.0")
    if dtype is FLOAT8:
        refuse("float8", "convert q, k and v to bfloat16")
    if any(instr.op == RAW for instr in keywords.score.program):
        refuse("raw scores", "write the score in the language of variants")


def refuse_transforms() -> NoReturn:
    """Refuse a call inside of torch.func transforms."""
    refuse("torch.func transforms and no forward-mode derivatives", "call it outside of them")


def refuse(what: str, fix: str) -> NoReturn:
    """Raise Unsupported: something with key lists."""
    raise Unsupported(f"tilewise has no {what} with key lists (keys=)", fix=fix)


class OfLists(NamedTuple):
    """What the ops take of key lists. Without pages ``block_table`` is empty."""

    indices: Tensor
    block: int
    query_block: int
    block_table: Tensor
    key_lengths: Tensor


class Part:
    """Batch items or sequences whose query rows are brought together in one way.

    ``items`` are int64 [some]; None for all of them. So many ``rows`` share a list. ``packed`` are
    the rows of a packed call's groups; None if each row is a group, in their order.
    """

    gathering: Gathering

    def __init__(
        self, problem: Problem, items: Tensor | None, rows: int, packed: Rows | None = None
    ) -> None:
        self.problem, self.items, self.rows, self.packed = problem, items, rows, packed

    @property
    def places(self) -> Tensor | None:
        """Return where ``ungrouped`` has its batch items or packed rows; None if it has all."""
        return self.items if self.packed is None else self.packed.places[self.packed.there]

    def grouped(self, x: Tensor) -> Tensor:
        """Return rows [B, Hq, M, W] or [Tq, Hq, W] by groups: [T, Hk, rows of a group, W]."""
        heads, width = self.problem.kv_heads, x.shape[-1]
        if self.problem.layout == "varlen":
            x = x.reshape(x.shape[0], heads, x.shape[1] // heads, width)
            if self.packed is None:
                return x
            found = x[self.packed.places]
            found[~self.packed.there] = 0
            return found.transpose(1, 2).flatten(2, 3)
        x = x if self.items is None else x[self.items]
        batch, all_heads, queries, _ = x.shape
        if queries == self.rows == 1:
            return x.reshape(batch, heads, all_heads // heads, width)
        share, many = all_heads // heads, -(-queries // self.rows)
        x = functional.pad(x, (0, 0, 0, many * self.rows - queries)) if self.rows > 1 else x
        x = x.reshape(batch, heads, share, many, self.rows, width).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(batch * many, heads, self.rows * share, width)

    def ungrouped(self, x: Tensor) -> Tensor:
        """Return the inverse of ``grouped``, of these batch items; packed rows as ``places``."""
        problem, width = self.problem, x.shape[-1]
        if problem.layout == "varlen":
            if self.packed is not None:
                share = problem.heads // problem.kv_heads
                x = x.view(len(x), problem.kv_heads, self.rows, share, width)
                x = x.transpose(1, 2)[self.packed.there]
            return x.reshape(x.shape[0], problem.heads, width)
        share, many = problem.heads // problem.kv_heads, -(-problem.queries // self.rows)
        batch = problem.batch if self.items is None else len(self.items)
        if problem.queries == self.rows == 1:
            return x.reshape(batch, problem.heads, 1, width)
        x = x.view(batch, many, problem.kv_heads, self.rows, share, width)
        x = x.permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(batch, problem.heads, many * self.rows, width)
        return x[:, :, : problem.queries]

    def per_row(self, x: Tensor) -> Tensor:
        """Return numbers of rows, [B, Hq, M] or [Hq, Tq], by groups: [T, Hk, rows of a group]."""
        x = x.transpose(0, 1) if self.problem.layout == "varlen" else x
        return self.grouped(x.resolve_neg()[..., None]).squeeze(-1)

    def back(self, x: Tensor) -> Tensor:
        """Return the inverse of ``per_row``, of these batch items."""
        x = self.ungrouped(x[..., None]).squeeze(-1)
        return (x.transpose(0, 1) if self.problem.layout == "varlen" else x).contiguous()


class ListedWork:
    """A call over tensors with values, which are checked.

    ``inputs`` are q, k and v, ``found`` the lists as sets, None to make them. With ``alone`` rows
    keep the lists that they came with, as they do on a device. ``backward`` says which pass it is
    for: each has its own way of sharing lists. Sinks in the keywords do not count.

    Attributes:
        listed: the lists as sets, as they came.
        parts: of the batch; without shared lists there is one.
    """

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        keywords: Keywords,
        indices: Tensor,
        frame: Frame,
        found: Listed | None = None,
        alone: bool = False,
        backward: bool = False,
    ) -> None:
        self._q, k, v = (x.resolve_neg() if x.is_neg() else x for x in inputs)
        self._problem = problem = frame.problem
        check_rows(problem, k, v, keywords)
        self._operands = operands = self._lowered(k, v, keywords)
        rows, block = frame.rows, frame.block
        named = -(-problem.keys // block)
        if named > _MOST_BLOCKS:
            refuse(f"{named} keys or blocks of keys", "list larger blocks by tilewise.KeyBlocks")
        self._counts = self._keys_of(keywords) if frame.counts is None else frame.counts
        groups = frame.groups
        if groups is None:
            groups = self._groups(rows)
        elif frame.counts is None:
            counts = self._counts
            one_each = groups.item.shape == counts.shape
            lengths = counts if one_each else counts[groups.item]
            groups = Groups(*groups[:3], lengths)
        if indices.shape[-1] == 0:
            indices = functional.pad(indices, (0, 1), value=-1)
        blocks = KeyBlocks(indices, block, rows)
        self.listed = listed(blocks, groups.keys) if found is None else found
        starts = paging = None
        if keywords.pages is not None:
            table = operands.block_table
            assert table is not None
            table = table.to(self._q.device)
            table = table if table.shape[1] else functional.pad(table, (0, 1))
            paging = Paging(table, problem.page_size)
        elif operands.cu_seqlens_k is not None:
            starts = operands.cu_seqlens_k.to(self._q.device)
            k, v = (x.transpose(0, 1)[None] for x in (k, v))
        lists = Lists(self.listed, groups, block, starts, paging, None, frame.positions)
        self.parts: list[Part] = []
        width = indices.shape[-1] * block
        if not alone and may_share(problem, rows, width, self._q.device, backward):
            share = problem.heads // problem.kv_heads
            queries = self._queries() if frame.queries is None else frame.queries
            for each in shared(self.listed, share, queries, self._counts, block, backward):
                items = None if len(each.items) == problem.batch else each.items
                packed = None
                if problem.layout == "varlen":
                    packed = Rows.of(each.groups, queries, each.rows)
                part = Part(problem, items, each.rows, packed)
                own = lists._replace(
                    listed=each.listed, groups=each.groups, readers=each.readers, positions=None
                )
                self._add(part, k, v, own, keywords)
        if not self.parts:
            self._add(Part(problem, None, rows), k, v, lists, keywords)

    def _lowered(self, k: Tensor, v: Tensor, keywords: Keywords) -> Operands:
        """Return the operands of the call, of which q, k and v are not read."""
        if keywords.plain:
            return Operands(self._q, k, v)
        keywords = keywords if keywords.sinks is None else keywords._replace(sinks=None)
        return build_operands(self._problem, self._q, k, v, keywords, None)

    def _add(self, part: Part, k: Tensor, v: Tensor, lists: Lists, keywords: Keywords) -> None:
        of_rows = self._operands.k_scale, self._operands.v_scale
        scales = tuple([x for x in of_rows if x is not None])
        part.gathering = Gathering(
            self._problem,
            part.grouped(self._q),
            k,
            v,
            lists,
            Variant(self._problem.mask, self._operands.mask_tensors),
            Variant(self._problem.score, self._operands.score_tensors),
            part.rows,
            keywords.backend,
            scales,
        )
        self.parts.append(part)

    def _keys_of(self, keywords: Keywords) -> Tensor:
        """Return the keys of each sequence, int64 [B]."""
        device, starts = self._q.device, self._operands.cu_seqlens_k
        if keywords.pages is not None:
            # Of its own: the caller may write to its tensor meanwhile, which may have any strides.
            return keywords.pages.key_lengths.to(
                device, torch.int64, copy=True, memory_format=torch.contiguous_format
            )
        if starts is not None:
            return starts.to(device, torch.int64).diff()
        return torch.full((self._problem.batch,), self._problem.keys, device=device)

    def _queries(self) -> Tensor:
        """Return the query rows of each sequence, int64 [B]."""
        starts = self._operands.cu_seqlens_q
        if starts is None:
            return torch.full_like(self._counts, self._problem.queries)
        return starts.to(self._q.device, torch.int64).diff()

    def _groups(self, rows: int) -> Groups:
        """Return groups of so many rows, of all batch items; of packed rows each is one."""
        problem, starts = self._problem, self._operands.cu_seqlens_q
        if starts is None:
            many = problem.batch * -(-problem.queries // rows)
            return row_groups(self._queries(), self._counts, rows, total=many)
        starts = starts.to(self._q.device, torch.int64)
        row = torch.arange(problem.queries, device=starts.device)
        item = torch.searchsorted(starts[1:], row, right=True)
        if not item.is_cpu:  # where nobody looked at the values
            item.clamp_(max=problem.batch - 1)
        return Groups(item, row - starts[item], self._queries()[item], self._counts[item])

    def forward(
        self, statistics: Statistics, for_backward: bool, out_alone: bool = False
    ) -> Result:
        """Return the result in the form of the call: out of q's, numbers of rows of lse's.

        With ``out_alone`` it may have no more than the output.
        """
        found = []
        if out_alone and len(self.parts) == 1:
            (part,) = self.parts
            whole_out = part.ungrouped(part.gathering.forward("", for_backward, True).out)
            return _new(Result, (whole_out, *UNSEEN))
        for part in self.parts:
            out, lse, stats, *rest = part.gathering.forward(statistics, for_backward)
            rows = torch.stack([part.back(each) for each in stats])
            others = [None if x is None else part.back(x) for x in rest]
            found.append(Result(part.ungrouped(out), part.back(lse), rows, *others))
        if len(found) == 1:
            return found[0]
        # Of numbers of packed rows the last axis is the rows', of others the first batch items.
        order, packed = self._order(), self._problem.layout == "varlen"

        def whole(name: str, axis: int = -1 if packed else 0) -> Tensor:
            of_parts = [getattr(each, name) for each in found]
            return torch.cat(of_parts, axis).index_select(axis, order)

        max_logit, entropy, top_key = (
            None if each is None else whole(name)
            for name, each in zip(Result._fields[3:], found[0][3:], strict=True)
        )
        stats = whole("stats", -1 if packed else 1)
        return Result(whole("out", 0), whole("lse"), stats, max_logit, entropy, top_key)

    def backward(
        self,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        needs: Needs,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, list[Tensor | None]]:
        """Return the gradients of q, k, v (by heads if packed) and of the score's tensors.

        ``result`` has out, lse and stats of ``forward``. The gradients that come are shaped as
        these.
        """
        sums, by_q = self.parts[0].gathering.sums(needs), []
        for part in self.parts:
            lse, stats = part.per_row(result.lse), [part.per_row(each) for each in result.stats]
            by_lse, by_entropy = (
                None if x is None else part.per_row(x) for x in (grad_lse, grad_entropy)
            )
            of_part = part.gathering.backward(
                Result(part.grouped(result.out), lse, torch.stack(stats)),
                part.grouped(grad_out),
                by_lse,
                by_entropy,
                needs,
                sums,
            )
            if of_part is not None:
                by_q.append(part.ungrouped(of_part))
        by_k, by_v = (None if x is None else x.to(self._q.dtype) for x in sums[:2])
        whole = by_q[0] if by_q else None
        if len(by_q) > 1:
            whole = torch.cat(by_q).index_select(0, self._order())
        return whole, by_k, by_v, sums.of_score

    def _order(self) -> Tensor:
        """Return where each item or packed row is, in what the parts have one after the other."""
        places = [part.places for part in self.parts]
        return torch.cat([each for each in places if each is not None]).argsort()


def keywords_of(call: OpCall, of_lists: OfLists, scales: Scales = NO_SCALES) -> Keywords:
    """Return the keywords of a call as the ops take it."""
    if of_lists.block_table.dim() == 1:
        return call.keywords()
    pages = Pages(of_lists.block_table, of_lists.key_lengths, call.cu_seqlens_q)
    return call.keywords(scales, pages)
