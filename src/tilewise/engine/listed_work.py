"""A call with key lists inside of a torch op: checked again, its rows brought together by lists."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.engine.call import Keywords, build_operands, build_problem, read_keywords
from tilewise.engine.gathered import Gathering, Variant
from tilewise.engine.key_lists import KeyBlocks, Listed, listed
from tilewise.engine.listed_memory import Groups, Lists, Paging
from tilewise.engine.ops import OpCall
from tilewise.engine.pages import Pages
from tilewise.problem import Operands
from tilewise.variants.program import decode
from tilewise.variants.values import Mask, Score


class OfLists(NamedTuple):
    """What the ops take of key lists. Without pages ``block_table`` is empty."""

    indices: Tensor
    block: int
    query_block: int
    block_table: Tensor
    key_lengths: Tensor


class ListedWork:
    """A call inside of an op, over tensors with values: everything is checked again."""

    def __init__(self, call: OpCall, of_lists: OfLists, found: Listed | None = None) -> None:
        keywords = _keywords(call, of_lists)
        q, k, v = (x.resolve_neg() for x in call[:3])
        self.problem = problem = build_problem(q, k, v, keywords)
        operands = build_operands(problem, q, k, v, keywords, None)
        self.packed, self.rows = problem.layout == "varlen", of_lists.query_block
        groups = self._groups(keywords, operands)
        blocks = KeyBlocks(of_lists.indices, of_lists.block, self.rows)
        if blocks.indices.shape[-1] == 0:
            blocks = blocks._replace(indices=functional.pad(blocks.indices, (0, 1), value=-1))
        self.listed = listed(blocks, groups.keys) if found is None else found
        starts = paging = None
        if keywords.pages is not None:
            table = keywords.pages.block_table.to(q.device)
            table = table if table.shape[1] else functional.pad(table, (0, 1))
            paging = Paging(table, problem.page_size)
        elif operands.cu_seqlens_k is not None:
            starts = operands.cu_seqlens_k.to(q.device)
            k, v = (x.transpose(0, 1)[None] for x in (k, v))
        self.gathering = Gathering(
            problem,
            self.grouped(q),
            k,
            v,
            Lists(self.listed, groups, blocks.block, starts, paging),
            Variant(keywords.mask.program, operands.mask_tensors),
            Variant(keywords.score.program, operands.score_tensors),
            self.rows,
            call.backend,
        )

    def _groups(self, keywords: Keywords, operands: Operands) -> Groups:
        problem, device = self.problem, operands.q.device
        counts = torch.full((problem.batch,), problem.keys, device=device)
        if keywords.pages is not None:
            counts = keywords.pages.key_lengths.to(device, torch.int64)
        elif operands.cu_seqlens_k is not None:
            counts = operands.cu_seqlens_k.to(device).diff()
        items = torch.arange(problem.batch, device=device)
        if operands.cu_seqlens_q is None:
            of_item = -(-problem.queries // self.rows)
            item = items.repeat_interleave(of_item)
            first = torch.arange(of_item, device=device).repeat(problem.batch) * self.rows
            return Groups(item, first, torch.full_like(item, problem.queries), counts[item])
        starts = operands.cu_seqlens_q.to(device)
        lengths = starts.diff()
        item = items.repeat_interleave(lengths, output_size=problem.queries)
        first = torch.arange(problem.queries, device=device) - starts[item]
        return Groups(item, first, lengths[item], counts[item])

    def grouped(self, x: Tensor) -> Tensor:
        """Return rows [B, Hq, M, W] or [Tq, Hq, W] by groups: [T, Hk, rows of a group, W]."""
        heads, width = self.problem.kv_heads, x.shape[-1]
        if self.packed:
            return x.reshape(x.shape[0], heads, x.shape[1] // heads, width)
        batch, all_heads, queries, _ = x.shape
        share, many = all_heads // heads, -(-queries // self.rows)
        x = functional.pad(x, (0, 0, 0, many * self.rows - queries)) if self.rows > 1 else x
        x = x.reshape(batch, heads, share, many, self.rows, width).permute(0, 3, 1, 4, 2, 5)
        return x.reshape(batch * many, heads, self.rows * share, width)

    def ungrouped(self, x: Tensor) -> Tensor:
        """Return the inverse of ``grouped``."""
        problem, width = self.problem, x.shape[-1]
        if self.packed:
            return x.reshape(x.shape[0], problem.heads, width)
        share, many = problem.heads // problem.kv_heads, -(-problem.queries // self.rows)
        x = x.view(problem.batch, many, problem.kv_heads, self.rows, share, width)
        x = x.permute(0, 2, 4, 1, 3, 5)
        x = x.reshape(problem.batch, problem.heads, many * self.rows, width)
        return x[:, :, : problem.queries]

    def per_row(self, x: Tensor | None) -> Tensor | None:
        """Return numbers of rows, [B, Hq, M] or [Hq, Tq], by groups: [T, Hk, rows of a group]."""
        if x is None:
            return None
        x = x.transpose(0, 1) if self.packed else x
        return self.grouped(x.resolve_neg()[..., None]).squeeze(-1)

    def back(self, x: Tensor) -> Tensor:
        """Return the inverse of ``per_row``."""
        x = self.ungrouped(x[..., None]).squeeze(-1)
        return (x.transpose(0, 1) if self.packed else x).contiguous()


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
