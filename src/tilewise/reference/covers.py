"""The table of a mask: of every rectangle of pairs whether it is empty, partial or full.

By evaluating every pair, a strip of keys at a time: memory O(rows of a rectangle x strip), exact
and slow.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Block, cut
from tilewise.reference.programs import visible
from tilewise.variants.lower import statistics_dtype

_STRIP = 8192  # keys, at least, that are evaluated at once


class Grid(NamedTuple):
    """Rectangles of queries x keys.

    Args:
        block_queries, block_keys: the size of one.
        batches, heads: how many batch items and heads are asked for; 1 where one serves all.
        rows, columns: how many there are along the queries and keys (of the longest sequence).
    """

    block_queries: int
    block_keys: int
    batches: int
    heads: int
    rows: int
    columns: int


def covers(problem: Problem, operands: Operands, grid: Grid) -> Tensor:
    """Return whether the mask hides all (0), some (1) or none (2) of the pairs of each rectangle.

    Args:
        problem: with the mask.
        operands: its captured tensors, and the lengths of a variable-length call.
        grid: the rectangles.

    Returns:
        uint8 [grid.batches, grid.heads, grid.rows, grid.columns]; 0 past the end of a sequence.
    """
    device = operands.q.device
    table = torch.zeros(grid[2:], dtype=torch.uint8, device=device)
    if operands.cu_seqlens_q is None or operands.cu_seqlens_k is None:
        _fill(table, problem, operands.mask_tensors, grid, range(grid.batches))
        return table
    counts = [cu.diff().tolist() for cu in (operands.cu_seqlens_q, operands.cu_seqlens_k)]
    for b, (queries, keys) in enumerate(zip(*counts, strict=True)):
        part = problem._replace(batch=1, queries=queries, keys=keys)
        tensors = cut(problem.mask, operands.mask_tensors, b, queries, keys)
        _fill(table[b : b + 1], part, tensors, grid, range(b, b + 1))
    return table


def _fill(
    table: Tensor, problem: Problem, tensors: tuple[Tensor, ...], grid: Grid, batches: range
) -> None:
    strip = -(-_STRIP // grid.block_keys) * grid.block_keys
    for row in range(-(-problem.queries // grid.block_queries)):
        first = row * grid.block_queries
        queries = range(first, min(first + grid.block_queries, problem.queries))
        for start in range(0, problem.keys, strip):
            keys = range(start, min(start + strip, problem.keys))
            floats = statistics_dtype(problem.dtype)
            heads = range(grid.heads)
            block = Block(queries, keys, problem.queries, problem.keys, batches, heads, floats)
            seen = visible(problem.mask, tensors, block, table.device)
            column = start // grid.block_keys
            part = _of_pairs(seen, grid.block_keys)
            table[:, :, row, column : column + part.shape[-1]] = part


def _of_pairs(seen: Tensor, size: int) -> Tensor:
    """uint8 [B|1, H|1, columns] of bool [B|1, H|1, m, n]."""
    some, every = seen.any(2), seen.all(2)
    shape = (*some.shape[:2], -1, size)
    missing = -some.shape[-1] % size
    some = torch.nn.functional.pad(some, (0, missing), value=False).view(shape)
    every = torch.nn.functional.pad(every, (0, missing), value=True).view(shape)
    table: Tensor = some.any(-1).to(torch.uint8) + every.all(-1).to(torch.uint8)
    return table
