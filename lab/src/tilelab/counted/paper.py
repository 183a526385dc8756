"""The account of the FlashAttention paper, made again: figure 2 of Dao et al., 2022.

Left of that figure, for GPT-2 medium (N = 1024, d = 64, 16 heads, batch 64, float16, A100), forward
and backward: 40.3 GB of memory traffic for standard attention, 4.4 GB for FlashAttention; 41.7 ms
and 7.3 ms. In its middle: traffic and time of the forward pass against the block of keys. The
conventions that lead to these numbers are in ``docs/io-model.md``.

The asymptotic forms of the paper and lower bounds are in numbers and not bytes, for one head with N
queries and keys of width d, and fast memory of M numbers. ``docs/io-model.md`` derives them.
Theorem and proposition numbers are those of the paper (Dao et al., 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from tilewise import masks
from tilewise.chips import CHIPS
from tilewise.errors import InvalidArgument
from tilewise.plan.traffic import plain, tiled
from tilewise.plan.traffic.count import Seconds, Traffic, predict
from tilewise.plan.traffic.visits import visits_of
from tilewise.problem import Problem

PRINTED = {"standard": (40.3e9, 41.7e-3), "flash": (4.4e9, 7.3e-3)}  # bytes, seconds
CHIP = CHIPS["a100-40gb"]
FIRST_TILE = (16, 256)  # queries and keys of its kernels for d = 64 on this chip
BLOCKS = (64, 128, 256, 512)
_STORED = 2  # bytes of a number of the unfinished output and dQ, as algorithms 1 and 4 have it


def gpt2_medium(mask: bool = True) -> Problem:
    """Return the problem of the figure.

    Its standard attention ran with a causal mask and dropout. In FlashAttention their tiles are
    visited all the same: its kernels of that time skipped none.
    """
    program = masks.causal().program if mask else ()
    dropout_p = 0.1 if mask else 0.0
    sizes = (64, 16, 16, 1024, 1024, 64, 64)
    options = (program, (), 0.125, dropout_p, False)
    return Problem(*sizes, torch.float16, "cuda", "dense", *options)


def standard() -> Traffic:
    """Standard attention, forward and backward: 18 passes over the matrix and 12 over operands."""
    problem = gpt2_medium()
    return plain.forward(problem).plus(plain.backward(problem))


def the_first() -> Traffic:
    """FlashAttention as its first kernels ran: keys outside, delta at the first visit."""
    problem = gpt2_medium(mask=False)
    visited = visits_of(problem, FIRST_TILE)
    forward = tiled.forward_keys_outside(problem, visited, _STORED)
    return forward.plus(tiled.backward_keys_outside(problem, visited, _STORED, "first"))


def ours(tile: tuple[int, int] = (128, 128), mask: bool = False) -> Traffic:
    """The order of this package's GPU backend, as tiles move it.

    Empty tiles of a causal ``mask`` are not visited.
    """
    problem = gpt2_medium(mask)
    visited = visits_of(problem, tile)
    return tiled.forward(problem, visited).plus(tiled.backward_by_tiles(problem, visited))


class At(NamedTuple):
    """The forward pass at one block size."""

    block: int
    traffic: Traffic
    seconds: Seconds


def against_blocks(blocks: Sequence[int] = BLOCKS, keys_outside: bool = True) -> list[At]:
    """Traffic and time of the forward pass against the block that stays in fast memory.

    It is of keys, in FlashAttention's order; with queries outside, FlashAttention-2's, of queries.
    """
    problem, found = gpt2_medium(mask=False), []
    for block in blocks:
        if keys_outside:
            visited = visits_of(problem, (FIRST_TILE[0], block))
            traffic = tiled.forward_keys_outside(problem, visited, _STORED)
        else:
            traffic = tiled.forward(problem, visits_of(problem, (block, FIRST_TILE[0])))
        found.append(At(block, traffic, predict(traffic, CHIP, "float16")))
    return found


def plain_form(length: int, width: int) -> float:
    """N d + N^2: standard attention is in Theta of this (theorem 2)."""
    return length * width + length * length


def tiled_form(length: int, width: int, fast: int) -> float:
    """N^2 d^2 / M: FlashAttention is in Theta of this for d <= M <= N d (theorem 2)."""
    _check(length, width, fast)
    return length * length * width * width / fast


def sparse_form(length: int, width: int, fast: int, density: float) -> float:
    """N d + N^2 d^2 s / M: with a share s of the tiles that is not empty (proposition 4)."""
    if not 0.0 <= density <= 1.0:
        raise InvalidArgument("density", str(density), "a share of the tiles, from 0 to 1")
    return length * width + density * tiled_form(length, width, fast)


def lower_bound(length: int, width: int, fast: int) -> float:
    """Return a lower bound on what exact attention moves: max(4 N d, N^2 d^2 / M - M).

    The first term is its inputs and its output. The second assumes that each score is made of a
    whole row of Q and a whole row of K, both in fast memory at once. Between M transfers, at most 2
    M numbers are ever there. They are a rows of Q and b rows of K with (a + b) d <= 2 M, hence at
    most (M / d)^2 scores.

    Proposition 3 of the paper says that no algorithm is in o(N^2 d^2 / M) for every M. Saha and Ye,
    "The I/O complexity of attention", 2024, show that for M >= d^2 no algorithm does better for any
    M.
    """
    _check(length, width, fast)
    return max(4.0 * length * width, tiled_form(length, width, fast) - fast)


def paper_tiles(width: int, fast: int) -> tuple[int, int]:
    """The tiles of algorithm 1, line 1: B_c = ceil(M / 4 d) keys, B_r = min(B_c, d) queries."""
    _check(1, width, fast)
    keys = math.ceil(fast / (4 * width))
    return min(keys, width), keys


def tiles_for(width: int, fast: int) -> tuple[int, int]:
    """Tiles with queries outside that fill fast memory: m queries by n keys.

    m rows of Q and O, n of K and V and the m x n scores fit into M. The keys are few, at most the
    16 that matrix instructions take, because only queries that stay save anything.
    """
    _check(1, width, fast)
    keys = max(1, min(16, fast // (8 * width)))
    queries = (fast - 2 * keys * width) // (2 * width + keys)
    return max(1, queries), keys


def _check(length: int, width: int, fast: int) -> None:
    for name, size in (("length", length), ("width", width)):
        if size < 1:
            raise InvalidArgument(name, str(size), "at least 1")
    if fast < width:
        raise InvalidArgument(
            "fast", f"{fast} numbers", f"at least one row, {width}", "The forms hold from there on."
        )
