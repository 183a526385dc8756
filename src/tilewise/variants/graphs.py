"""Programs as expressions: the nodes of a program in a graph, where positions may have other names.

``mask_expression`` is the boolean of a mask; the counterpart for scores is
``recognise.as_expression``. ``as_one`` is for a problem whose ``b``, ``h``, ``m`` and ``n`` mean
something else: places in a list (``gathered``), the item of a folded batch (``folded``), or places
in a part of the score matrix (``placing.py``).

Unless said otherwise the captured tensors are in kernel form (``lower.py``): a dimension of size 1
is read by an index past it, which gives its only element.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Literal, TypeAlias

from tilewise.variants.expr import Expr, Graph, decode, encode, slots_of, with_slots
from tilewise.variants.program import BY_USER, EXPR, RAW, Instr, Number, Program, slot_count
from tilewise.variants.rows import Kind

_LETTERS = "bhmn"


class Pair:
    """A graph, and the places in it of what a program calls b, h, m, n, M and N."""

    def __init__(self, graph: Graph, leaves: Mapping[str, int]) -> None:
        self.graph, self.leaves = graph, leaves

    def load(self, kind: Kind, slot: int, names: str) -> int:
        """Return an element of a tensor; an index beyond a broadcast dimension reads its one."""
        return self.graph.load(kind, slot, [self.leaves[name] for name in names])


def own_pair(graph: Graph) -> Pair:
    """Return the pair of a graph whose positions are what a program calls them."""
    return Pair(graph, {name: graph.leaf(name) for name in "bhmnMN"})


def as_one(
    pair: Pair, program: Program, kind: Literal["mask", "score"], also: int | None = None
) -> Instr:
    """Return a program as one expression, which reads its tensors and those of the leaves.

    It is fitted, its tensors in kernel form (``lower.py``); without ``raw``, and not empty unless
    ``also`` is there: the place of a condition that a mask must meet besides.
    """
    graph = pair.graph
    if kind == "score":
        found = _score(graph, pair, program)
    else:
        found = _mask(graph, pair, program) if program else graph.constant(True)
    return as_instruction(graph.expr(found if also is None else graph.apply("and", found, also)))


def as_instruction(expr: Expr) -> Instr:
    """Return an expression as an operation; the slots in its text count from 0."""
    slots = slots_of(expr)
    own = with_slots(expr, {slot: at for at, slot in enumerate(slots)})
    return Instr(EXPR, (encode(own),), tuple(slots))


def mask_expression(program: Program, ranks: Sequence[int] | None = None) -> Expr:
    """Return the boolean of a mask's program; its slots are the same.

    With ``ranks``, the dimensions of the captured tensors as the user gave them, the loads are
    those that the user wrote, and a tensor of a built-in mask is one boolean without an index.
    """
    graph = Graph()
    pair = own_pair(graph)
    return graph.expr(_mask(graph, pair, program, ranks) if program else graph.constant(True))


def exactly_sized(program: Program) -> frozenset[int]:
    """Slots whose tensors, lowered, have every position of a call or size 1, in each dimension."""
    named = {slot for instr in program if instr.op != EXPR for slot in instr.slots}
    return frozenset(named.difference(*(instr.slots for instr in program if instr.op == EXPR)))


def user_indices(graph: Graph, instr: Instr, position: int, rank: int) -> list[int]:
    """Return the indices that a user wrote for one tensor of an operation with the form BY_USER."""
    letters = {"below": "b", "same_document": ("bm", "bn")[position][-rank:]}.get(instr.op)
    if letters is not None:
        return [graph.leaf(letter) for letter in letters]
    return axis_indices(graph, instr.params[1:])


def axis_indices(graph: Graph, axes: Iterable[Number]) -> list[int]:
    """Return what indexes each dimension: a position, or the constant 0 for the code 4."""
    codes = [int(axis) for axis in axes]
    return [graph.leaf(_LETTERS[code]) if code < 4 else graph.constant(0) for code in codes]


def _as_written(graph: Graph, instr: Instr, ranks: Sequence[int]) -> int:
    """Return a leaf of a mask with the loads of tensors that the user gave."""
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


def _mask(graph: Graph, pair: Pair, program: Program, ranks: Sequence[int] | None = None) -> int:
    stack: list[int] = []
    for instr in program:
        if instr.op in ("and", "or"):
            second, first = stack.pop(), stack.pop()
            stack.append(graph.apply(instr.op, first, second))
        elif instr.op == "not":
            stack.append(graph.apply("not", stack.pop()))
        elif ranks is not None and instr.slots and instr.op not in (EXPR, "tiles"):
            stack.append(_as_written(graph, instr, ranks))
        elif instr.op != "tiles":  # which only says what the boolean before it will be
            stack.append(_LEAVES[instr.op](graph, pair, instr))
    return stack.pop()


def _band(graph: Graph, pair: Pair, instr: Instr) -> int:
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


def _below(graph: Graph, pair: Pair, instr: Instr) -> int:
    bound = (
        pair.load("int", instr.slots[0], "b")
        if instr.slots
        else graph.constant(int(instr.params[0]))
    )
    return graph.apply("lt", pair.leaves["n"], bound)


def _same_document(graph: Graph, pair: Pair, instr: Instr) -> int:
    of_queries, of_keys = instr.slots
    return graph.apply("eq", pair.load("int", of_queries, "bm"), pair.load("int", of_keys, "bn"))


def _dense(_: Graph, pair: Pair, instr: Instr) -> int:
    return pair.load("bool", instr.slots[0], "bhmn")


def _blocks(graph: Graph, pair: Pair, instr: Instr) -> int:
    names = pair.leaves
    across, along = (graph.constant(int(size)) for size in instr.params)
    row = graph.apply("floordiv", names["m"], across)
    column = graph.apply("floordiv", names["n"], along)
    return graph.load("bool", instr.slots[0], (names["b"], names["h"], row, column))


def _expression(graph: Graph, pair: Pair, instr: Instr) -> int:
    return graph.include(with_slots(decode(str(instr.params[0])), instr.slots), pair.leaves)[0]


_LEAVES: dict[str, Callable[[Graph, Pair, Instr], int]] = {
    "band": _band,
    "below": _below,
    "same_document": _same_document,
    "dense": _dense,
    "blocks": _blocks,
    EXPR: _expression,
}


def _score(graph: Graph, pair: Pair, program: Program) -> int:
    s = graph.leaf("s")
    for instr in program:
        loaded = None
        if instr.op in ("alibi", "bias"):
            names = "bh" if instr.op == "alibi" else "bhmn"
            loaded = pair.load("float", instr.slots[0], names)
        s = score_step(pair, instr, s, loaded)
    return s


def score_step(pair: Pair, instr: Instr, s: int, loaded: int | None) -> int:
    """Return what a step of a score, which is no ``raw``, makes of the score ``s``.

    ``loaded`` is the element of the tensor of a bias or of ALiBi's slopes; None for other steps.
    """
    graph, names = pair.graph, pair.leaves
    if loaded is None and instr.op == EXPR:
        return _expression(graph, Pair(graph, {**names, "s": s}), instr)
    if loaded is None:
        cap = graph.constant(float(instr.params[0]))
        return graph.apply("mul", cap, graph.apply("tanh", graph.apply("div", s, cap)))
    if instr.op == "bias":
        return graph.apply("add", s, loaded)
    diagonal = graph.apply("add", names["m"], graph.apply("sub", names["N"], names["M"]))
    distance = graph.apply("abs", graph.apply("sub", diagonal, names["n"]))
    return graph.apply("sub", s, graph.apply("mul", loaded, graph.apply("to_float", distance)))


_ITEM, _HEAD, _ROW, _QUERIES, _KEYS = range(5)  # the columns of ``places``


@lru_cache(maxsize=256)
def gathered(
    program: Program, kind: Literal["mask", "score"], rows: int, heads: int, block: int = 0
) -> Program:
    """Return the program of the small problem of gathered keys, as one expression.

    A call with key lists becomes calls of a small dense problem (``engine/gathered.py``). Its batch
    item ``b'`` is one list: the ``R`` query rows and the ``G`` heads of a group that share it. Its
    row ``m'`` is head ``m' % G`` of query row ``m' // G``, and its key ``n'`` is the ``n'``-th of
    the list. So a program reads what it calls b, h, m, n, M and N from two tensors:

    * ``places`` [B', 5]: batch item, first head, first row, and lengths M and N of the sequence;
    * ``lists`` [B', K]: the keys.

    Rows that have lists of their own may be one problem with the union of these
    (``engine/shared_lists.py``). Then a mask reads a third tensor, ``readers`` [B', K / block]: bit
    r of a block says whether query row r of the problem reads it.

    ``program`` is that of the call, fitted, its tensors in kernel form (``variants/lower.py``);
    without ``raw``, and not empty unless ``block`` is there: the keys in a block of ``readers``, 0
    where these hide nothing. R is ``rows``, G ``heads``.

    Returns:
        a program that reads the same tensors, then ``places`` and ``lists`` in two more slots, and
        ``readers`` in the next.
    """
    slot = slot_count(program)
    pair = _pair(slot, rows, heads)
    also = _reads(pair.graph, slot + 2, heads, block) if block else None
    return (as_one(pair, program, kind, also),)


def _reads(graph: Graph, slot: int, heads: int, block: int) -> int:
    """Return whether a row reads a key: a bit of what a tensor holds of the key's block."""
    item, row, key = (graph.leaf(name) for name in "bmn")
    query = graph.apply("floordiv", row, graph.constant(heads))
    bits = graph.load("int", slot, (item, graph.apply("floordiv", key, graph.constant(block))))
    bit = graph.apply("and", graph.apply("shr", bits, query), graph.constant(1))
    return graph.apply("eq", bit, graph.constant(1))


def _pair(slot: int, rows: int, heads: int) -> Pair:
    """Return the positions of a pair, read from ``places`` in a slot and ``lists`` in the next."""
    graph = Graph()
    item, row, key = (graph.leaf(name) for name in "bmn")
    column = [graph.load("int", slot, (item, graph.constant(at))) for at in range(5)]
    many = graph.constant(heads)
    head = graph.apply("mod", row, many) if rows > 1 else row
    query = graph.apply("floordiv", row, many) if heads > 1 else row
    leaves = {
        "b": column[_ITEM],
        "h": column[_HEAD] if heads == 1 else graph.apply("add", column[_HEAD], head),
        "m": column[_ROW] if rows == 1 else graph.apply("add", column[_ROW], query),
        "n": graph.load("int", slot + 1, (item, key)),
        "M": column[_QUERIES],
        "N": column[_KEYS],
    }
    return Pair(graph, leaves)


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
    """Return the program of calls in one batch: item b of call c is c * B + b.

    A batching rule (vmap) makes one call out of V calls, with a batch of V * B. A tensor with a row
    per batch item is folded as q is. An expression reads ``b`` modulo B. If a tensor differs from
    call to call (its slot is in ``varied``), it gets a new first dimension for the calls, and the
    expression indexes it with ``b // B``.
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
