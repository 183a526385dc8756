"""Expressions in extended precision, on all pairs of a part, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tilewise.inspect.calls import Block
from tilewise.variants.derive import differentiate
from tilewise.variants.expr import LEAVES, Expr, Node, decode, kinds
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr

Array = npt.NDArray[Any]


def scored(instr: Instr, tensors: Sequence[Tensor], s: Array, block: Block) -> Array:
    """Return scores ``[B, Hq, M, N]`` after the expression; those of hidden pairs may be NaN."""
    expr = decode(str(instr.params[0]))
    return np.broadcast_to(_evaluated(expr, instr, tensors, s, block)[0], s.shape)


def gradient(
    instr: Instr,
    tensors: Sequence[Tensor],
    s: Array,
    grad: Array,
    block: Block,
    totals: Sequence[Array],
) -> Array:
    """Return the gradient before the expression; add those of captured tensors to ``totals``."""
    derivative = differentiate(decode(str(instr.params[0])))
    nodes, outputs = derivative.expr
    places = [place for load in derivative.loads for place in nodes[load].args]
    found = _evaluated(Expr(nodes, (*outputs[1:], *places)), instr, tensors, s, block)
    by_s, *rest = [np.broadcast_to(value, s.shape) for value in found]
    by_loads, indices = rest[: len(derivative.loads)], iter(rest[len(derivative.loads) :])
    with np.errstate(all="ignore"):
        for load, by_load in zip(derivative.loads, by_loads, strict=True):
            slot = nodes[load].value
            assert isinstance(slot, int)
            total = totals[instr.slots[slot]]
            at = [next(indices) for _ in nodes[load].args]
            share = np.where(grad == 0, 0, grad * by_load)
            if not at:
                total += share.sum()
            elif total.size:
                np.add.at(total, _clamped(at, total.shape), share)
        return np.where(grad == 0, grad, grad * by_s)


def _evaluated(
    expr: Expr, instr: Instr, tensors: Sequence[Tensor], s: Array, block: Block
) -> list[Array]:
    spans = {"b": block.batches, "h": block.heads, "m": block.queries, "n": block.keys}
    leaves: dict[str, Array] = {
        name: np.arange(span.start, span.stop).reshape([-1] + [1] * (3 - dim))
        for dim, (name, span) in enumerate(spans.items())
    }
    leaves |= {"s": s, "M": np.asarray(block.total_queries), "N": np.asarray(block.total_keys)}
    loads = [tensors[slot].detach() for slot in instr.slots]
    arrays = [
        load.double().numpy().astype(np.longdouble) if load.is_floating_point() else load.numpy()
        for load in loads
    ]
    types = {"bool": np.bool_, "int": np.int64, "float": np.longdouble}
    values: list[Array] = []
    with np.errstate(all="ignore"):
        for node, kind in zip(expr.nodes, kinds(expr), strict=True):
            args = [values[arg] for arg in node.args]
            if node.op in LEAVES:
                values.append(leaves[node.op])
            elif node.op.startswith("const_"):
                values.append(np.asarray(node.value, dtype=types[kind]))
            elif node.op.startswith("load_"):
                values.append(_load(node, arrays, args).astype(types[kind]))
            elif node.op in ("to_float", "to_int"):
                values.append(args[0].astype(types[kind]))
            else:
                values.append(np.asarray(_function(node.op)(*args)))
    return [values[output] for output in expr.outputs]


def _load(node: Node, arrays: Sequence[Array], indices: Sequence[Array]) -> Array:
    assert isinstance(node.value, int)
    array = arrays[node.value]
    if array.size == 0:
        return np.zeros(np.broadcast_shapes(*[index.shape for index in indices]))
    return np.asarray(array[_clamped(indices, array.shape)])


def _clamped(indices: Sequence[Array], shape: tuple[int, ...]) -> tuple[Array, ...]:
    return tuple([np.clip(index, 0, size - 1) for index, size in zip(indices, shape, strict=True)])


def _safe(divide: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Integers divided by 0 may give anything, but numpy warns."""

    def divided(a: Array, b: Array) -> Array:
        return divide(a, np.where(b == 0, 1, b) if b.dtype.kind == "i" else b)

    return divided


# What numpy does not know by a name that torch has for it too.
_OWN: dict[str, Callable[..., Array]] = {
    "floordiv": _safe(np.floor_divide),
    "mod": _safe(np.remainder),
    "eq": np.equal,
    "pow": np.power,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "shl": lambda a, b: np.left_shift(a, np.clip(b, 0, 63)),
    "shr": lambda a, b: np.right_shift(a, np.clip(b, 0, 63)),
    "where": np.where,
}


def _function(op: str) -> Callable[..., Array]:
    names = OPS[op].names or (op,)
    own = _OWN.get(op)
    return own or next(getattr(np, name) for name in names if hasattr(np, name))
