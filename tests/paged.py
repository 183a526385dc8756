"""Keys and values laid in pages, in a random order, among rows and pages that hold NaN."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.cases import Inputs
from tilewise.problem import Operands, Problem

# What a block table says where a sequence has no keys: nobody may look.
NOBODY = (-1, 2**31 - 1, -(2**31))


class Paged(NamedTuple):
    """The arguments of ``attention_paged`` after q."""

    k_pages: Tensor
    v_pages: Tensor
    block_table: Tensor
    key_lengths: Tensor


def in_pages(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    page_size: int,
    seed: int = 0,
    spare: int = 1,
    rows_first: bool = False,
) -> Paged:
    """Pages of sequences.

    Args:
        keys: [Hk, N, D] of each sequence, at least one.
        values: [Hk, N, Dv] of each.
        page_size: rows of a page.
        seed: of the order of pages.
        spare: pages that nobody has, and slots of the table beyond the longest sequence's.
        rows_first: whether the rows of a page lie one after the other in memory, heads within them.
    """
    counts = [tensor.shape[1] for tensor in keys]
    used = [-(-count // page_size) for count in counts]
    slots, held = max(used) + spare, sum(used) + spare
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(held, generator=generator).tolist()
    table = torch.tensor(NOBODY, dtype=torch.int32).repeat(len(keys), slots)[:, :slots].clone()
    pools = []
    for tensors in (keys, values):
        heads, width = tensors[0].shape[0], tensors[0].shape[2]
        sizes = (held, page_size, heads, width) if rows_first else (held, heads, page_size, width)
        pool = torch.full(sizes, math.nan, dtype=tensors[0].dtype)
        pools.append(pool.transpose(1, 2) if rows_first else pool)
    for index, count in enumerate(used):
        for slot in range(count):
            page = order.pop()
            table[index, slot] = page
            rows = slice(slot * page_size, (slot + 1) * page_size)
            for pool, tensors in zip(pools, (keys, values), strict=True):
                piece = tensors[index][:, rows]
                pool[page, :, : piece.shape[1]] = piece
    return Paged(pools[0], pools[1], table, torch.tensor(counts, dtype=torch.int32))


def paged_problem_of(
    problem: Problem, operands: Operands, paged: Paged
) -> tuple[Problem, Operands]:
    """A packed problem and its operands with their keys in pages."""
    k, v, table, lengths = paged
    problem = problem._replace(keys=table.shape[1] * k.shape[2], page_size=k.shape[2])
    operands = operands._replace(k=k, v=v, cu_seqlens_k=None)
    return problem, operands._replace(block_table=table, key_lengths=lengths)


def sequences_of(inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of each sequence of packed inputs, [Hk, N, D] and [Hk, N, Dv]."""
    assert inputs.cu_seqlens is not None
    starts = inputs.cu_seqlens[1].tolist()
    spans = [slice(*starts[i : i + 2]) for i in range(len(starts) - 1)]
    keys, values = ([x[span].transpose(0, 1) for span in spans] for x in (inputs.k, inputs.v))
    return keys, values
