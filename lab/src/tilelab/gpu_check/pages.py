"""Keys and values of packed inputs in pages, in a random order, with NaN in what nobody has."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

import tilewise
from tilelab.gpu_check.outcomes import Inputs, Outcome
from tilelab.gpu_check.problems import ProblemCase, find
from tilelab.gpu_check.setting import Setting

__all__ = ["PAGE_SIZES", "attend_pages", "few_queries"]

PAGE_SIZES = (16, 48, 128)  # parts of a kernel's block of keys, no divisor of it, and all of it
_FEW = 3


def few_queries() -> ProblemCase:
    """Return the sequences of "varlen" with as many queries each, and so few that they decode."""
    case = find("varlen")
    lengths = tuple((_FEW, keys) for _, keys in case.lengths)
    return replace(case, name="few rows", lengths=lengths)


def attend_pages(
    setting: Setting, inputs: Inputs, page_size: int, *, packed: bool, seed: int
) -> Outcome:
    """Return the packed result of the public call: out and lse.

    Args:
        setting: whose backend does it.
        inputs: of a variable-length problem.
        page_size: rows of a page.
        packed: whether queries are; else each sequence has as many.
        seed: of the order of the pages, and how many more there are than it takes.
    """
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    table = _table(cu_k, page_size, seed)
    k, v = (_pool(each.detach(), cu_k, table, page_size) for each in (inputs.k, inputs.v))
    q = inputs.q.detach()
    if not packed:
        q = q.reshape(table.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    with torch.no_grad():
        out, lse, _ = tilewise.attention_paged(
            q,
            k,
            v,
            table,
            cu_k.diff(),
            cu_q if packed else None,
            mask=inputs.mask,
            return_lse=True,
            backend=setting.backend,
        )
    if not packed:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return {"out": out, "lse": lse}


def _table(cu_seqlens: Tensor, page_size: int, seed: int) -> Tensor:
    """Every sequence's pages, any order; -1 where it has none. There are ``seed`` pages more."""
    counts = [-(-length // page_size) for length in cu_seqlens.diff().tolist()]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts) + seed, generator=generator).tolist()
    table = torch.full((len(counts), max(counts) + seed), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for slot in range(count):
            table[b, slot] = order.pop()
    return table.to(cu_seqlens.device)


def _pool(rows: Tensor, cu_seqlens: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Pages [pages, Hk, page_size, width] of packed rows [Tk, Hk, width], as caches hold them."""
    held = int(table.max()) + 1
    pool = rows.new_full((held, page_size, *rows.shape[1:]), math.nan)
    starts = cu_seqlens.tolist()
    for b, own in enumerate(table.tolist()):
        for slot, first in enumerate(range(starts[b], starts[b + 1], page_size)):
            piece = rows[first : min(first + page_size, starts[b + 1])]
            pool[own[slot], : piece.shape[0]] = piece
    return pool.transpose(1, 2)
