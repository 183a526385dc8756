"""Random expressions for property tests, and positions to evaluate them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from tilewise.reference.expressions import evaluate
from tilewise.variants.expr import Expr, Graph, encode, slots_of, with_slots
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr, Program
from tilewise.variants.rows import Kind

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

    def __init__(
        self, draw: st.DrawFn, kinds: Sequence[str], with_s: bool, floats: bool, defined: bool
    ) -> None:
        self.draw, self.kinds = draw, kinds
        self.with_s, self.floats, self.defined = with_s, floats, defined
        self.graph = Graph()

    def place(self, kind: Kind, depth: int) -> int:
        leaf = self._leaf_or_load(kind, max(depth, 0))
        return self._operation(kind, depth) if leaf is None else leaf

    def _load(self, kind: Kind, depth: int) -> int | None:
        slots = [slot for slot, known in enumerate(self.kinds) if known == kind]
        if not slots:
            return None
        slot = self.draw(st.sampled_from(slots))
        indices = [self.place("int", depth - 1) for _ in SHAPES[slot % len(SHAPES)]]
        return self.graph.load(kind, slot, indices)

    def _leaf_or_load(self, kind: Kind, depth: int) -> int | None:
        if depth > 0 and self.draw(st.integers(0, 3)) > 0:
            return None
        load = self._load(kind, depth) if self.draw(st.booleans()) else None
        if load is not None:
            return load
        if kind == "int":
            if self.draw(st.integers(0, 2)) == 0:
                return self.graph.constant(self.draw(st.integers(-9, 9)))
            return self.graph.leaf(self.draw(st.sampled_from("bhmnMN")))
        if kind == "float":
            if self.with_s and self.draw(st.booleans()):
                return self.graph.leaf("s")
            return self.graph.constant(self.draw(st.integers(-8, 8)) / 4)
        return self.graph.apply("lt", self.graph.leaf("n"), self.graph.leaf("m"))

    def _operation(self, kind: Kind, depth: int) -> int:
        """Any operation that gives a value of a kind, of arguments of any kind that it takes."""
        op, taken = self.draw(st.sampled_from(_GIVING[kind, self.floats]))
        condition = [self.place("bool", depth - 1)] if op == "where" else []
        rest = [self.place(taken, depth - 1) for _ in range(OPS[op].arity - len(condition))]
        if self.defined and op in ("floordiv", "mod", "shl", "shr"):
            rest[1] = self.graph.constant(self.draw(st.integers(1, 9)))
        return self.graph.apply(op, *condition, *rest)


_FORMS = [(op, taken, row.gives or taken) for op, row in OPS.items() for taken in row.forms]
_GIVING = {
    (kind, floats): [
        (op, taken) for op, taken, gives in _FORMS if gives == kind and (floats or taken != "float")
    ]
    for kind in ("bool", "int", "float")
    for floats in (False, True)
}


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
    kind: Kind,
    *,
    kinds: Sequence[str] = (),
    with_s: bool = False,
    floats: bool = True,
    defined: bool = False,
    depth: int = 4,
) -> Expr:
    """An expression of a kind; ``kinds`` says what each slot holds (its rank is of ``SHAPES``).

    Where it is to be ``defined`` there is no division by 0, and no shift too far.
    """
    drawing = Drawing(draw, kinds, with_s, floats, defined)
    return drawing.graph.expr(drawing.place(kind, depth))
