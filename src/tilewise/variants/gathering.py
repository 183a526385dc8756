"""Programs over gathered keys: the same mask or score where a key is found by a list.

A call with key lists becomes calls of a small dense problem (``engine/gathered.py``). Its batch
item ``b'`` is one list: the ``R`` query rows and the ``G`` heads of a group that share it. Its row
``m'`` is head ``m' % G`` of query row ``m' // G``, and its key ``n'`` is the ``n'``-th of the list.
So a program reads what it calls b, h, m, n, M and N from two tensors:

* ``places`` [B', 5]: batch item, first head, first row, and the lengths M and N of the sequence;
* ``lists`` [B', K]: the keys.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Literal

from tilewise.variants.expr import Graph, decode, encode, with_slots
from tilewise.variants.program import EXPR, Instr, Program, slot_count

_ITEM, _HEAD, _ROW, _QUERIES, _KEYS = range(5)  # the columns of ``places``


@lru_cache(maxsize=256)
def gathered(program: Program, kind: Literal["mask", "score"], rows: int, heads: int) -> Program:
    """Return the program of the small problem, as one expression.

    Args:
        program: of the call, fitted, its tensors in kernel form (``variants/lower.py``); not empty
            and without ``raw``.
        kind: what it is.
        rows: R.
        heads: G.

    Returns:
        a program that reads the same tensors, then ``places`` and ``lists`` in two more slots.
    """
    graph = Graph()
    pair = _Pair(graph, slot_count(program), rows, heads)
    place = _mask(graph, pair, program) if kind == "mask" else _score(graph, pair, program)
    expr = graph.expr(place)
    slots = sorted({int(node.value or 0) for node in expr.nodes if node.op.startswith("load_")})
    expr = with_slots(expr, {slot: at for at, slot in enumerate(slots)})
    return (Instr(EXPR, (encode(expr),), tuple(slots)),)


class _Pair:
    """The places in a graph of what a program calls b, h, m, n, M and N."""

    def __init__(self, graph: Graph, slot: int, rows: int, heads: int) -> None:
        self.graph = graph
        item, row, key = (graph.leaf(name) for name in "bmn")
        column = [graph.load("int", slot, (item, graph.constant(at))) for at in range(5)]
        many = graph.constant(heads)
        head = graph.apply("mod", row, many) if rows > 1 else row
        query = graph.apply("floordiv", row, many) if heads > 1 else row
        self.leaves = {
            "b": column[_ITEM],
            "h": column[_HEAD] if heads == 1 else graph.apply("add", column[_HEAD], head),
            "m": column[_ROW] if rows == 1 else graph.apply("add", column[_ROW], query),
            "n": graph.load("int", slot + 1, (item, key)),
            "M": column[_QUERIES],
            "N": column[_KEYS],
        }

    def load(self, kind: Literal["bool", "int", "float"], slot: int, names: str) -> int:
        """Return an element of a tensor; an index beyond a broadcast dimension reads its one."""
        return self.graph.load(kind, slot, [self.leaves[name] for name in names])


def _mask(graph: Graph, pair: _Pair, program: Program) -> int:
    stack: list[int] = []
    for instr in program:
        if instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(graph.apply(instr.op, first, second))
        elif instr.op == "not":
            stack.append(graph.apply("not", stack.pop()))
        elif instr.op != "tiles":  # which only says what the boolean before it will be
            stack.append(_LEAVES[instr.op](graph, pair, instr))
    return stack.pop()


def _band(graph: Graph, pair: _Pair, instr: Instr) -> int:
    left, right, anchored = (int(value) for value in instr.params)
    names = pair.leaves
    middle = names["m"]
    if anchored:
        middle = graph.apply("add", middle, graph.apply("sub", names["N"], names["M"]))
    found = graph.constant(True)
    if left >= 0:
        first = graph.apply("sub", middle, graph.constant(left))
        found = graph.apply("and", found, graph.apply("le", first, names["n"]))
    if right >= 0:
        last = graph.apply("add", middle, graph.constant(right))
        found = graph.apply("and", found, graph.apply("le", names["n"], last))
    return found


def _below(graph: Graph, pair: _Pair, instr: Instr) -> int:
    bound = (
        pair.load("int", instr.slots[0], "b")
        if instr.slots
        else graph.constant(int(instr.params[0]))
    )
    return graph.apply("lt", pair.leaves["n"], bound)


def _same_document(graph: Graph, pair: _Pair, instr: Instr) -> int:
    of_queries, of_keys = instr.slots
    return graph.apply("eq", pair.load("int", of_queries, "bm"), pair.load("int", of_keys, "bn"))


def _dense(_: Graph, pair: _Pair, instr: Instr) -> int:
    return pair.load("bool", instr.slots[0], "bhmn")


def _blocks(graph: Graph, pair: _Pair, instr: Instr) -> int:
    names = pair.leaves
    across, along = (graph.constant(int(size)) for size in instr.params)
    row = graph.apply("floordiv", names["m"], across)
    column = graph.apply("floordiv", names["n"], along)
    return graph.load("bool", instr.slots[0], (names["b"], names["h"], row, column))


def _expression(graph: Graph, pair: _Pair, instr: Instr, s: int | None = None) -> int:
    expr = with_slots(decode(str(instr.params[0])), instr.slots)
    leaves = pair.leaves if s is None else {**pair.leaves, "s": s}
    return graph.include(expr, leaves)[0]


_LEAVES: dict[str, Callable[[Graph, _Pair, Instr], int]] = {
    "band": _band,
    "below": _below,
    "same_document": _same_document,
    "dense": _dense,
    "blocks": _blocks,
    EXPR: _expression,
}


def _score(graph: Graph, pair: _Pair, program: Program) -> int:
    s = graph.leaf("s")
    for instr in program:
        s = _STEPS[instr.op](graph, pair, instr, s)
    return s


def _alibi(graph: Graph, pair: _Pair, instr: Instr, s: int) -> int:
    names = pair.leaves
    diagonal = graph.apply("add", names["m"], graph.apply("sub", names["N"], names["M"]))
    distance = graph.apply("abs", graph.apply("sub", diagonal, names["n"]))
    slope = pair.load("float", instr.slots[0], "bh")
    return graph.apply("sub", s, graph.apply("mul", slope, graph.apply("to_float", distance)))


def _softcap(graph: Graph, _: _Pair, instr: Instr, s: int) -> int:
    cap = graph.constant(float(instr.params[0]))
    return graph.apply("mul", cap, graph.apply("tanh", graph.apply("div", s, cap)))


def _bias(graph: Graph, pair: _Pair, instr: Instr, s: int) -> int:
    return graph.apply("add", s, pair.load("float", instr.slots[0], "bhmn"))


_STEPS: dict[str, Callable[[Graph, _Pair, Instr, int], int]] = {
    "alibi": _alibi,
    "softcap": _softcap,
    "bias": _bias,
    EXPR: _expression,
}
