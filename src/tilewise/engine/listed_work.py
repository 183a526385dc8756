"""A call with key lists inside of a torch op: checked again, its rows brought together by lists."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.engine.call import Keywords, build_operands, build_problem, read_keywords
from tilewise.engine.gathered import Gathering, Variant
from tilewise.engine.key_lists import (
    Groups,
    KeyBlocks,
    Listed,
    Lists,
    Paging,
    Rows,
    listed,
    row_groups,
)
from tilewise.engine.ops import OpCall
from tilewise.engine.pages import Pages
from tilewise.engine.shared_lists import may_share, shared
from tilewise.problem import Needs, Problem, Result, Statistics
from tilewise.variants.program import decode
from tilewise.variants.values import Mask, Score


class OfLists(NamedTuple):
    """What the ops take of key lists. Without pages ``block_table`` is empty."""

    indices: Tensor
    block: int
    query_block: int
    block_table: Tensor
    key_lengths: Tensor


class Part:
    """Batch items or sequences whose query rows are brought together in one way.

    Args:
        problem: of the call.
        items: int64 [some], which; None for all of them.
        rows: query rows that share a list.
        packed: the rows of a packed call's groups; None if each row is a group, in their order.
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
    """A call inside of an op, over tensors with values: everything is checked again.

    Args:
        call: what the ops take.
        of_lists: what they take of key lists.
        found: the lists as sets; None to make them.
        alone: whether rows keep the lists that they came with, as they do on a device.

    Attributes:
        listed: the lists as sets, as they came.
        parts: of the batch; without shared lists there is one.
    """

    def __init__(
        self, call: OpCall, of_lists: OfLists, found: Listed | None = None, alone: bool = False
    ) -> None:
        keywords = _keywords(call, of_lists)
        self._q, k, v = (x.resolve_neg() for x in call[:3])
        self._problem = problem = build_problem(self._q, k, v, keywords)
        self._operands = operands = build_operands(problem, self._q, k, v, keywords, None)
        self._counts = self._keys_of(keywords)
        rows = of_lists.query_block
        groups = self._groups(rows)
        blocks = KeyBlocks(of_lists.indices, of_lists.block, rows)
        if blocks.indices.shape[-1] == 0:
            blocks = blocks._replace(indices=functional.pad(blocks.indices, (0, 1), value=-1))
        self.listed = listed(blocks, groups.keys) if found is None else found
        starts = paging = None
        if keywords.pages is not None:
            table = keywords.pages.block_table.to(self._q.device)
            table = table if table.shape[1] else functional.pad(table, (0, 1))
            paging = Paging(table, problem.page_size)
        elif operands.cu_seqlens_k is not None:
            starts = operands.cu_seqlens_k.to(self._q.device)
            k, v = (x.transpose(0, 1)[None] for x in (k, v))
        lists = Lists(self.listed, groups, blocks.block, starts, paging)
        self.parts: list[Part] = []
        width = blocks.indices.shape[-1] * blocks.block
        if not alone and may_share(problem, rows, width, self._q.device):
            share = problem.heads // problem.kv_heads
            queries = self._queries()
            for each in shared(self.listed, share, queries, self._counts, lists.block):
                items = None if len(each.items) == problem.batch else each.items
                packed = None
                if problem.layout == "varlen":
                    packed = Rows.of(each.groups, queries, each.rows)
                part = Part(problem, items, each.rows, packed)
                own = lists._replace(listed=each.listed, groups=each.groups, readers=each.readers)
                self._add(part, k, v, own, keywords)
        if not self.parts:
            self._add(Part(problem, None, rows), k, v, lists, keywords)

    def _add(self, part: Part, k: Tensor, v: Tensor, lists: Lists, keywords: Keywords) -> None:
        part.gathering = Gathering(
            self._problem,
            part.grouped(self._q),
            k,
            v,
            lists,
            Variant(keywords.mask.program, self._operands.mask_tensors),
            Variant(keywords.score.program, self._operands.score_tensors),
            part.rows,
            keywords.backend,
        )
        self.parts.append(part)

    def _keys_of(self, keywords: Keywords) -> Tensor:
        """Return the keys of each sequence, int64 [B]."""
        device, starts = self._q.device, self._operands.cu_seqlens_k
        if keywords.pages is not None:
            return keywords.pages.key_lengths.to(device, torch.int64)
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
        problem = self._problem
        many = -(-problem.queries // rows)
        many *= problem.batch if self._operands.cu_seqlens_q is None else 1
        return row_groups(self._queries(), self._counts, rows, total=many)

    def forward(self, statistics: Statistics, for_backward: bool) -> Result:
        """Return the result in the form of the call: out of q's, numbers of rows of lse's."""
        found = []
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

        Args:
            result: out, lse and stats of ``forward``.
            grad_out: like out.
            grad_lse: like lse, or None.
            grad_entropy: like lse, or None.
            needs: which are wanted.
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


def _keywords(call: OpCall, of_lists: OfLists) -> Keywords:
    if of_lists.block_table.dim() == 1:
        return call.keywords()
    return read_keywords(
        Mask(decode(call.mask), tuple(call.mask_tensors)),
        Score(decode(call.score), tuple(call.score_tensors)),
        call.scale,
        0.0,
        None,
        call.backend,
        pages=Pages(of_lists.block_table, of_lists.key_lengths, call.cu_seqlens_q),
    )
