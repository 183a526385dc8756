"""The expression of a mask's program, to be computed in one piece.

The counterpart for scores is ``recognise.as_expression``. Unless said otherwise the captured
tensors are in kernel form (``lower.py``): a dimension of size 1 is read by an index past it, which
gives its only element.
"""

from collections.abc import Sequence
from functools import reduce

from tilewise.variants.expr import Expr, Graph, decode, with_slots
from tilewise.variants.program import BY_USER, EXPR, Instr, Program
from tilewise.variants.rows import Kind

_LETTERS = "bhmn"


def mask_expression(program: Program, ranks: Sequence[int] | None = None) -> Expr:
    """Return the boolean of a mask's program; its slots are the same.

    Args:
        program: the mask.
        ranks: dimensions of the captured tensors as the user gave them. Then the loads are those
            that the user wrote, and a tensor of a built-in mask is one boolean without an index.
    """
    graph = Graph()
    stack: list[int] = []
    for instr in program:
        if instr.op == "not":
            stack.append(graph.apply("not", stack.pop()))
        elif instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(graph.apply(instr.op, first, second))
        elif instr.op != "tiles":
            stack.append(_leaf(graph, instr, ranks))
    return graph.expr(stack.pop() if stack else graph.constant(True))


def exactly_sized(program: Program) -> frozenset[int]:
    """Slots whose tensors, lowered, have every position of a call or size 1, in each dimension."""
    named = {slot for instr in program if instr.op != EXPR for slot in instr.slots}
    return frozenset(named.difference(*(instr.slots for instr in program if instr.op == EXPR)))


def user_indices(graph: Graph, instr: Instr, position: int, rank: int) -> list[int]:
    """Return the indices that a user wrote for one tensor of an operation with the form BY_USER."""
    letters = {"below": "b", "same_document": ("bm", "bn")[position][-rank:]}.get(instr.op)
    if letters is not None:
        return [graph.leaf(letter) for letter in letters]
    codes = [int(axis) for axis in instr.params[1:]]
    return [graph.leaf(_LETTERS[code]) if code < 4 else graph.constant(0) for code in codes]


def _leaf(graph: Graph, instr: Instr, ranks: Sequence[int] | None) -> int:
    if instr.op == EXPR:
        return graph.include(with_slots(decode(str(instr.params[0])), instr.slots))[0]
    if instr.slots and ranks is not None:
        if instr.params[:1] != (BY_USER,):
            return graph.load("bool", instr.slots[0], ())
        kind: Kind = "bool" if instr.op == "dense" else "int"
        loads = [
            graph.load(kind, slot, user_indices(graph, instr, position, ranks[slot]))
            for position, slot in enumerate(instr.slots)
        ]
        if instr.op == "below":
            return graph.apply("lt", graph.leaf("n"), *loads)
        return graph.apply("eq", *loads) if instr.op == "same_document" else loads[0]
    if instr.op == "band":
        return _band(graph, *(int(number) for number in instr.params))
    if instr.op == "below":
        key = graph.leaf("n")
        if instr.slots:
            return graph.apply("lt", key, _load(graph, "int", instr.slots[0], ("b",)))
        return graph.apply("lt", key, graph.constant(int(instr.params[0])))
    if instr.op == "same_document":
        ids = [
            _load(graph, "int", slot, ("b", position))
            for slot, position in zip(instr.slots, ("m", "n"), strict=True)
        ]
        return graph.apply("eq", *ids)
    (slot,) = instr.slots
    if instr.op == "dense":
        return _load(graph, "bool", slot, ("b", "h", "m", "n"))
    sizes = [graph.constant(int(size)) for size in instr.params]
    block = [
        graph.apply("floordiv", graph.leaf(position), size)
        for position, size in zip(("m", "n"), sizes, strict=True)
    ]
    return graph.load("bool", slot, [graph.leaf("b"), graph.leaf("h"), *block])


def _load(graph: Graph, kind: Kind, slot: int, positions: Sequence[str]) -> int:
    return graph.load(kind, slot, [graph.leaf(position) for position in positions])


def _band(graph: Graph, left: int, right: int, anchor: int) -> int:
    row, key = graph.leaf("m"), graph.leaf("n")
    if anchor:
        more = graph.apply("sub", graph.leaf("N"), graph.leaf("M"))
        row = graph.apply("add", row, more)
    bounds = []
    if left >= 0:
        first = graph.apply("sub", row, graph.constant(left))
        bounds.append(graph.apply("le", first, key))
    if right >= 0:
        last = graph.apply("add", row, graph.constant(right))
        bounds.append(graph.apply("le", key, last))
    return reduce(lambda one, other: graph.apply("and", one, other), bounds, graph.constant(True))
