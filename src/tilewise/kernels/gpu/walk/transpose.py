"""Transpose values for matrix units that take float8 only along the keys.

The product P V sums over keys. For 16-bit types, matrix units and their loads can transpose a tile
of values on the way. For 8 bits most of them cannot, and a walk over the keys would transpose byte
by byte for every tile of queries. So the values are laid out key by key once, before the walk. This
takes as much memory as they do, and a fraction of a percent of the walk's time with thousands of
queries.

A sequence of a packed call begins at a multiple of 16. Behind the last key there is room for a
block, so blocks can be read whole. Do not use the contents of that room.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewise.kernels.gpu.config import FAMILIES, Blocks, padded
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.walk.tiles import (
    head_of,
    head_strides,
    launch_of,
    line_place,
    load_tile,
    programs_of,
    slots_of,
    store_tile,
)
from tilewise.problem import Operands, Problem

_ROWS = 64  # keys that a program transposes
_ALIGNED = tl.constexpr(16)


def wants_transposed(fp8: str, family: str) -> bool:
    """Return whether to transpose values: for float8, but not on Blackwell, which takes both."""
    return fp8 in ("short", "whole") and FAMILIES[family].unit != "tcgen05"


@triton.jit
def begin_transposed(begin, b):
    """Where the transposed values of sequence ``b`` begin, whose keys do so at ``begin``."""
    return (begin // _ALIGNED + b) * _ALIGNED


@triton.jit(do_not_specialize=["batch", "heads", "keys", "slots"])
def transpose_kernel(
    v,
    transposed,
    cu_k,
    v_strides,
    transposed_strides,
    batch,
    heads,
    keys,
    slots,
    DV: tl.constexpr,
    DV_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A tile of values of one head, from its rows to where the keys are next to one another."""
    program = tl.program_id(0)
    slot, line = program % slots, program // slots
    b, h, begin, _, _, N, n0 = line_place(
        slot, line, (cu_k, cu_k, None), batch, heads, keys, keys, BLOCK, True
    )
    begin_there = begin
    if cu_k is not None:
        begin_there = begin_transposed(begin, b)
    if n0 >= N:
        return
    here = head_of(v, v_strides, b, h, begin)
    there = head_of(transposed, transposed_strides, b, h, begin_there)
    tile = load_tile(here, n0, v_strides, 0, N, BLOCK, DV, DV_PADDED, True, False)
    end = (N + _ALIGNED - 1) // _ALIGNED * _ALIGNED
    store_tile(there, n0, transposed_strides, end, tile, BLOCK, DV, DV_PADDED)


def transpose_values(
    problem: Problem, operands: Operands, blocks: Blocks
) -> tuple[Operands, list[Launch]]:
    """Return the operands with their values transposed, and what transposes them.

    Args:
        problem: what to compute, of a type of 8 bits.
        operands: with what.
        blocks: of the walk that will read them.
    """
    v = operands.v
    aligned = -(-problem.keys // _ALIGNED.value) * _ALIGNED.value
    if problem.layout == "dense":
        length = -(-aligned // blocks.keys) * blocks.keys
        transposed = v.new_empty((*v.shape[:2], v.shape[3], length)).transpose(2, 3)
    else:
        length = aligned + _ALIGNED.value * problem.batch + blocks.keys
        transposed = v.new_empty((*v.shape[1:], length)).permute(2, 0, 1)
    slots = slots_of(problem, problem.keys, _ROWS)
    arguments = {
        "v": v.view(torch.uint8),
        "transposed": transposed.view(torch.uint8),
        "cu_k": operands.cu_seqlens_k,
        "v_strides": head_strides(v, problem),
        "transposed_strides": head_strides(transposed, problem),
        "batch": problem.batch,
        "heads": problem.kv_heads,
        "keys": problem.keys,
        "slots": slots,
    }
    constants = {
        "DV": problem.value_dim,
        "DV_PADDED": padded(problem.value_dim),
        "BLOCK": _ROWS,
    }
    grid = (programs_of(problem, problem.kv_heads, slots),)
    launch = launch_of(transpose_kernel, grid, arguments, constants, Blocks(_ROWS, _ROWS, 4, 1))
    return operands._replace(v=transposed), [launch]
