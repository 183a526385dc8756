"""Mask and score programs evaluated on a block of queries and keys.

A block is a rectangle of the score matrix: ``queries`` x ``keys`` of one sequence pair, for all
batch entries and heads at once. Masks give a boolean block, or only its three-valued cover
(empty, partial, full), found without visiting its elements; scores are applied to a block and
differentiated through it. ``covers`` makes the table of a mask: of every rectangle of pairs whether
it is empty, partial or full. ``check_indices`` looks at the indices of masks and scores, for every
pair that attends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.problem import Operands, Problem
from tilewise.reference import expressions
from tilewise.reference.blocks import Block, Part, cut, multiplied, of_keys, parts, sum_to
from tilewise.variants.expr import Expr, Graph, decode
from tilewise.variants.graphs import user_indices
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.program import BY_USER, EXPR, Instr, Number, Program


class Cover(Enum):
    """What a mask leaves of a block: nothing, some pairs, or all of them."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


def _positions(block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
    rows = torch.arange(block.queries.start, block.queries.stop, device=device)
    columns = torch.arange(block.keys.start, block.keys.stop, device=device)
    return rows[:, None], columns


def _cut4(tensor: Tensor, block: Block) -> Tensor:
    """Return the block of a 4-D tensor whose last two dimensions may be broadcast (size 1)."""
    rows = slice(block.queries.start, block.queries.stop) if tensor.size(2) > 1 else slice(None)
    columns = slice(block.keys.start, block.keys.stop) if tensor.size(3) > 1 else slice(None)
    return tensor[:, :, rows, columns]


def _unknown(instr: Instr, kind: str) -> Unsupported:
    return Unsupported(f"{kind}: the reference knows no operation {instr.op!r}")


def visible(
    program: Program, tensors: Sequence[Tensor], block: Block, device: torch.device
) -> Tensor:
    """Return which pairs of a block attend.

    The empty program lets everything through. ``tensors`` are those that it captured, as
    ``mask_tensors`` of ``tilewise.problem.Operands``.

    Returns:
        bool, broadcastable to ``[B, Hq, len(queries), len(keys)]``, full in its last two sizes.
    """
    rows, columns = _positions(block, device)
    full = torch.ones(1, 1, len(block.queries), len(block.keys), dtype=torch.bool, device=device)
    stack: list[Tensor] = []
    for instr in program:
        if instr.op == "band":
            left, right, anchor = (int(p) for p in instr.params)
            offset = columns - rows - (block.total_keys - block.total_queries if anchor else 0)
            inside = full
            if left >= 0:
                inside = inside & (offset >= -left)
            if right >= 0:
                inside = inside & (offset <= right)
            stack.append(inside)
        elif instr.op == "below":
            bound = tensors[instr.slots[0]] if instr.slots else torch.tensor(instr.params)
            stack.append(columns < bound.to(device).view(-1, 1, 1, 1))
        elif instr.op == "same_document":
            ids_q, ids_k = (tensors[slot] for slot in instr.slots)
            ids_q = ids_q[:, None, block.queries.start : block.queries.stop, None]
            stack.append(ids_q == ids_k[:, None, None, block.keys.start : block.keys.stop])
        elif instr.op == "dense":
            stack.append(_cut4(tensors[instr.slots[0]], block))
        elif instr.op == "blocks":
            across, along = (int(size) for size in instr.params)
            stack.append(tensors[instr.slots[0]][:, :, rows // across, columns // along])
        elif instr.op == "tiles":
            continue
        elif instr.op == EXPR:
            stack.append(expressions.visible(instr, tensors, block, device))
        elif instr.op == "not":
            stack.append(~stack.pop())
        elif instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(first & second if instr.op == "and" else first | second)
        else:
            raise _unknown(instr, "mask")
    return stack.pop() & full if stack else full


class _Possible(NamedTuple):
    """Flags: whether any pair of a block may be visible, and whether any may be hidden."""

    seen: bool
    hidden: bool


def _band_possible(params: Sequence[Number], block: Block) -> _Possible:
    left, right, anchor = (int(p) for p in params)
    shift = block.total_keys - block.total_queries if anchor else 0
    low = block.keys.start - (block.queries.stop - 1) - shift
    high = block.keys.stop - 1 - block.queries.start - shift
    misses_left = left >= 0 and high < -left
    misses_right = right >= 0 and low > right
    cuts_left = left >= 0 and low < -left
    cuts_right = right >= 0 and high > right
    return _Possible(not (misses_left or misses_right), cuts_left or cuts_right)


def _document_possible(ids_q: Tensor, ids_k: Tensor, block: Block) -> _Possible:
    ids_q = ids_q[:, block.queries.start : block.queries.stop]
    ids_k = ids_k[:, block.keys.start : block.keys.stop]
    (q_low, q_high), (k_low, k_high) = ids_q.aminmax(dim=1), ids_k.aminmax(dim=1)
    overlap = (q_low <= k_high) & (k_low <= q_high)
    same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
    return _Possible(bool(overlap.any()), not bool(same.all()))


def _table_possible(instr: Instr, tensors: Sequence[Tensor], block: Block, full: int) -> _Possible:
    across, along = (int(size) for size in instr.params[:2])
    rows = slice(block.queries.start // across, (block.queries.stop - 1) // across + 1)
    columns = slice(block.keys.start // along, (block.keys.stop - 1) // along + 1)
    piece = tensors[instr.slots[0]][:, :, rows, columns]
    return _Possible(bool((piece != 0).any()), bool((piece != full).any()))


def cover(program: Program, tensors: Sequence[Tensor], block: Block) -> Cover:
    """Return whether a mask keeps nothing, something or everything of a (non-empty) block.

    Leaves are decided by interval arithmetic (band, below, same_document, expr) or by any/all
    (dense). Connectives combine the answers by Kleene's logic. So PARTIAL may be returned for a
    block that is in truth empty or full, but never the other way round. One answer serves all batch
    entries and heads.
    """
    stack: list[_Possible] = []
    for instr in program:
        if instr.op == "band":
            stack.append(_band_possible(instr.params, block))
        elif instr.op == "below":
            bound = tensors[instr.slots[0]] if instr.slots else torch.tensor(instr.params)
            low, high = int(bound.min()), int(bound.max())
            stack.append(_Possible(block.keys.start < high, block.keys.stop > low))
        elif instr.op == "same_document":
            ids_q, ids_k = (tensors[slot] for slot in instr.slots)
            stack.append(_document_possible(ids_q, ids_k, block))
        elif instr.op == "dense":
            piece = _cut4(tensors[instr.slots[0]], block)
            stack.append(_Possible(bool(piece.any()), not bool(piece.all())))
        elif instr.op == "blocks":
            stack.append(_table_possible(instr, tensors, block, full=1))
        elif instr.op == "tiles":
            known, before = _table_possible(instr, tensors, block, full=2), stack.pop()
            stack.append(_Possible(known.seen and before.seen, known.hidden and before.hidden))
        elif instr.op == EXPR:
            proven = expressions.proven(instr, tensors, block)
            stack.append(_Possible(proven is not False, proven is not True))
        elif instr.op == "not":
            seen, hidden = stack.pop()
            stack.append(_Possible(hidden, seen))
        elif instr.op == "and":
            second, first = stack.pop(), stack.pop()
            stack.append(_Possible(first.seen and second.seen, first.hidden or second.hidden))
        elif instr.op == "or":
            second, first = stack.pop(), stack.pop()
            stack.append(_Possible(first.seen or second.seen, first.hidden and second.hidden))
        else:
            raise _unknown(instr, "mask")
    if not stack:
        return Cover.FULL
    seen, hidden = stack.pop()
    if not seen:
        return Cover.EMPTY
    return Cover.PARTIAL if hidden else Cover.FULL


def apply_score(
    program: Program,
    tensors: Sequence[Tensor],
    s: Tensor,
    block: Block,
    seen: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Return the scores after a score program.

    ``s`` ``[B, Hq, m, n]`` are the scores ``scale * q.k`` of the block in natural units, and
    ``tensors`` are ``score_tensors`` of ``tilewise.problem.Operands``. Give ``seen``, a bool that
    broadcasts to ``s``, where autograd is to differentiate this: an expression is not evaluated for
    the other pairs, so that no NaN of theirs gets into a gradient.

    Returns:
        The new scores, same shape and dtype, and what ``score_gradient`` needs of the way there
        (the tanh of each softcap, the scores before an expression).
    """
    saved: list[Tensor] = []
    for instr in program:
        if instr.op == "alibi":
            rows, columns = _positions(block, s.device)
            distance = (rows + (block.total_keys - block.total_queries) - columns).abs()
            slopes = tensors[instr.slots[0]]
            slopes = slopes.to(torch.promote_types(slopes.dtype, s.dtype))[:, :, None, None]
            s = s - (slopes * distance).to(s.dtype)
        elif instr.op == "softcap":
            cap = float(instr.params[0])
            saved.append(torch.tanh(s / cap))
            s = cap * saved[-1]
        elif instr.op == "bias":
            s = s + _cut4(tensors[instr.slots[0]], block).to(s.dtype)
        elif instr.op == EXPR:
            saved.append(s)
            s = expressions.scored(instr, tensors, s, block, seen)
        else:
            raise _unknown(instr, "score")
    return s, saved


def score_gradient(
    program: Program,
    tensors: Sequence[Tensor],
    saved: Sequence[Tensor],
    grad: Tensor,
    block: Block,
    totals: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient before a score program from the one after it, ``[B, Hq, m, n]``.

    ``saved`` is what ``apply_score`` saved. ``totals`` has an accumulator for each captured tensor
    (None where not wanted), a bias's 4-D, an expression's of double precision. The gradients of
    this block, summed over what was broadcast, are added to them in place.
    """
    left = list(saved)
    for instr in reversed(program):
        if instr.op == "softcap":
            tanh = left.pop()
            # A masked pair has gradient 0 and possibly a NaN score: keep the 0.
            grad = torch.where(grad == 0, grad, grad * (1 - tanh * tanh))
        elif instr.op == "bias":
            total = totals[instr.slots[0]]
            if total is not None:
                piece = _cut4(total, block)
                piece += sum_to(grad, piece)
        elif instr.op == EXPR:
            s = left.pop()
            grad = expressions.gradient(instr, tensors, s, grad, block, totals)
    return grad


_STRIP = 8192  # keys, at least, that are evaluated at once


class Grid(NamedTuple):
    """Rectangles of queries x keys."""

    # Both: the size of one.
    block_queries: int
    block_keys: int
    # Both: how many batch items and heads are asked for; 1 where one serves all.
    batches: int
    heads: int
    # Both: how many there are along the queries and keys (of the longest sequence).
    rows: int
    columns: int


def covers(problem: Problem, operands: Operands, grid: Grid) -> Tensor:
    """Return whether the mask hides all (0), some (1) or none (2) of the pairs of each rectangle.

    Every pair is evaluated, a strip of keys at a time: exact and slow, in memory O(rows of a
    rectangle x strip).

    ``operands`` have the tensors that the mask captured, and the lengths of a variable-length call.

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


_ROWS, _KEYS = 128, 1024  # of a block whose indices are looked at
_LETTERS = "bhmn"


class _Load(NamedTuple):
    """One load: a captured tensor and the expression of its indices."""

    argument: str
    tensor: Tensor
    indices: Expr
    loads: tuple[Tensor, ...]  # what the indices themselves read


def check_indices(
    problem: Problem,
    operands: Operands,
    mask_captured: Sequence[Tensor],
    score_captured: Sequence[Tensor],
) -> None:
    """Every index of a mask or score stays in its tensor wherever the mask lets a pair attend.

    The operands are on the CPU or can be read from there. What mask and score captured is as the
    user gave it. The error names an index that does not stay, and the first such pair.
    """
    loads = [
        *_loads("mask", problem.mask, mask_captured),
        *_loads("score", problem.score, score_captured),
    ]
    if not loads:
        return
    for part in parts(problem, operands):
        m, n = part.problem.queries, part.problem.keys
        for top in range(0, m, _ROWS):
            for left in range(0, n, _KEYS):
                rows = range(top, min(top + _ROWS, m))
                block = part.block(rows, range(left, min(left + _KEYS, n)))
                _check_block(part, block, loads)


def _loads(argument: str, program: Program, captured: Sequence[Tensor]) -> Iterator[_Load]:
    for instr in program:
        tensors = tuple([captured[slot] for slot in instr.slots])
        if instr.op == EXPR:
            expr = decode(str(instr.params[0]))
            for node in expr.nodes:
                if node.op.startswith("load_") and node.args and node.value is not None:
                    indices = Expr(expr.nodes, node.args)
                    yield _Load(argument, tensors[int(node.value)], indices, tensors)
        elif instr.params and instr.params[0] == BY_USER:
            for position, tensor in enumerate(tensors):
                graph = Graph()
                indices = graph.expr(*user_indices(graph, instr, position, tensor.dim()))
                yield _Load(argument, tensor, indices, ())


def _check_block(part: Part, block: Block, loads: Sequence[_Load]) -> None:
    problem, operands = part.problem, part.operands
    device = operands.q.device
    seen = visible(problem.mask, operands.mask_tensors, block, device)
    scores = None
    for load in loads:
        if scores is None and any(node.op == "s" for node in load.indices.nodes):
            scores = _scores(part, block)
        places = block.places(device)
        found = expressions.evaluate(
            load.indices, s=scores, loads=load.loads, dtype=block.floats, **places
        )
        for dim, (index, size) in enumerate(zip(found, load.tensor.shape, strict=True)):
            wrong = ((index < 0) | (index >= size)) & seen
            if wrong.any():
                _refuse(load, dim, index, wrong, block)


def _scores(part: Part, block: Block) -> Tensor:
    problem, operands = part.problem, part.operands
    rows, keys = (slice(span.start, span.stop) for span in (block.queries, block.keys))
    q = multiplied(operands.q[:, :, rows], operands.q_scale, block.floats)
    k = multiplied(operands.k[:, :, keys], of_keys(operands.k_scale, keys), block.floats)
    k = k.repeat_interleave(problem.heads // problem.kv_heads, 1)
    return q @ k.transpose(-1, -2) * problem.scale


def _refuse(load: _Load, dim: int, index: Tensor, wrong: Tensor, block: Block) -> None:
    at = wrong.nonzero()[0].tolist()
    index = index.expand(wrong.shape)
    spans = (block.batches, block.heads, block.queries, block.keys)
    pair = ", ".join(
        f"{letter} {span.start + place}"
        for letter, span, place in zip(_LETTERS, spans, at, strict=True)
    )
    raise InvalidArgument(
        load.argument,
        f"the index {int(index[tuple(at)])} into dimension {dim} of a tensor of shape "
        f"{list(load.tensor.shape)}, at {pair}",
        f"an index from 0 to {load.tensor.shape[dim] - 1} at every pair that attends",
    )
