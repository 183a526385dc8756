"""Launches of the Gluon kernels; ``Config.in_groups`` says which calls they serve."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.kernels.gpu.backward.gradients import Backward
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.expressions.variant import Variant, captures
from tilewise.kernels.gpu.forward.arguments import finishing_of
from tilewise.kernels.gpu.hopper.forward import attend_in_groups
from tilewise.kernels.gpu.hopper.keys import keys_in_groups
from tilewise.kernels.gpu.hopper.tiles import GROUPS
from tilewise.kernels.gpu.launch import Launch
from tilewise.kernels.gpu.walk.descriptors import described
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.tiles import (
    launch_of,
    lists_of,
    number_strides,
    programs_of,
    slots_of,
)
from tilewise.problem import Operands, Problem, Result

_KINDS = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
_WARPS = 4  # of a group: the kernels add the other group and the warp that loads


class Form(NamedTuple):
    """The constants of ``attend_in_groups``: see ``forward.arguments.Form``.

    Args:
        D: the width of queries, keys and values.
        BM, BN: queries and keys of a tile.
        STAGES: tiles in a ring of shared memory.
        FOLDED: scores are kept in units of the bare product q.k.
        REVERSED: the last tiles come first.
        LISTED: tiles are listed, see ``walk.lists``.
    """

    D: int
    BM: int
    BN: int
    STAGES: int
    FOLDED: bool
    REVERSED: bool
    LISTED: bool


class KeyForm(NamedTuple):
    """The constants of ``keys_in_groups``: see ``backward.gradients.Form``; the last as above."""

    BLOCK_M: int
    BLOCK_N: int
    HEAD_DIM: int
    STAGES: int
    LISTED: bool
    FOLD: bool = True
    DROPOUT: bool = False
    ENTROPY: bool = False


class Captured(NamedTuple):
    """The part of a ``backward.gradients.Call`` that ``pair_gradients`` reads."""

    captured: tuple[Any, ...]


def attend_launch(
    problem: Problem,
    operands: Operands,
    result: Result,
    variant: Variant,
    blocks: Blocks,
    section: int,
    grows: bool,
) -> Launch | None:
    """Return the launch of the forward pass; None where a tensor can have no descriptor.

    Args:
        problem: what to compute.
        operands: with what.
        result: with memory for everything that is wanted.
        variant: the functions of the problem's mask and score.
        blocks: of ``Config.in_groups``.
        section: lines of a section of the grid, see ``attend.slot_of``.
        grows: whether the last tiles have the most keys.
    """
    half = blocks.queries // GROUPS.value
    tiles = (
        ("q_rows", operands.q, half),
        ("k_rows", operands.k, blocks.keys),
        ("v_rows", operands.v, blocks.keys),
        ("out_rows", result.out, half),
    )
    rows = _rows(tiles, problem)
    if rows is None:
        return None
    slots = slots_of(problem, problem.queries, blocks.queries)
    lists = tile_lists(problem, operands, variant.tables, blocks.queries, blocks.keys)
    arguments = {
        **rows,
        "outputs": (result.lse, result.stats[0], result.stats[1]),
        "sinks": operands.sinks,
        "lists": lists_of(lists),
        "captured": tuple(captures(operands.mask_tensors)),
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": slots,
        "section": section,
        "lines": problem.heads * problem.batch,
        "scale": problem.scale,
    }
    folded = finishing_of(problem, operands, variant)["FOLDED"]
    sizes = (problem.head_dim, blocks.queries, blocks.keys, blocks.stages)
    constants = {
        "SEEN": variant.seen,
        "KEYS_OF": variant.keys_of,
        "FORM": Form(*sizes, folded, grows, lists is not None),
    }
    grid = (programs_of(problem, problem.heads, slots),)
    return _in_groups(launch_of(attend_in_groups, grid, arguments, constants))


def key_launch(call: Backward, grad_k: Tensor, grad_v: Tensor, blocks: Blocks) -> Launch | None:
    """Return the launch of dK and dV; None where a tensor can have no descriptor.

    Args:
        call: what all walks of the backward are given.
        grad_k: where the gradient of the keys goes.
        grad_v: where that of the values goes.
        blocks: of ``Config.in_groups``.
    """
    problem, operands, variant = call.problem, call.operands, call.variant
    half = blocks.keys // GROUPS.value
    tiles = (
        ("q_rows", operands.q, blocks.queries),
        ("k_rows", operands.k, half),
        ("v_rows", operands.v, half),
        ("grad_rows", call.upstream.out, blocks.queries),
        ("grad_k_rows", grad_k, half),
        ("grad_v_rows", grad_v, half),
    )
    rows = _rows(tiles, problem)
    if rows is None:
        return None
    slots = slots_of(problem, problem.keys, blocks.keys)
    sides = blocks.queries, blocks.keys
    lists = tile_lists(problem, operands, variant.tables, *sides, by_keys=True)
    arguments = {
        **rows,
        "rows": call.rows,
        "row_strides": number_strides(call.rows[0], problem),
        "lists": lists_of(lists),
        "heads": problem.heads,
        "group": problem.heads // problem.kv_heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": slots,
        "plane": call.rows[0].numel(),
        "scale": problem.scale,
        "call": Captured(call.captured()),
    }
    constants = {
        "SEEN": variant.seen,
        "SCORE": variant.score,
        "GAIN": variant.gain,
        "QUERIES_OF": variant.queries_of,
        "FORM": KeyForm(*sides, problem.head_dim, blocks.stages, lists is not None),
    }
    grid = (programs_of(problem, problem.kv_heads, slots),)
    return _in_groups(launch_of(keys_in_groups, grid, arguments, constants))


def _rows(
    tiles: Iterable[tuple[str, Tensor, int]], problem: Problem
) -> dict[str, TensorDescriptor] | None:
    """Return descriptors of tiles [1, 1, rows, D] by name, or None if a tensor can have none."""
    found = {}
    for name, tensor, rows in tiles:
        parts = described(tensor, problem, rows)
        if parts is None or tensor.dtype not in _KINDS:
            return None
        layout = gl.NVMMASharedLayout.get_default_for(parts.block, _KINDS[tensor.dtype])
        found[name] = TensorDescriptor(tensor, parts.sizes, parts.steps, parts.block, layout)
    return found


def _in_groups(launch: Launch) -> Launch:
    return launch._replace(warps=_WARPS, stages=1)
