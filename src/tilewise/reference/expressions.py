"""Evaluate expressions in plain torch, on any shapes that broadcast: pairs, rows, tiles.

Every node is a tensor of the shape that its leaves give it. So values that depend on the row alone
are computed once per row. Integers are int64 and divide as Python's, floats are of one dtype.
torch's autograd differentiates floats through all of it, with respect to ``s`` and the captured
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from tilewise.reference.blocks import Block, sum_to
from tilewise.variants.derive import differentiate
from tilewise.variants.expr import LEAVES, Expr, Node, decode, kinds
from tilewise.variants.intervals import Bounds, Interval, bounds
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr


def evaluate(
    expr: Expr,
    *,
    s: Tensor | None,
    b: Tensor,
    h: Tensor,
    m: Tensor,
    n: Tensor,
    queries: int,
    keys: int,
    loads: Sequence[Tensor],
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the results of an expression.

    ``s`` is the score, of ``dtype``; None for a mask. b, h, m and n are int64 tensors, which
    broadcast against one another and ``s``; ``queries`` and ``keys`` are M and N. ``loads`` are the
    captured tensors by slot: bool, integer or floating (converted to ``dtype``).

    Returns:
        a tensor for each output: bool, int64 or ``dtype``, of a shape that broadcasts to the
        common one.
    """
    device = m.device
    leaves = {"s": s, "b": b, "h": h, "m": m, "n": n}
    lengths = {"M": queries, "N": keys}
    values: list[Tensor] = []
    for node, kind in zip(expr.nodes, kinds(expr), strict=True):
        args = [values[arg] for arg in node.args]
        if node.op in lengths:
            values.append(torch.tensor(lengths[node.op], device=device))
        elif node.op in LEAVES:
            leaf = leaves[node.op]
            assert leaf is not None, "the expression of a mask has no score"
            values.append(leaf)
        elif node.op.startswith("const_"):
            types = {"bool": torch.bool, "int": torch.int64, "float": dtype}
            values.append(torch.tensor(node.value, dtype=types[kind], device=device))
        elif node.op.startswith("load_"):
            values.append(_load(node, loads, args, dtype))
        elif node.op == "to_float":
            values.append(args[0].to(dtype))
        else:
            values.append(OPS[node.op].torch(*args))
    return [values[output] for output in expr.outputs]


def load_indices(tensor: Tensor, indices: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Indices moved into their dimensions, the nearest ones; the tensor has elements."""
    return tuple(
        [index.clamp(0, size - 1) for index, size in zip(indices, tensor.shape, strict=True)]
    )


def _load(node: Node, loads: Sequence[Tensor], indices: list[Tensor], dtype: torch.dtype) -> Tensor:
    assert isinstance(node.value, int)
    tensor = loads[node.value]
    if node.op == "load_float":
        tensor = tensor.to(dtype)
    elif node.op == "load_int":
        tensor = tensor.to(torch.int64)
    if tensor.numel() == 0:
        shape = sum(indices[1:], indices[0]).shape
        return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    # An index without dimensions would make a view that a later write could change.
    return tensor[load_indices(tensor, indices)] if indices else tensor


# Of a captured tensor, the elements that a cover looks at; and how many batch items and heads.
_MOST_SCANNED = 4096
_MOST_BOXES = 64


def _expression(instr: Instr) -> Expr:
    return decode(str(instr.params[0]))


def _of_block(
    expr: Expr,
    instr: Instr,
    tensors: Sequence[Tensor],
    block: Block,
    *,
    s: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the results for a block; each broadcasts to ``[B, Hq, m, n]``."""
    loads = [tensors[slot] for slot in instr.slots]
    return evaluate(expr, s=s, loads=loads, dtype=dtype, **block.places(device))


def visible(instr: Instr, tensors: Sequence[Tensor], block: Block, device: torch.device) -> Tensor:
    """Return which pairs of a block a mask's expression shows, broadcastable to all of them."""
    (shown,) = _of_block(
        _expression(instr), instr, tensors, block, s=None, device=device, dtype=block.floats
    )
    return shown


def proven(instr: Instr, tensors: Sequence[Tensor], block: Block) -> bool | None:
    """Return what a mask's expression gives for all pairs of a block; None if not the same.

    Each batch item and head that it asks for is looked at by itself, if they are few.
    """
    expr = _expression(instr)
    named = {node.op for node in expr.nodes}
    spans = [
        [range(place, place + 1) for place in span] if leaf in named else [span]
        for leaf, span in (("b", block.batches), ("h", block.heads))
    ]
    boxes = list(product(*spans))
    if len(boxes) > _MOST_BOXES:
        boxes = [(block.batches, block.heads)]
    found = {_proven_box(expr, instr, tensors, block, *box) for box in boxes}
    return found.pop() if len(found) == 1 else None


def _proven_box(
    expr: Expr,
    instr: Instr,
    tensors: Sequence[Tensor],
    block: Block,
    batches: range,
    heads: range,
) -> bool | None:
    spans = {"b": batches, "h": heads, "m": block.queries, "n": block.keys}
    ranges = {leaf: Interval(span.start, span.stop - 1) for leaf, span in spans.items()}
    ranges["M"] = Interval(block.total_queries, block.total_queries)
    ranges["N"] = Interval(block.total_keys, block.total_keys)

    def extremes(slot: int, indices: Sequence[Interval]) -> Bounds:
        return _extremes(tensors[instr.slots[slot]], indices)

    found = bounds(expr, ranges, extremes)
    return found if isinstance(found, bool) else None


def _extremes(tensor: Tensor, indices: Sequence[Interval]) -> Bounds:
    """Return what the elements in a box of a captured tensor can be."""
    if tensor.numel() == 0:
        return False if tensor.dtype is torch.bool else Interval(0, 0)
    for dim, (index, size) in enumerate(zip(indices, tensor.shape, strict=True)):
        first, last = (min(max(int(end), 0), size - 1) for end in index)
        tensor = tensor.narrow(dim, first, last - first + 1)
    if tensor.numel() > _MOST_SCANNED:
        return None
    if tensor.dtype is torch.bool:
        return bool(tensor.any()) if tensor.any() == tensor.all() else None
    low, high = (end.item() for end in tensor.aminmax())
    return None if math.isnan(low) else Interval(low, high)


def scored(
    instr: Instr, tensors: Sequence[Tensor], s: Tensor, block: Block, seen: Tensor | None
) -> Tensor:
    """Return the scores after the expression; only of the pairs that are seen, and 0 elsewhere.

    ``tensors`` are those of the whole program. ``s`` is ``[B, Hq, m, n]`` or broadcasts to it, and
    ``seen`` broadcasts to ``s``; None evaluates all pairs.
    """
    expr = _expression(instr)
    if seen is None:
        (value,) = _of_block(expr, instr, tensors, block, s=s, device=s.device, dtype=s.dtype)
        shape = (len(block.batches), len(block.heads), len(block.queries), len(block.keys))
        return value.expand(shape)
    pairs = seen.expand(s.shape).nonzero(as_tuple=True)
    spans = (block.batches, block.heads, block.queries, block.keys)
    b, h, m, n = (place + span.start for place, span in zip(pairs, spans, strict=True))
    (value,) = evaluate(
        expr,
        s=s[pairs],
        b=b,
        h=h,
        m=m,
        n=n,
        queries=block.total_queries,
        keys=block.total_keys,
        loads=[tensors[slot] for slot in instr.slots],
        dtype=s.dtype,
    )
    return torch.zeros_like(s).index_put(pairs, value.expand(m.shape))


def gradient(
    instr: Instr,
    tensors: Sequence[Tensor],
    s: Tensor,
    grad: Tensor,
    block: Block,
    totals: Sequence[Tensor | None],
) -> Tensor:
    """Return the gradient before the expression from the one after it.

    ``tensors`` are those of the whole program. ``s`` ``[B, Hq, m, n]`` are the scores before it,
    and ``grad`` is the gradient of its result, 0 for hidden pairs. ``totals`` has a contiguous
    float64 accumulator for each captured tensor, or None: what this block says of the tensor's
    elements is added in place, in the order of the pairs.
    """
    derivative = differentiate(_expression(instr))
    nodes, outputs = derivative.expr
    # A hidden pair has gradient 0 and possibly a NaN derivative: keep the 0.
    alive = grad != 0
    wanted = [*outputs[1:], *(arg for place in derivative.loads for arg in nodes[place].args)]
    found = iter(
        _of_block(
            Expr(nodes, tuple(wanted)), instr, tensors, block, s=s, device=s.device, dtype=s.dtype
        )
    )
    by_s = next(found)
    by_loads = [next(found) for _ in derivative.loads]
    for place, by_load in zip(derivative.loads, by_loads, strict=True):
        indices = [next(found) for _ in nodes[place].args]
        slot = nodes[place].value
        assert isinstance(slot, int)
        total = totals[instr.slots[slot]]
        if total is None or total.numel() == 0:
            continue
        share = torch.where(alive, grad * by_load, 0.0).double()
        _add_at(total, indices, share)
    return torch.where(alive, grad * by_s, grad)


def _add_at(total: Tensor, indices: Sequence[Tensor], share: Tensor) -> None:
    """Adds ``share`` to the elements at ``indices``, which broadcast to its shape."""
    place = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=share.device)
    for index, stride in zip(load_indices(total, indices), total.stride(), strict=True):
        place = place + index * stride
    share = sum_to(share, place)
    # In double precision torch does this one element after the other, whatever its threads.
    total.view(-1).index_put_((place.reshape(-1),), share.reshape(-1), accumulate=True)
