"""Gradients of captured tensors: for each element, the sum over the pairs that load it.

A pair's share is ``ds * d score / d load``. The indices of the load decide how the shares are
summed. Each way makes the same sums in the same order, or in integers, so every run gives the same
bits:

* by m and n themselves (a dense bias): a program owns a tile of the tensor and walks over the batch
  items and heads that it is broadcast over;
* by m or n alone, or neither: a program adds up a line of pairs in double precision, and a second
  kernel the lines;
* by pairs, and the tensor is small: a program adds up the shares of its rows by element, and a
  second kernel what the programs found;
* anything else: shares that must go to the same element are added up first: all of a row of pairs,
  of a column or of a diagonal (``m - n`` constant). The rest is added atomically, as 64-bit
  integers, whose sum does not depend on its order. Their unit is 2**-60 of a power of two above the
  sum of all absolute values, so they cannot overflow.

A share that is not finite makes a whole gradient of the last kind NaN.

Along a row ``ds = p * (dP - shift)``. The rounding of ``shift`` has one sign along the whole row. A
sum over the row would grow by that rounding times ``sum(p * d score / d load)``. But the exact sum
of ``ds`` is known. It is ``due``: the gradient of the row's lse, less the sink's part. So

    sum(ds * factor) - (sum(ds) - due) * sum(p * factor)

gives the sums of rows, as if the shift had been summed from the very p and dP of the walk. Of rows
with keys elsewhere (``Needs.partial``) no sum is known, and they are not corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import triton
from torch import Tensor

from tilewise.kernels.gpu import Launch
from tilewise.kernels.gpu.backward import Backward
from tilewise.kernels.gpu.backward.shares import (
    diagonal_kernel,
    fold_kernel,
    line_kernel,
    pair_kernel,
)
from tilewise.kernels.gpu.backward.spread import (
    element_kernel,
    factor_kernel,
    fold_table_kernel,
    number_kernel,
    spread_lines_kernel,
)
from tilewise.kernels.gpu.config import Blocks
from tilewise.kernels.gpu.walk.lists import tile_lists
from tilewise.kernels.gpu.walk.tiles import launch_of, lists_of, programs_of, slots_of
from tilewise.problem import Problem
from tilewise.variants.expr import Expr, Node

_LINE = 128
_WIDE = 128  # columns, above which blocks have fewer queries; above half of it, fewer keys
_ELEMENTS = 1024
_SMALL = 64  # elements of a table that has sums of its own in every program
# All pairs of a row, a column, or a diagonal load the same element; or nothing is known.
_Lines: TypeAlias = Literal["rows", "columns", "diagonals", "pairs"]


class Form(NamedTuple):
    """Form of a load's indices.

    Args:
        lines: pairs that load the same element, in one head of one batch item. Where it depends
            on neither position, ``rows``.
        axes: of each of "bhmn" that indexes a dimension by itself, the dimension; None if an index
            is anything else. The dimension is as long as the call needs, or longer.
    """

    lines: _Lines
    axes: dict[str, int] | None


class _Positions(NamedTuple):
    """Dependence of a value on m and n.

    Args:
        lines: the pairs for which it is the same; None for all of them.
        slopes: of ``slopes[0] * m + slopes[1] * n + something else``, or None.
    """

    lines: _Lines | None
    slopes: tuple[int, int] | None


def form_of(indices: Expr, shape: Sequence[int], problem: Problem, *, fits: bool) -> Form:
    """Return the form of a load.

    Args:
        indices: its indices before clamping, one per dimension.
        shape: of the tensor; an index into a dimension of size 1 does not matter.
        problem: with the sizes of the call.
        fits: whether the tensor was lowered to fit the longest sequence.
    """
    places = [(dim, place) for dim, place in enumerate(indices.outputs) if shape[dim] != 1]
    known = _positions(indices.nodes)
    lines: _Lines | None = None
    for _, place in places:
        lines = _joined(lines, known[place].lines)
    if lines == "diagonals" and problem.layout == "varlen":
        lines = "pairs"
    least = {"b": problem.batch, "h": problem.heads, "m": problem.queries, "n": problem.keys}
    axes: dict[str, int] = {}
    for dim, place in places:
        leaf = indices.nodes[place].op
        if leaf not in least or leaf in axes:
            return Form(lines or "rows", None)
        exact = leaf in "bh" and shape[dim] == least[leaf]
        long_enough = leaf in "mn" and (
            fits if problem.layout == "varlen" else shape[dim] >= least[leaf]
        )
        if not exact and not long_enough:
            return Form(lines or "rows", None)
        axes[leaf] = dim
    return Form(lines or "rows", axes)


def _positions(nodes: Sequence[Node]) -> list[_Positions]:
    """Return how each node depends on the positions."""
    found: list[_Positions] = []
    for node in nodes:
        args = [found[arg] for arg in node.args]
        slopes = _slopes(nodes, node, args)
        if slopes is not None:
            found.append(_Positions(_lines(*slopes), slopes))
            continue
        lines: _Lines | None = "pairs" if node.op == "s" else None
        for arg in args:
            lines = _joined(lines, arg.lines)
        found.append(_Positions(lines, None if lines else (0, 0)))
    return found


def _slopes(
    nodes: Sequence[Node], node: Node, args: Sequence[_Positions]
) -> tuple[int, int] | None:
    if node.op in "mn":
        return (1, 0) if node.op == "m" else (0, 1)
    slopes = [arg.slopes for arg in args]
    match node.op, slopes:
        case "add", [(a, b), (c, d)]:
            return a + c, b + d
        case "sub", [(a, b), (c, d)]:
            return a - c, b - d
        case "neg", [(a, b)]:
            return -a, -b
        case "mul", [(a, b), (c, d)]:
            for place, (x, y) in zip(node.args, ((c, d), (a, b)), strict=True):
                value = nodes[place].value
                if nodes[place].op == "const_int" and value is not None:
                    return int(value) * x, int(value) * y
    return None


def _lines(by_m: int, by_n: int) -> _Lines | None:
    if by_m == -by_n:
        return "diagonals" if by_m else None
    if by_n == 0:
        return "rows"
    return "columns" if by_m == 0 else "pairs"


def _joined(one: _Lines | None, other: _Lines | None) -> _Lines | None:
    if one is None or other is None:
        return one or other
    return one if one == other else "pairs"


class _Load(NamedTuple):
    """One load of the score, and where its gradient goes.

    Args:
        by_load: the derivative of the score with respect to it.
        index: which element it is.
        form: how that is indexed.
        out: the gradient of the tensor, contiguous.
        add: whether to add to what is there.
    """

    by_load: Any
    index: Any
    form: Form
    out: Tensor
    add: bool


class _Captured:
    """Makes the launches of one backward pass."""

    def __init__(self, call: Backward) -> None:
        self.call = call
        self.due = 0 if call.needs.partial else call.due_plane
        self.problem = call.problem
        self.blocks = _blocks(call)
        self.lists: dict[bool, tuple[Any, ...]] = {}

    def launches(self, load: _Load) -> list[Launch]:
        """Return the launches of one load."""
        axes = load.form.axes
        if axes is not None and {"m", "n"} <= axes.keys():
            return [self._pairs(load, axes)]
        if axes is not None:
            by_keys = "n" in axes
            sums, launch = self._sums_of_lines(load, by_keys)
            return [launch, self._fold(load, axes, sums, by_keys)]
        if load.form.lines == "pairs" and load.out.numel() <= _SMALL:
            return self._small_table(load)
        return self._spread(load)

    def _walk(
        self, load: _Load, blocks: Blocks, **arguments: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments and constants of every walk."""
        constants = {
            "SCORE": self.call.variant.score,
            "FACTOR": load.by_load,
            "SEEN": self.call.variant.seen,
            "FORM": self.call.form("dq", blocks),
        }
        return self.call.arguments() | arguments, constants

    def _walk_along(
        self, load: _Load, blocks: Blocks, by_keys: bool, **arguments: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As ``_walk``, of a walk along rows or columns: with the tiles that it meets."""
        problem, variant = self.problem, self.call.variant
        if by_keys not in self.lists:
            queries, keys, *_ = self.blocks
            found = tile_lists(problem, self.call.operands, variant.tables, queries, keys, by_keys)
            self.lists[by_keys] = lists_of(found)
        walk = self._walk(load, blocks, lists=self.lists[by_keys], **arguments)
        walk[1]["RANGE"] = variant.queries_of if by_keys else variant.keys_of
        return walk

    def _by_element(
        self, load: _Load, blocks: Blocks, table: int = 0, **arguments: Any
    ) -> tuple[tuple[int], dict[str, Any], dict[str, Any]]:
        """(grid, arguments, constants) of ``element_kernel``."""
        problem = self.problem
        tiles = slots_of(problem, problem.queries, blocks.queries)
        nothing: dict[str, Any] = {"totals": None, "fixed": None, "factors": None, "elements": None}
        arguments, constants = self._walk_along(
            load, blocks, False, tiles=tiles, **nothing | arguments
        )
        constants |= {"INDEX": load.index, "TABLE": table}
        return (programs_of(problem, problem.heads, tiles),), arguments, constants

    def _pairs(self, load: _Load, axes: dict[str, int]) -> Launch:
        arguments, constants = self._walk(load, self.blocks)
        rows, columns = (load.out.shape[axes[name]] for name in "mn")
        row_tiles = -(-rows // self.blocks.queries)
        column_tiles = -(-columns // self.blocks.keys)
        arguments |= {
            "out": load.out,
            "out_strides": _strides(load.out, axes, "bhmn"),
            "rows": rows,
            "columns": columns,
            "row_tiles": row_tiles,
            "column_tiles": column_tiles,
        }
        constants |= _kept(axes) | {"ADD": load.add}
        programs = row_tiles * column_tiles * self._owners(axes)
        return launch_of(pair_kernel, (programs,), arguments, constants, self.blocks)

    def _owners(self, axes: dict[str, int]) -> int:
        """Return how many batch items and heads have elements of their own."""
        count = self.problem.batch if "b" in axes else 1
        return count * (self.problem.heads if "h" in axes else 1)

    def _sums_of_lines(self, load: _Load, by_keys: bool) -> tuple[Tensor, Launch]:
        """Room for the sums of rows or columns, [B, Hq, S] or packed [Hq, T], and what fills it."""
        problem, blocks = self.problem, self.blocks
        length = problem.keys if by_keys else problem.queries
        outer = (problem.batch,) if problem.layout == "dense" else ()
        shape = (*outer, problem.heads, length)
        sums = torch.empty(shape, dtype=torch.float64, device=load.out.device)
        tiles = slots_of(problem, length, blocks.keys if by_keys else blocks.queries)
        arguments, constants = self._walk_along(
            load, blocks, by_keys, sums=sums, sum_strides=_line_strides(sums), tiles=tiles
        )
        constants |= {"BY_KEYS": by_keys, "DUE": self.due}
        grid = (programs_of(problem, problem.heads, tiles),)
        return sums, launch_of(line_kernel, grid, arguments, constants, blocks)

    def _fold(self, load: _Load, axes: dict[str, int], sums: Tensor, by_keys: bool) -> Launch:
        problem, operands = self.problem, self.call.operands
        name = "n" if by_keys else "m"
        out_length = load.out.shape[axes[name]] if name in axes else 1
        blocks = -(-out_length // _LINE)
        strides = _strides(load.out, axes, "bh" + name)
        arguments = {
            "sums": sums,
            "sum_strides": _line_strides(sums),
            "out": load.out,
            "out_strides": strides,
            "cu": operands.cu_seqlens_k if by_keys else operands.cu_seqlens_q,
            "batch": problem.batch,
            "heads": problem.heads,
            "length": problem.keys if by_keys else problem.queries,
            "out_length": out_length,
            "blocks": blocks,
        }
        constants = _kept(axes) | {"KEEP_I": name in axes, "BLOCK": _LINE, "ADD": load.add}
        return launch_of(fold_kernel, (blocks * self._owners(axes),), arguments, constants)

    def _small_table(self, load: _Load) -> list[Launch]:
        elements = load.out.numel()
        table = max(16, triton.next_power_of_2(elements))
        # Of few warps, each thread has more of a tile than it has registers for beside the sums.
        blocks = self.blocks._replace(warps=max(self.blocks.warps, 8))
        grid, arguments, constants = self._by_element(load, blocks, table, elements=elements)
        sums = torch.empty((*grid, table), dtype=torch.float64, device=load.out.device)
        walk = launch_of(element_kernel, grid, arguments | {"totals": sums}, constants, blocks)
        arguments = {"sums": sums, "out": load.out, "programs": grid[0], "elements": elements}
        constants = {"TABLE": table, "BLOCK": _ELEMENTS, "ADD": load.add}
        return [walk, launch_of(fold_table_kernel, (elements,), arguments, constants)]

    def _spread(self, load: _Load) -> list[Launch]:
        """Sums of lines, where they help, and then integers that are added atomically."""
        device = load.out.device
        fixed = torch.zeros(load.out.numel(), dtype=torch.int64, device=device)
        factors = torch.empty(2, dtype=torch.float32, device=device)
        launches, spread = self._spreading(load)
        kernel, grid, arguments, constants, blocks = spread
        totals = torch.empty(max(grid[0], 1), dtype=torch.float64, device=device)
        first = arguments | {"totals": totals, "fixed": None, "factors": None}
        second = arguments | {"totals": None, "fixed": fixed, "factors": factors}
        launches.append(launch_of(kernel, grid, first, constants, blocks))
        counted = {"totals": totals, "factors": factors, "count": grid[0]}
        launches.append(launch_of(factor_kernel, (1,), counted, {"BLOCK": _ELEMENTS}))
        launches.append(launch_of(kernel, grid, second, constants, blocks))
        launches.append(_number_launch(fixed, factors, load.out, load.add))
        return launches

    def _spreading(self, load: _Load) -> tuple[list[Launch], tuple[Any, ...]]:
        """(launches before it, the parts of the launch that spreads)."""
        problem, lines = self.problem, load.form.lines
        if lines == "pairs":
            return [], (element_kernel, *self._by_element(load, self.blocks), self.blocks)
        by_keys = lines == "columns"
        if lines == "diagonals":
            sums, launch, size, count = self._sums_of_diagonals(load)
            column_tiles = -(-problem.keys // size)
            origin = column_tiles * size - 1
            length = problem.queries + origin if problem.queries and problem.keys else 0
        else:
            sums, launch = self._sums_of_lines(load, by_keys)
            size = origin = count = 0
            length = problem.keys if by_keys else problem.queries
        tiles = slots_of(problem, length, _LINE)
        arguments = {
            "sums": sums,
            "sum_strides": _line_strides(sums),
            "captured": self.call.captured(),
            "starts": self.call.starts(),
            "batch": problem.batch,
            "heads": problem.heads,
            "queries": problem.queries,
            "keys": problem.keys,
            "tiles": tiles,
            "origin": origin,
            "diagonals": count,
        }
        constants = {"INDEX": load.index, "BY_KEYS": by_keys, "DIAGONAL": size, "BLOCK": _LINE}
        grid = (programs_of(problem, problem.heads, tiles),)
        return [launch], (spread_lines_kernel, grid, arguments, constants, None)

    def _sums_of_diagonals(self, load: _Load) -> tuple[Tensor, Launch, int, int]:
        """Room for the sums of diagonals, what fills it, and the size and number of its tiles."""
        problem = self.problem
        size = self.blocks.keys
        blocks = self.blocks._replace(queries=size)
        row_tiles, column_tiles = -(-problem.queries // size), -(-problem.keys // size)
        tiles = max(row_tiles + column_tiles - 1, 0) if row_tiles and column_tiles else 0
        shape = (problem.batch, problem.heads, tiles, 2 * size)
        sums = torch.empty(shape, dtype=torch.float64, device=load.out.device)
        arguments, constants = self._walk(load, blocks, sums=sums, tiles=tiles, row_tiles=row_tiles)
        grid = (programs_of(problem, problem.heads, tiles),)
        launch = launch_of(diagonal_kernel, grid, arguments, constants, blocks)
        return sums, launch, size, tiles


def _blocks(call: Backward) -> Blocks:
    """Return the blocks of dQ, reduced: more is summed, and a branch skips empty tiles."""
    problem = call.problem
    queries, keys, warps, stages = call.config.blocks("dq", problem)
    widest = max(problem.head_dim, problem.value_dim)
    most_queries = 32 if widest > _WIDE else 64
    most_keys = 16 if widest > _WIDE // 2 else 32
    return Blocks(min(queries, most_queries), min(keys, most_keys), warps, min(stages, 2))


def _kept(axes: dict[str, int]) -> dict[str, Any]:
    return {"KEEP_B": "b" in axes, "KEEP_H": "h" in axes}


def _strides(out: Tensor, axes: dict[str, int], names: str) -> tuple[int, ...]:
    return tuple([out.stride(axes[name]) if name in axes else 0 for name in names])


def _line_strides(sums: Tensor) -> tuple[int, int, int]:
    """Return strides along (b, h, line) of sums of lines; of diagonals, along (b, h, tile)."""
    if sums.dim() == 2:
        return 0, sums.stride(0), 1
    return sums.stride(0), sums.stride(1), sums.stride(2)


def _number_launch(fixed: Tensor, factors: Tensor | None, out: Tensor, add: bool) -> Launch:
    """Put numbers into a gradient."""
    count = out.numel()
    arguments = {"fixed": fixed, "factors": factors, "out": out, "count": count}
    constants = {"BLOCK": _ELEMENTS, "ADD": add}
    return launch_of(number_kernel, (-(-count // _ELEMENTS),), arguments, constants)


def captured_launches(call: Backward, grads: tuple[Tensor | None, ...]) -> list[Launch]:
    """Return the launches that make the gradients of what the score captured.

    Args:
        call: the backward pass; the values of its rows are made by earlier launches.
        grads: by slot, contiguous and shaped as the lowered tensor: where they go. Every element
            is written.
    """
    variant, problem, needs = call.variant, call.problem, call.needs
    biases = {instr.slots[0] for instr in problem.score if instr.op == "bias"}
    maker = _Captured(call)
    launches: list[Launch] = []
    for slot, (need, grad) in enumerate(zip(needs.score_tensors, grads, strict=True)):
        if not need or grad is None:
            continue
        places = [place for place, of in enumerate(variant.load_slots) if of == slot]
        several = len(places) != 1  # or none, whose sum is zero
        out = grad
        if several:
            out = torch.zeros(grad.shape, dtype=torch.float64, device=grad.device)
        for place in places:
            form = form_of(variant.load_forms[place], grad.shape, problem, fits=slot in biases)
            load = _Load(variant.loads[place], variant.load_indices[place], form, out, several)
            launches += maker.launches(load)
        if several:
            launches.append(_number_launch(out, None, grad, False))
    return launches
