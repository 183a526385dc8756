"""The indices of masks and scores, looked at for every pair that attends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Block, Part, multiplied, of_keys, parts
from tilewise.reference.expressions import evaluate
from tilewise.reference.programs import visible
from tilewise.variants.expr import Expr, Graph, decode
from tilewise.variants.graphs import user_indices
from tilewise.variants.program import BY_USER, EXPR, Program

_ROWS, _KEYS = 128, 1024
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

    Args:
        problem: of the call.
        operands: of the call; its tensors are on the CPU or can be read from there.
        mask_captured: what the mask captured, as the user gave it.
        score_captured: what the score captured.

    Raises:
        InvalidArgument: one does not; the message names it and the first such pair.
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
        found = evaluate(load.indices, s=scores, loads=load.loads, dtype=block.floats, **places)
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
