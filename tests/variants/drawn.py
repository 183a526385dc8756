"""Random expressions for property tests, and positions to evaluate them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewise.reference.expressions import evaluate
from tilewise.variants.expr import Expr, Graph, encode, slots_of, with_slots
from tilewise.variants.functions import FUNCTIONS
from tilewise.variants.program import Instr, Program

SHAPES: tuple[tuple[int, ...], ...] = ((), (3,), (2, 3), (5, 1, 2), (0,), (2, 0))


class Extents(NamedTuple):
    """Of a small problem."""

    batch: int = 2
    heads: int = 3
    queries: int = 5
    keys: int = 7


EXTENTS = Extents()


def run(
    expr: Expr,
    loads: Sequence[Tensor],
    *,
    extents: Extents = EXTENTS,
    s: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[Tensor]:
    """The results for every pair, each of shape [B, Hq, M, N]."""
    found = evaluate(
        expr,
        s=s,
        b=torch.arange(extents.batch)[:, None, None, None],
        h=torch.arange(extents.heads)[:, None, None],
        m=torch.arange(extents.queries)[:, None],
        n=torch.arange(extents.keys),
        queries=extents.queries,
        keys=extents.keys,
        loads=loads,
        dtype=dtype,
    )
    return [value.expand(tuple(extents)) for value in found]


def quarters(shape: Sequence[int], seed: int) -> Tensor:
    """Multiples of 1/4 in [-2, 2]: ties and kinks are frequent, roundings rare."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, tuple(shape), generator=generator).double() / 4


class Drawing:
    """Draws nodes into a graph. Loads of one slot are of one kind and rank."""

    def __init__(self, draw: st.DrawFn, kinds: Sequence[str], with_s: bool, floats: bool) -> None:
        self.draw = draw
        self.floats = floats
        self.kinds = kinds
        self.with_s = with_s
        self.graph = Graph()

    def expr(self, kind: str, depth: int) -> Expr:
        return self.graph.expr(self.place(kind, depth))

    def place(self, kind: str, depth: int) -> int:
        if kind == "float":
            return self._float(depth)
        return self._int(depth) if kind == "int" else self._bool(depth)

    def _one(self, *names: str) -> str:
        return self.draw(st.sampled_from(names))

    def _load(self, kind: str, depth: int) -> int | None:
        slots = [slot for slot, known in enumerate(self.kinds) if known == kind]
        if not slots:
            return None
        slot = self.draw(st.sampled_from(slots))
        indices = [self._int(depth - 1) for _ in SHAPES[slot % len(SHAPES)]]
        return self.graph.load(kind, slot, indices)  # type: ignore[arg-type]

    def _leaf_or_load(self, kind: str, depth: int) -> int | None:
        if depth > 0 and self.draw(st.integers(0, 3)) > 0:
            return None
        load = self._load(kind, depth) if self.draw(st.booleans()) else None
        if load is not None:
            return load
        if kind == "int":
            if self.draw(st.integers(0, 2)) == 0:
                return self.graph.constant(self.draw(st.integers(-9, 9)))
            return self.graph.leaf(self._one("b", "h", "m", "n", "M", "N"))
        if kind == "float":
            if self.with_s and self.draw(st.booleans()):
                return self.graph.leaf("s")
            return self.graph.constant(self.draw(st.integers(-8, 8)) / 4)
        return self.graph.apply("lt", self.graph.leaf("n"), self.graph.leaf("m"))

    def _int(self, depth: int) -> int:
        leaf = self._leaf_or_load("int", max(depth, 0))
        if leaf is not None:
            return leaf
        op = self._one(
            *("add", "sub", "mul", "floordiv", "mod", "min", "max", "and", "or", "xor"),
            *("neg", "abs", "sign", "not", "shl", "shr", "where", *["to_int"] * self.floats),
        )
        first = self._int(depth - 1)
        if op in ("neg", "abs", "sign", "not"):
            return self.graph.apply(op, first)
        if op == "where":
            return self.graph.apply(op, self._bool(depth - 1), first, self._int(depth - 1))
        if op == "to_int":
            return self.graph.apply(op, self._float(depth - 1))
        return self.graph.apply(op, first, self._int(depth - 1))

    def _bool(self, depth: int) -> int:
        leaf = self._leaf_or_load("bool", max(depth, 0))
        if leaf is not None:
            return leaf
        op = self._one("lt", "le", "eq", "ne", "and", "or", "xor", "not", "where", "lt", "le")
        if op in ("lt", "le", "eq", "ne"):
            kind = self._one("int", "int", *["float"] * self.floats)
            return self.graph.apply(op, self.place(kind, depth - 1), self.place(kind, depth - 1))
        args = [self._bool(depth - 1) for _ in range({"not": 1, "where": 3}.get(op, 2))]
        return self.graph.apply(op, *args)

    def _float(self, depth: int) -> int:
        leaf = self._leaf_or_load("float", max(depth, 0))
        if leaf is not None:
            return leaf
        op = self._one(
            *("add", "sub", "mul", "mul", "div", "floordiv", "mod", "min", "max", "pow", "neg"),
            *("abs", "sign", *FUNCTIONS, "where", "to_float"),
        )
        if op == "to_float":
            return self.graph.apply(op, self.place(self._one("int", "bool"), depth - 1))
        first = self._float(depth - 1)
        if op == "where":
            return self.graph.apply(op, self._bool(depth - 1), first, self._float(depth - 1))
        if op in ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "pow"):
            return self.graph.apply(op, first, self._float(depth - 1))
        return self.graph.apply(op, first)


def own_slots(expr: Expr) -> tuple[Expr, list[int]]:
    """The expression with its slots counted from 0, and which they were."""
    used = slots_of(expr)
    return with_slots(expr, {slot: at for at, slot in enumerate(used)}), used


def program_of(expr: Expr) -> Program:
    """The program of an expression, whatever kernels may know it by."""
    return (Instr("expr", (encode(expr),), tuple(slots_of(expr))),)


@st.composite
def expressions(
    draw: st.DrawFn,
    kind: str,
    *,
    kinds: Sequence[str] = (),
    with_s: bool = False,
    floats: bool = True,
    depth: int = 4,
) -> Expr:
    """An expression of a kind; ``kinds`` says what each slot holds (its rank is of ``SHAPES``)."""
    return Drawing(draw, kinds, with_s, floats).expr(kind, depth)
