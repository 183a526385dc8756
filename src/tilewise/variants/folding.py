"""Fold a dimension of calls into the batch of a program: item b of call c is c * B + b.

A batching rule (vmap) makes one call out of V calls, with a batch of V * B. A tensor with a row per
batch item is folded as q is. An expression reads ``b`` modulo B. If a tensor differs from call to
call, it gets a new first dimension for the calls, and the expression indexes it with ``b // B``.
"""

from collections.abc import Collection
from functools import lru_cache
from typing import Literal, TypeAlias

from tilewise.variants.expr import Expr, Graph, decode, encode
from tilewise.variants.program import EXPR, RAW, Instr, Program

# How the tensor of a slot is folded: "each" has a row for every batch item [B, ..], "full" one or
# a common one [B|1, ..], "indexed" is read by an expression, and "fixed" cannot be folded.
Role: TypeAlias = Literal["each", "full", "indexed", "fixed"]


def roles(program: Program, count: int) -> tuple[Role, ...]:
    """Return how a dense call's program folds each of its ``count`` tensors, in kernel form."""
    found: list[Role | None] = [None] * count
    for instr in program:
        role: Role = "full"
        if instr.op == EXPR:
            role = "indexed"
        elif instr.op == RAW or len(instr.slots) == 3:
            role = "fixed"
        elif instr.op == "below":
            role = "each"
        for slot in instr.slots:
            found[slot] = role if found[slot] in (None, role) else "fixed"
    return tuple(["fixed" if role is None else role for role in found])


@lru_cache(maxsize=256)
def folded(program: Program, batch: int, calls: int, varied: frozenset[int]) -> Program:
    """Return the program for the folded batch.

    Args:
        program: of one call.
        batch: B of one call.
        calls: V.
        varied: the slots of expressions whose tensors have a first dimension of V.
    """
    return tuple([_folded_one(instr, batch, calls, varied) for instr in program])


def _folded_one(instr: Instr, batch: int, calls: int, varied: Collection[int]) -> Instr:
    op, params, slots = instr
    if op == EXPR:
        local = frozenset([at for at, slot in enumerate(slots) if slot in varied])
        return Instr(op, (encode(_folded_expr(decode(str(params[0])), batch, local)),), slots)
    if op == "tiles" and params[2]:
        return Instr(op, (*params[:2], int(params[2]) * calls, *params[3:]), slots)
    return instr


def _folded_expr(expr: Expr, batch: int, varied: Collection[int]) -> Expr:
    graph = Graph()
    size = graph.constant(max(batch, 1))
    item = graph.apply("mod", graph.leaf("b"), size)
    call = graph.apply("floordiv", graph.leaf("b"), size)
    return graph.expr(*graph.include(expr, {"b": item}, dict.fromkeys(varied, call)))
