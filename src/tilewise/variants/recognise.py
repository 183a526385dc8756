"""Turn expressions into programs: operations that kernels know, and the rest as it is.

A mask is split at ``and``, ``or`` and ``not``, unless that makes too many parts. A comparison
becomes a band of the diagonal, a length or an equality of documents where it is one. A boolean
tensor indexed by distinct positions becomes the dense operation.

A score is undone from its last step back, as long as the step is known: an addition of a tensor
indexed by positions, ALiBi's penalty, or a soft cap. The rest stays an expression (the operation
``expr``), which kernels interpret.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from tilewise.torch_private import constant_while_compiling
from tilewise.variants.expr import Expr, Graph, Node, decode, encode
from tilewise.variants.graphs import as_instruction, axis_indices, own_pair, score_step
from tilewise.variants.program import BY_USER, LARGEST_COUNT, Instr, Program, apart
from tilewise.variants.program import decode as program_of
from tilewise.variants.program import encode as program_text

_AXES = {"b": 0, "h": 1, "m": 2, "n": 3}
_FIRST = 4  # the axis code of a dimension whose index is the constant 0
_MOST = 32  # instructions of a mask that kernels take; a longer one stays one expression
_MOST_STEPS = 8  # of a score; what comes before the last ones stays one expression


class Recognised(NamedTuple):
    """A program, and what it captures."""

    # Every operation has slots of its own: it wants its tensors in a form of its own.
    program: Program
    sources: tuple[int, ...]  # for each of its slots, that of the expression
    text: str  # of the program


def mask_program(expr: Expr) -> Recognised:
    """Return the program of a mask's expression."""
    if torch.compiler.is_compiling():
        return Recognised(*_while_compiling("mask", encode(expr)))
    return _mask_program(expr)


def score_program(expr: Expr, learned: tuple[bool, ...] = ()) -> Recognised:
    """Return the program of a score's expression.

    ``learned``: for every slot, whether a gradient of its tensor is wanted.
    """
    if torch.compiler.is_compiling():
        return Recognised(*_while_compiling("score", encode(expr), learned))
    return _score_program(expr, learned)


@constant_while_compiling
def _while_compiling(
    what: str, text: str, learned: tuple[bool, ...] = (), ranks: tuple[int, ...] = ()
) -> tuple[Program, tuple[int, ...], str]:
    """The fields of the same for a text, which is a constant to torch.compile."""
    if what == "mask":
        found = _mask_program(decode(text))
    elif what == "score":
        found = _score_program(decode(text), learned)
    else:
        steps = tuple([step for token in text.split() for step in program_of(token)])
        found = _score_program(as_expression(steps, ranks), learned)
    program, sources, own = found
    return program, sources, own


@lru_cache(maxsize=1024)
def _mask_program(expr: Expr) -> Recognised:
    nodes, place = expr.nodes, expr.outputs[0]
    if nodes[place].op == "const_bool" and nodes[place].value is True:
        return Recognised((), (), "")
    if _size(expr) <= 4 * _MOST:  # some of it may join
        program = _mask(expr, place)
        if len(program) <= _MOST:
            return _apart(program)
    return _apart((_part(expr, place),))


def _size(expr: Expr) -> int:
    """Return how many instructions ``_mask`` makes at most: of a value used twice, twice its own.

    A mask that uses its own values again and again has more of them than can be written down.
    """
    sizes: list[int] = []
    for node in expr.nodes:
        inner = node.args if node.op in ("and", "or", "not") else ()
        sizes.append(1 + sum([sizes[arg] for arg in inner]))
    return sizes[expr.outputs[0]]


@lru_cache(maxsize=1024)
def _score_program(expr: Expr, learned: tuple[bool, ...]) -> Recognised:
    return _apart(_score(expr, expr.outputs[0], learned))


def in_one_step(program: Program, ranks: tuple[int, ...], learned: tuple[bool, ...]) -> Recognised:
    """A score's program whose steps are computed in one piece, as far as kernels do not know them.

    ``ranks`` are the dimensions of every tensor that it captures; ``learned``: whether its gradient
    is wanted.
    """
    if torch.compiler.is_compiling():
        return Recognised(*_while_compiling("steps", program_text(program), learned, ranks))
    return _score_program(as_expression(program, ranks), learned)


def _apart(program: Program) -> Recognised:
    own, sources = apart(program)
    return Recognised(own, sources, program_text(own))


def _mask(expr: Expr, place: int) -> Program:
    node = expr.nodes[place]
    if node.op in ("and", "or"):
        left, right = (_mask(expr, arg) for arg in node.args)
        joined = _joined_band(left, right) if node.op == "and" else None
        return (joined,) if joined else (*left, *right, Instr(node.op))
    if node.op == "not":
        return (*_mask(expr, node.args[0]), Instr("not"))
    leaf = _leaf(expr, node)
    return (leaf if leaf is not None else _part(expr, place),)


def _joined_band(left: Program, right: Program) -> Instr | None:
    """Join two bands that are open at opposite sides into one."""
    if len(left) != 1 or len(right) != 1 or left[0].op != "band" or right[0].op != "band":
        return None
    (a, b, anchor), (c, d, other) = (tuple(map(int, x[0].params)) for x in (left, right))
    if anchor != other or (a >= 0 and c >= 0) or (b >= 0 and d >= 0):
        return None
    return Instr("band", (max(a, c), max(b, d), anchor))


def _leaf(expr: Expr, node: Node) -> Instr | None:
    if node.op == "const_bool":  # False: True is nowhere but alone
        return Instr("below", (0,))
    if node.op in ("lt", "le"):
        return _length(expr, node) or _distance(expr, node) or _bound(expr, node)
    if node.op == "eq":
        return _documents(expr, node)
    if node.op == "load_bool":
        axes = _positions(expr, node)
        if axes is not None and node.value is not None:
            return Instr("dense", (BY_USER, *axes), (int(node.value),))
    return None


def _bound(expr: Expr, node: Node) -> Instr | None:
    """``n <= m + k``, ``n >= m - k`` (with or without N - M on the right), or ``n < k``."""
    low, high = node.args
    first, second = _affine(expr.nodes, low), _affine(expr.nodes, high)
    if first is None or second is None:
        return None
    rest = _difference(second, first)  # not below zero where the comparison holds
    spare = rest.constant - (1 if node.op == "lt" else 0)
    if (rest.m, rest.n, rest.keys, rest.queries) == (0, -1, 0, 0) and not (rest.b or rest.h):
        return Instr("below", (min(max(spare + 1, 0), LARGEST_COUNT),))
    if not 0 <= spare <= LARGEST_COUNT:
        return None
    anchor = {(0, 0): 0, (1, -1): 1, (-1, 1): 1}.get((rest.keys, rest.queries))
    if anchor is None or rest.b or rest.h:
        return None
    if (rest.m, rest.n) == (1, -1) and rest.keys >= 0:
        return Instr("band", (-1, spare, anchor))
    if (rest.m, rest.n) == (-1, 1) and rest.keys <= 0:
        return Instr("band", (spare, -1, anchor))
    return None


def _distance(expr: Expr, node: Node) -> Instr | None:
    """``abs(n - m) <= k``, with or without N - M."""
    low, high = node.args
    inner = expr.nodes[low]
    if inner.op != "abs" or expr.nodes[high].op != "const_int":
        return None
    offset = _affine(expr.nodes, inner.args[0])
    width = expr.nodes[high].value
    assert width is not None
    spare = int(width) - (1 if node.op == "lt" else 0)
    if offset is None or not 0 <= spare <= LARGEST_COUNT:
        return None
    if offset.m > 0:
        offset = _Affine(*(-x for x in offset))
    for anchor in (0, 1):
        if offset == _Affine(0, 0, -1, 1, -anchor, anchor, 0):
            return Instr("band", (spare, spare, anchor))
    return None


def _length(expr: Expr, node: Node) -> Instr | None:
    """``n < lengths[b]``."""
    low, high = (expr.nodes[arg] for arg in node.args)
    if node.op != "lt" or low.op != "n" or high.op != "load_int" or high.value is None:
        return None
    if [expr.nodes[index].op for index in high.args] != ["b"]:
        return None
    return Instr("below", (BY_USER,), (int(high.value),))


def _documents(expr: Expr, node: Node) -> Instr | None:
    """``ids[b, m] == ids[b, n]``, with or without b."""
    sides = [expr.nodes[arg] for arg in node.args]
    if any(side.op != "load_int" for side in sides):
        return None
    indexed = [[expr.nodes[index].op for index in side.args] for side in sides]
    if indexed[0][-1:] == ["n"]:
        sides, indexed = sides[::-1], indexed[::-1]
    if indexed[0] not in (["m"], ["b", "m"]) or indexed[1] not in (["n"], ["b", "n"]):
        return None
    slots = tuple([int(side.value) for side in sides if side.value is not None])
    return Instr("same_document", (BY_USER,), slots)


def _positions(expr: Expr, load: Node) -> tuple[int, ...] | None:
    """Return the position that indexes each dimension; None unless distinct, or the constant 0."""
    axes = []
    for index in load.args:
        node = expr.nodes[index]
        if node.op == "const_int" and node.value == 0:
            axes.append(_FIRST)
        elif node.op in _AXES:
            axes.append(_AXES[node.op])
        else:
            return None
    positions = [axis for axis in axes if axis != _FIRST]
    return tuple(axes) if positions and len(set(positions)) == len(positions) else None


def _score(expr: Expr, place: int, learned: Sequence[bool]) -> Program:
    steps, places = [], [place]
    while expr.nodes[places[-1]].op != "s":
        known = _last_step(expr, expr.nodes[places[-1]], learned)
        if known is None:
            steps.append(_part(expr, places[-1]))
            break
        places.append(known[0])
        steps.append(known[1])
    if len(steps) > _MOST_STEPS:
        last = _MOST_STEPS - 1
        steps = [*steps[:last], _part(expr, places[last])]
    return tuple(steps[::-1])


def _last_step(expr: Expr, node: Node, learned: Sequence[bool]) -> tuple[int, Instr] | None:
    """Return what a score was before its last step, and that step, if kernels know it."""
    if node.op == "add":
        for inner, added in (node.args, node.args[::-1]):
            term = expr.nodes[added]
            axes = _positions(expr, term) if term.op == "load_float" else None
            if axes is not None and term.value is not None and _has_score(expr, inner):
                return inner, Instr("bias", (BY_USER, *axes), (int(term.value),))
    if node.op == "sub" and _has_score(expr, node.args[0]):
        slot, axes = _penalty(expr, expr.nodes[node.args[1]])
        if axes and not (slot < len(learned) and learned[slot]):
            return node.args[0], Instr("alibi", (BY_USER, *axes), (slot,))
    if node.op == "mul":
        for factor, curve in (node.args, node.args[::-1]):
            cap, inner_place = _cap(expr, factor, curve)
            if cap > 0:
                return inner_place, Instr("softcap", (cap,))
    return None


def _has_score(expr: Expr, place: int) -> bool:
    """Return whether a value depends on ``s``."""
    stack, seen = [place], set()
    while stack:
        at = stack.pop()
        if expr.nodes[at].op == "s":
            return True
        if at not in seen:
            seen.add(at)
            stack.extend(expr.nodes[at].args)
    return False


def _penalty(expr: Expr, node: Node) -> tuple[int, tuple[int, ...]]:
    """Slot and axes of ``slopes[h] * abs(m + N - M - n)`` (or ``slopes[b, h]``); no axes if not."""
    if node.op != "mul":
        return 0, ()
    for one, other in (node.args, node.args[::-1]):
        slopes, distance = expr.nodes[one], expr.nodes[other]
        if slopes.op != "load_float" or distance.op != "to_float":
            continue
        indexed = [expr.nodes[index].op for index in slopes.args]
        inner = expr.nodes[distance.args[0]]
        if indexed not in (["h"], ["b", "h"]) or inner.op != "abs" or slopes.value is None:
            continue
        offset = _affine(expr.nodes, inner.args[0])
        if offset in (_Affine(0, 0, 1, -1, 1, -1, 0), _Affine(0, 0, -1, 1, -1, 1, 0)):
            return int(slopes.value), tuple([_AXES[letter] for letter in indexed])
    return 0, ()


def _cap(expr: Expr, factor: int, curve: int) -> tuple[float, int]:
    """The cap of ``cap * tanh(x / cap)`` and the place of x; a cap of 0 if it is something else."""
    cap, tanh = expr.nodes[factor], expr.nodes[curve]
    if cap.op != "const_float" or tanh.op != "tanh":
        return 0.0, 0
    ratio = expr.nodes[tanh.args[0]]
    if ratio.op != "div" or ratio.args[1] != factor or not _has_score(expr, ratio.args[0]):
        return 0.0, 0
    assert cap.value is not None
    return (float(cap.value), ratio.args[0]) if 0 < cap.value < float("inf") else (0.0, 0)


class _Affine(NamedTuple):
    """b, h, m, n, keys (N), queries (M) and 1, each with its factor."""

    b: int
    h: int
    m: int
    n: int
    keys: int
    queries: int
    constant: int


_UNITS = {
    name: _Affine(*(int(at == place) for at in range(7)))
    for place, name in enumerate(("b", "h", "m", "n", "N", "M"))
}


_LINEAR = frozenset(("add", "sub", "neg", "mul"))


def _affine(nodes: Sequence[Node], place: int) -> _Affine | None:
    """An integer as a sum of positions with whole factors; None where it is something else.

    Without recursion, and each value once: ``x = x + x`` may be written many times.
    """
    known: dict[int, _Affine | None] = {}
    stack = [place]
    while stack:
        node = nodes[stack[-1]]
        inner = node.args if node.op in _LINEAR else ()
        waiting = [arg for arg in inner if arg not in known]
        if waiting:
            stack.extend(waiting)
        else:
            known[stack.pop()] = _sum(node, [known[arg] for arg in inner])
    return known[place]


def _sum(node: Node, parts: Sequence[_Affine | None]) -> _Affine | None:
    """Return ``_affine`` of a node whose arguments are these."""
    if node.op in _UNITS:
        return _UNITS[node.op]
    if node.op == "const_int":
        assert node.value is not None
        return _Affine(0, 0, 0, 0, 0, 0, int(node.value))
    if not parts:
        return None
    first, second = parts[0], parts[-1]
    if first is None or second is None:
        return None
    if node.op == "neg":
        return _Affine(*(-x for x in first))
    if node.op == "add":
        return _Affine(*(x + y for x, y in zip(first, second, strict=True)))
    if node.op == "sub":
        return _difference(first, second)
    for constant, other in ((first, second), (second, first)):
        if not any(constant[:-1]):
            return _Affine(*(constant.constant * x for x in other))
    return None


def _difference(one: _Affine, other: _Affine) -> _Affine:
    return _Affine(*(x - y for x, y in zip(one, other, strict=True)))


def _part(expr: Expr, place: int) -> Instr:
    """A part of an expression as an operation of its own."""
    graph = Graph()
    (output,) = graph.include(Expr(expr.nodes[: place + 1], (place,)))
    return as_instruction(graph.expr(output))


def as_expression(program: Program, ranks: Sequence[int]) -> Expr:
    """The expression of a score's program, to be computed in one piece; its slots are the same.

    ``ranks`` are the dimensions of every tensor that it captures.
    """
    graph = Graph()
    pair, s = own_pair(graph), graph.leaf("s")
    for instr in program:
        loaded = None
        if instr.op in ("alibi", "bias"):
            (slot,) = instr.slots
            # A tensor that broadcasts: an index past a dimension of size 1 reads its only element.
            last = 4 if instr.op == "bias" else 2
            axes = instr.params[1:] or range(last - ranks[slot], last)
            loaded = graph.load("float", slot, axis_indices(graph, axes))
        s = score_step(pair, instr, s, loaded)
    return graph.expr(s)
