"""The plain mathematics in extended precision, with its gradients written out by hand.

The oracle for float64 problems: numpy's longdouble has a 64-bit mantissa on x86 (and 113 bits on
aarch64), which torch cannot offer. Small sizes only: numpy multiplies long doubles one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tilewise.inspect.calls import Block, Part, keep_mask, parts, visible
from tilewise.problem import Operands, Problem
from tilewise.variants.derive import differentiate
from tilewise.variants.expr import LEAVES, Expr, Node, decode, kinds
from tilewise.variants.operations import OPS
from tilewise.variants.program import EXPR, Instr

Array = npt.NDArray[np.longdouble]


class ExtendedGrads(NamedTuple):
    """Gradients in the shapes of the operands."""

    q: Array
    k: Array
    v: Array
    score_tensors: tuple[Array, ...]
    sinks: Array | None


class ExtendedResult(NamedTuple):
    """out, lse, ... in the shapes of ``Result``; ``grads`` None unless asked for."""

    out: Array
    lse: Array
    grads: ExtendedGrads | None
    max_logit: Array
    entropy: Array


def has_extended_precision() -> bool:
    """Return whether longdouble is more precise than float64 here; on some systems it is not."""
    return bool(np.finfo(np.longdouble).eps < np.finfo(np.float64).eps)


def extended(
    problem: Problem,
    operands: Operands,
    grad_out: Tensor | None = None,
    grad_lse: Tensor | None = None,
    grad_entropy: Tensor | None = None,
) -> ExtendedResult:
    """Attention, and its gradients where a gradient of something that it gives is given.

    Args:
        problem: what to compute.
        operands: its tensors, of any floating dtype.
        grad_out: gradient of out, its shape; None for zero.
        grad_lse: gradient of lse, its shape; None for zero.
        grad_entropy: gradient of the entropy, its shape; None for zero.

    Returns:
        out, lse, max_logit, entropy and gradients in longdouble.
    """
    varlen = problem.layout == "varlen"
    out = _zeros((*operands.q.shape[:-1], problem.value_dim))
    rows = (problem.heads, problem.queries) if varlen else operands.q.shape[:-1]
    lse = np.full(rows, -np.inf, dtype=np.longdouble)
    max_logit, entropy = lse.copy(), np.zeros_like(lse)
    totals = None
    if not (grad_out is None and grad_lse is None and grad_entropy is None):
        totals = ExtendedGrads(
            _zeros(operands.q.shape),
            _zeros(operands.k.shape),
            _zeros(operands.v.shape),
            tuple(_zeros(t.shape) for t in operands.score_tensors),
            None if operands.sinks is None else _zeros(operands.sinks.shape),
        )
    for part in parts(problem, operands):
        q_rows, k_rows = part.queries, part.keys
        forward = _Forward(part)
        _packed(out, q_rows, varlen)[...] = forward.out
        _rows(lse, q_rows, varlen)[...] = forward.lse
        _rows(max_logit, q_rows, varlen)[...] = forward.max_logit
        _rows(entropy, q_rows, varlen)[...] = forward.entropy
        if totals is None:
            continue
        none = np.zeros_like(forward.out)
        d_out = none if grad_out is None else _packed(_long(grad_out), q_rows, varlen)
        d_lse, d_entropy = (
            np.zeros_like(forward.lse) if grad is None else _rows(_long(grad), q_rows, varlen)
            for grad in (grad_lse, grad_entropy)
        )
        grads = forward.backward(d_out, d_lse, d_entropy)
        _packed(totals.q, q_rows, varlen)[...] += grads.q
        _packed(totals.k, k_rows, varlen)[...] += grads.k
        _packed(totals.v, k_rows, varlen)[...] += grads.v
        loaded = {slot for instr in problem.score if instr.op == EXPR for slot in instr.slots}
        for slot, grad in enumerate(grads.score_tensors):
            total = totals.score_tensors[slot]
            if slot in loaded:
                total[...] += grad
            elif total.ndim == 4:
                entry = slice(part.first_batch, part.first_batch + 1) if varlen else slice(None)
                first = entry if total.shape[0] > 1 else slice(None)
                total[first, :, : grad.shape[2], : grad.shape[3]] += grad
        if totals.sinks is not None and grads.sinks is not None:
            totals.sinks[...] += grads.sinks
    return ExtendedResult(out, lse, totals, max_logit, entropy)


def _long(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy().astype(np.longdouble)


def _zeros(shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, dtype=np.longdouble)


def _packed(array: Array, rows: slice, varlen: bool) -> Array:
    """Return the ``[B, H, S, D]`` view of a part's rows."""
    return array[rows].swapaxes(0, 1)[None] if varlen else array[rows]


def _rows(array: Array, rows: slice, varlen: bool) -> Array:
    """Return the ``[B, H, M]`` view of a part's numbers per row."""
    return array[None, :, rows] if varlen else array[rows]


def _sum_to(array: Array, shape: tuple[int, ...]) -> Array:
    axes = tuple(i for i, size in enumerate(shape) if size == 1 and array.shape[i] != 1)
    return np.asarray(array.sum(axis=axes, keepdims=True), dtype=np.longdouble)


class _Forward:
    """One part's forward pass, kept for its backward."""

    def __init__(self, part: Part) -> None:
        problem, operands = part.problem, part.operands
        self.part = part
        self.group = problem.heads // problem.kv_heads if problem.kv_heads else 1
        self.scale = np.longdouble(problem.scale)
        self.q = _long(operands.q)
        self.k = np.repeat(_long(operands.k), self.group, axis=1)
        self.v = np.repeat(_long(operands.v), self.group, axis=1)
        self.block = part.block(range(problem.queries), range(problem.keys))
        self.saved: list[Array] = []
        scores = self._scores(self.block)
        self.sinks = None if operands.sinks is None else _long(operands.sinks)[:, None]
        top = self.max_logit = scores.max(axis=-1, initial=-np.inf)
        if self.sinks is not None:
            top = np.maximum(top, self.sinks)
        base = np.where(np.isneginf(top), np.longdouble(0), top)
        weights = np.exp(scores - base[..., None])
        total = weights.sum(axis=-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks - base)
        safe = np.where(total == 0, np.longdouble(1), total)
        self.p = weights / safe[..., None]
        self.lse = np.where(total == 0, np.longdouble(-np.inf), base + np.log(safe))
        self.p_sink = None if self.sinks is None else np.exp(self.sinks - base) / safe
        # Logarithms of the probabilities, 0 in the place of those of none.
        self.log_p = self._logs(scores - base[..., None], safe[..., None])
        self.entropy = -(self.p * self.log_p).sum(axis=-1)
        if self.p_sink is not None and self.sinks is not None:
            self.log_p_sink = self._logs(self.sinks - base, safe)
            self.entropy = self.entropy - self.p_sink * self.log_p_sink
        self.kept = self._kept()
        self.out = (self.p * self.kept) @ self.v

    def _scores(self, block: Block) -> Array:
        problem, operands = self.part.problem, self.part.operands
        scores: Array = self.q @ self.k.swapaxes(-1, -2) * self.scale
        for instr in problem.score:
            if instr.op == "softcap":
                cap = np.longdouble(instr.params[0])
                self.saved.append(np.tanh(scores / cap))
                scores = cap * self.saved[-1]
            elif instr.op == "alibi":
                shift = block.total_keys - block.total_queries
                rows, columns = np.arange(block.total_queries), np.arange(block.total_keys)
                distance = np.abs(rows[:, None] + shift - columns).astype(np.longdouble)
                scores = scores - _long(operands.score_tensors[instr.slots[0]])[
                    :, :, None, None
                ] * (distance)
            elif instr.op == EXPR:
                self.saved.append(scores)
                scores = _expression_scored(instr, operands.score_tensors, scores, block)
            else:
                scores = scores + _long(operands.score_tensors[instr.slots[0]])
        seen = visible(problem.mask, operands.mask_tensors, block, operands.q.device)
        return np.where(seen.numpy(), scores, np.longdouble(-np.inf))

    @staticmethod
    def _logs(exponents: Array, total: Array) -> Array:
        logs: Array = np.where(np.isneginf(exponents), np.longdouble(0), exponents - np.log(total))
        return logs

    def _kept(self) -> Array:
        """Return the factors of dropout on the probabilities: 0 or 1 / (1 - p)."""
        problem, first = self.part.problem, self.part.first_batch
        if not problem.dropout_p:
            return np.ones((1, 1, 1, 1), dtype=np.longdouble)
        keep = keep_mask(
            self.part.operands.seed,
            problem.dropout_p,
            batches=range(first, first + problem.batch),
            heads=range(problem.heads),
            queries=range(problem.queries),
            keys=range(problem.keys),
        )
        return keep.numpy() / (np.longdouble(1) - np.longdouble(problem.dropout_p))

    def backward(self, d_out: Array, d_lse: Array, d_entropy: Array) -> ExtendedGrads:
        """Gradients from those of out ``[B, Hq, M, Dv]``, lse and entropy ``[B, Hq, M]``."""
        operands = self.part.operands
        shift = (d_lse - (d_out * self.out).sum(axis=-1))[..., None]
        tilt = d_entropy[..., None] * (self.log_p + self.entropy[..., None])
        ds = self.p * ((d_out @ self.v.swapaxes(-1, -2)) * self.kept + shift - tilt)
        scores = [_zeros(tuple(t.shape)) for t in operands.score_tensors]
        saved = list(self.saved)
        for instr in reversed(self.part.problem.score):
            if instr.op == "softcap":
                tanh = saved.pop()
                ds = ds * (1 - tanh * tanh)
            elif instr.op == "bias":
                scores[instr.slots[0]] += _sum_to(ds, scores[instr.slots[0]].shape)
            elif instr.op == EXPR:
                ds = _expression_gradient(
                    instr, operands.score_tensors, saved.pop(), ds, self.block, scores
                )
        ds = ds * self.scale
        sinks = None
        if self.p_sink is not None:
            tilt = d_entropy * (self.log_p_sink + self.entropy)
            sinks = (self.p_sink * (shift[..., 0] - tilt)).sum(axis=(0, 2))
        return ExtendedGrads(
            ds @ self.k,
            self._over_group(ds.swapaxes(-1, -2) @ self.q),
            self._over_group((self.p * self.kept).swapaxes(-1, -2) @ d_out),
            tuple(scores),
            sinks,
        )

    def _over_group(self, array: Array) -> Array:
        batch, heads, length, width = array.shape
        grouped = array.reshape(batch, heads // self.group, self.group, length, width)
        return np.asarray(grouped.sum(axis=2), dtype=np.longdouble)


# ---- Expressions in extended precision, on all pairs of a part, with their gradients.


Values = npt.NDArray[Any]


def _expression_scored(instr: Instr, tensors: Sequence[Tensor], s: Values, block: Block) -> Values:
    """Return scores ``[B, Hq, M, N]`` after the expression; those of hidden pairs may be NaN."""
    expr = decode(str(instr.params[0]))
    return np.broadcast_to(_evaluated(expr, instr, tensors, s, block)[0], s.shape)


def _expression_gradient(
    instr: Instr,
    tensors: Sequence[Tensor],
    s: Values,
    grad: Values,
    block: Block,
    totals: Sequence[Values],
) -> Values:
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
    expr: Expr, instr: Instr, tensors: Sequence[Tensor], s: Values, block: Block
) -> list[Values]:
    spans = {"b": block.batches, "h": block.heads, "m": block.queries, "n": block.keys}
    leaves: dict[str, Values] = {
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
    values: list[Values] = []
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


def _load(node: Node, arrays: Sequence[Values], indices: Sequence[Values]) -> Values:
    assert isinstance(node.value, int)
    array = arrays[node.value]
    if array.size == 0:
        return np.zeros(np.broadcast_shapes(*[index.shape for index in indices]))
    return np.asarray(array[_clamped(indices, array.shape)])


def _clamped(indices: Sequence[Values], shape: tuple[int, ...]) -> tuple[Values, ...]:
    return tuple([np.clip(index, 0, size - 1) for index, size in zip(indices, shape, strict=True)])


def _safe(divide: Callable[[Values, Values], Values]) -> Callable[[Values, Values], Values]:
    """Integers divided by 0 may give anything, but numpy warns."""

    def divided(a: Values, b: Values) -> Values:
        return divide(a, np.where(b == 0, 1, b) if b.dtype.kind == "i" else b)

    return divided


# What numpy does not know by a name that torch has for it too.
_OWN: dict[str, Callable[..., Values]] = {
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


def _function(op: str) -> Callable[..., Values]:
    names = OPS[op].names or (op,)
    own = _OWN.get(op)
    return own or next(getattr(np, name) for name in names if hasattr(np, name))
