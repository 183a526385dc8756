"""Evaluate expressions in plain torch, on any shapes that broadcast: pairs, rows, tiles.

Every node is a tensor of the shape that its leaves give it. So values that depend on the row alone
are computed once per row. Integers are int64 and divide as Python's, floats are of one dtype.
torch's autograd differentiates floats through all of it, with respect to ``s`` and the captured
tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.variants.expr import LEAVES, Expr, Node, kinds
from tilewise.variants.operations import OPS


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

    Args:
        expr: what is evaluated.
        s: the score, of ``dtype``; None for a mask, which has none.
        b: the batch item, an int64 tensor; b, h, m, n and ``s`` broadcast against one another.
        h: the query head.
        m: the query row.
        n: the key.
        queries: M.
        keys: N.
        loads: the captured tensors by slot: bool, integer or floating (converted to ``dtype``).
        dtype: of all floats.

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
