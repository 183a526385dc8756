"""Masks and scores as the text of Triton code: their expressions, and the ranges of a mask.

An expression takes one line per value, operations as Triton or ``words`` has them.

Integers are int32 where intervals prove that they, and what they are made of, fit; else int64.
Floats are float32. A value has the shape that its leaves give it, so that what depends on the
query alone is computed once per query.

A range says which keys a mask allows a run of queries, or which queries a run of keys. It follows
the mask's program. Bands of the diagonal and lengths bound both sides. ``and`` and ``or`` combine
what is known of two masks. Nothing is known of other operations. A range is four numbers: the mask
hides every pair before ``low`` and from ``high`` on, and shows all of them in
[full_low, full_high).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tilewise.variants.expr import LEAVES, Expr, Node, kinds
from tilewise.variants.intervals import Bounds, Interval, every_bound
from tilewise.variants.operations import OPS
from tilewise.variants.program import Instr, Program
from tilewise.variants.rows import Kind

_SMALL = Interval(-(2**31), 2**31 - 1)
# No broadcast: Gluon has none of a number.
_WHOLE_TILE = "tl.where(m + n == m + n, {0}, {0})"
_TYPES: dict[Kind, str] = {"bool": "tl.int1", "float": "tl.float32"}
_SMALL_POSITIONS = 2**24
_UNKNOWN = ("zero", "zero", "zero", "size")


class Source(NamedTuple):
    """Conditions that the text of an expression is made for.

    Args:
        ranks: dimensions of the captured tensors, by slot.
        fitting: slots whose tensors are as long as the call needs, or of size 1, in every
            dimension that a position indexes.
        ranges: of the leaves.
    """

    ranks: tuple[int, ...]
    fitting: frozenset[int]
    ranges: tuple[tuple[str, Interval], ...]


class _Value(NamedTuple):
    """A value that has a name.

    Args:
        name: of it.
        kind: of it.
        known: its interval.
        bits: of an integer.
        node: what it is.
    """

    name: str
    kind: Kind
    known: Bounds
    bits: int
    node: Node


# Where the interval of a float is in 32 bits.
_TO_SMALL = "{0}.to(tl.int32)"
# Integer division where the divisor is positive, and where the dividend is not negative either.
_BY_POSITIVE = {
    "floordiv": ("words.floordiv_positive({0}, {1})", "{0} // {1}", "{0} >> {power}"),
    "mod": ("words.mod_positive({0}, {1})", "{0} % {1}", "{0} & {ones}"),
}
# Powers that torch has short forms for.
_POWERS = {
    2.0: "{0} * {0}",
    3.0: "({0} * {0}) * {0}",
    -1.0: "tl.div_rn(1.0, {0})",
    -2.0: "tl.div_rn(1.0, {0} * {0})",
}
# Functions without steps and of small slope: what they are given need not be rounded correctly.
_SMOOTH = ("tanh", "sigmoid")


def body(expr: Expr, source: Source) -> Iterator[str]:
    """Lines that give every node of an expression a name, and then its only output: ``result``.

    Args:
        expr: of one output. The names of its leaves, ``tensors`` and ``shapes`` are there.
        source: what it is made for.
    """
    (output,) = expr.outputs
    writer = _Writer(expr, source)
    yield from writer.lines()
    result = writer.values[output]
    if writer.depends(output, "s"):  # loads may find dimensions of size 1, but a score is whole
        yield f"result = {result.name}"
    else:
        yield f"result = {_WHOLE_TILE.format(result.name)}"


class _Writer:
    """Gives names to the values of an expression, in order."""

    def __init__(self, expr: Expr, source: Source) -> None:
        self.nodes = expr.nodes
        self.source = source
        self.kinds = kinds(expr)
        self.known = every_bound(expr, dict(source.ranges))
        self.values: list[_Value] = []
        self.leaves: list[set[str]] = []
        for node in expr.nodes:
            own = {node.op} if node.op in LEAVES else set()
            self.leaves.append(own.union(*(self.leaves[arg] for arg in node.args)))
        self.users: list[list[str]] = [[] for _ in expr.nodes]
        for node in expr.nodes:
            for arg in node.args:
                self.users[arg].append(node.op)
        for output in expr.outputs:
            self.users[output].append("output")

    def lines(self) -> Iterator[str]:
        for place, (node, kind) in enumerate(zip(self.nodes, self.kinds, strict=True)):
            known = self.known[place]
            bits = 32 if kind == "int" and _is_small(known) else 64
            value = _Value(f"v{place}", kind, known, bits, node)
            if node.op.startswith("load_"):
                yield from self._load(value)
            else:
                yield f"{value.name} = {self._text(place, value)}"
            self.values.append(value)

    def depends(self, place: int, leaves: str) -> bool:
        """Return whether a value is made of one of these leaves."""
        return any(leaf in leaves for leaf in self.leaves[place])

    def _text(self, place: int, value: _Value) -> str:
        node, kind = value.node, value.kind
        if node.op in LEAVES:
            return "s" if node.op == "s" else f"tl.cast({node.op}, tl.int{value.bits})"
        if node.op.startswith("const_"):
            assert node.value is not None
            return f"tl.cast({_literal(node.value)}, {_type(kind, value.bits)})"
        args = [self.values[arg] for arg in node.args]
        whole = [arg.bits for arg in (*args, value) if arg.kind == "int"]
        bits = max(whole, default=value.bits)
        texts = [_wide(arg, bits) for arg in args]
        row = self._row(place, value, args)
        found = row.format(
            *texts,
            bits=bits,
            type=f"tl.int{bits}",
            **_divisor(args[-1]),
        )
        if OPS[node.op].gives == "bool" and not self.depends(place, "smn"):
            return f"words.truth({found})"
        return f"({found}).to(tl.int32)" if kind == "int" and bits > value.bits else found

    def _row(self, place: int, value: _Value, args: Sequence[_Value]) -> str:
        """The text of an operation, the short one where what is known of its arguments allows."""
        op, last = value.node.op, args[-1]
        if op in _BY_POSITIVE and last.kind == "int":
            return _whole_division(op, *args) or OPS[op].forms["int"].triton
        if op == "to_int" and value.bits == 32 and last.kind == "float":
            return _TO_SMALL
        number = last.node.value if last.node.op == "const_float" else None
        if op == "pow" and number in _POWERS:
            return _POWERS[float(number)]
        if op == "div" and number is not None:
            divisor = float(number)
            mild = 2.0**-60 < abs(divisor) < 2.0**60  # the inverse is far from the ends of float32
            exact = abs(math.frexp(divisor)[0]) == 0.5  # a power of two
            if mild and (exact or self._is_smoothed(place)):
                return f"{{0}} * {1.0 / divisor!r}"
        return OPS[op].forms[last.kind].triton

    def _is_smoothed(self, place: int) -> bool:
        """Return whether nothing but smooth functions uses a value."""
        return set(self.users[place]) <= set(_SMOOTH)

    def _load(self, value: _Value) -> Iterator[str]:
        node, name = value.node, value.name
        slot, indices = int(node.value or 0), [self.values[arg] for arg in node.args]
        sizes, strides = _numbers(self.source.ranks, slot)
        fits = slot in self.source.fitting
        yield f"{name} = tl.cast(0, tl.int64)"
        kept = [at for at, index in enumerate(indices) if fits and index.node.op in ("m", "n")]
        for at, index in enumerate(indices):
            leaf = fits and index.node.op in ("b", "h", "m", "n")
            word = "moved" if leaf else "nearest"
            where = f"shapes[{sizes + at}], shapes[{strides + at}]"
            yield f"{name} = words.{word}({name}, {index.name}, {where})"
        masked = ""
        if kept:
            yield f"k{name} = tl.cast(True, tl.int1)"
            for at in kept:
                size = f"shapes[{sizes + at}]"
                yield f"k{name} = words.inside(k{name}, {indices[at].name}, {size})"
            masked = f", mask=k{name}, other=0"
        loaded = f"tl.load(tensors[{slot}] + {name}{masked})"
        yield f"{name} = {loaded}.to({_type(value.kind, value.bits)})"


def _numbers(ranks: Sequence[int], slot: int) -> tuple[int, int]:
    """Return where the sizes and the strides of a slot begin among the shape numbers."""
    start = 2 * sum(ranks[:slot])
    return start, start + ranks[slot]


def place_in_tensor(expr: Expr, slot: int, source: Source) -> Iterator[str]:
    """Lines that give ``result``: the element that a load reads, counted in a contiguous tensor.

    Args:
        expr: its outputs are the indices, one per dimension; none of a number.
        slot: of the tensor.
        source: what it is made for.
    """
    yield "result = tl.cast(0, tl.int64)"
    if expr.outputs:
        writer = _Writer(expr, source)
        yield from writer.lines()
        sizes, _ = _numbers(source.ranks, slot)
        for at, output in enumerate(expr.outputs):
            index = writer.values[output].name
            yield f"result = words.element(result, {index}, shapes[{sizes + at}])"
    yield f"result = {_WHOLE_TILE.format('result')}"


def _is_small(known: Bounds) -> bool:
    return isinstance(known, Interval) and known.low >= _SMALL.low and known.high <= _SMALL.high


def _type(kind: Kind, bits: int) -> str:
    return f"tl.int{bits}" if kind == "int" else _TYPES[kind]


def _wide(arg: _Value, bits: int) -> str:
    return f"{arg.name}.to(tl.int{bits})" if arg.kind == "int" and arg.bits < bits else arg.name


def _literal(value: bool | int | float) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _whole_division(op: str, a: _Value, b: _Value) -> str | None:
    """Return the text of a division by a positive divisor; None for another one."""
    if not isinstance(b.known, Interval) or b.known.low <= 0:
        return None
    by_any, by_natural, by_power = _BY_POSITIVE[op]
    if _divisor(b):
        return by_power
    natural = isinstance(a.known, Interval) and a.known.low >= 0
    return by_natural if natural else by_any


def _divisor(value: _Value) -> dict[str, int]:
    """Return a constant power of two's exponent and the number before it; else an empty dict."""
    number = value.node.value
    if value.node.op != "const_int" or number is None or number <= 0 or int(number).bit_count() > 1:
        return {}
    return {"power": int(number).bit_length() - 1, "ones": int(number) - 1}


def range_lines(
    program: Program, ranks: Sequence[int], *, of_keys: bool, largest: int
) -> Iterator[str]:
    """Yield the body of ``keys_of`` (of queries m0..m1-1) or of ``queries_of`` (of keys n0..n1-1).

    Args:
        program: of a mask, not empty.
        ranks: dimensions of its captured tensors, by slot.
        of_keys: which of the two.
        largest: above every position.
    """
    # A bound further away than the ends of any row or column is none.
    most = 2 * max(largest, _SMALL_POSITIONS)
    whole = "tl.int32" if largest <= _SMALL_POSITIONS else "tl.int64"
    first, end = ("m0", "m1") if of_keys else ("n0", "n1")
    yield f"first, last = tl.cast({first}, {whole}), tl.cast({end}, {whole}) - 1"
    yield f"zero, size = tl.cast(0, {whole}), tl.cast({'N' if of_keys else 'M'}, {whole})"
    yield f"more = tl.cast(N, {whole}) - tl.cast(M, {whole})"
    stack: list[int] = []
    for at, instr in enumerate(program):
        if instr.op == "tiles":
            continue
        if instr.op in ("and", "or"):
            second, one = stack.pop(), stack.pop()
            text = f"words.range_{instr.op}(r{one}, r{second})"
        elif instr.op == "not":
            stack.pop()
            text = _tuple(_UNKNOWN)
        elif instr.op == "below":
            length = _length(instr, ranks, most)
            yield f"length{at} = tl.cast({length}, {whole})"
            if of_keys:
                text = _tuple(("zero", "zero", f"length{at}", f"length{at}"))
            else:
                shown = f"tl.where({{0}} < length{at}, size, 0)"
                text = _tuple(("zero", "zero", shown.format("last"), shown.format("first")))
        elif instr.op == "band":
            text = _tuple(_band(instr, of_keys, most))
        else:
            text = _tuple(_UNKNOWN)
        yield f"r{at} = {text}"
        stack.append(at)
    yield f"result = words.range_within(r{stack.pop()}, size)"


def _tuple(parts: Sequence[str]) -> str:
    return f"({', '.join(parts)})"


def _length(instr: Instr, ranks: Sequence[int], most: int) -> str:
    if not instr.slots:
        return str(min(int(instr.params[0]), most))
    (slot,) = instr.slots
    loaded = f"tl.load(tensors[{slot}] + words.clamped(b, shapes[{2 * sum(ranks[:slot])}]))"
    return f"words.clamped({loaded}, {most})"


def _band(instr: Instr, of_keys: bool, most: int) -> tuple[str, ...]:
    """Return the range of the band a + m - left <= n <= a + m + right."""
    before, after, anchor = (int(number) for number in instr.params)
    if not of_keys:  # n - a - right <= m <= n - a + left
        before, after = after, before
    moved = "" if not anchor else " + more" if of_keys else " - more"
    low, full_low, full_high, high = "zero", "zero", "size", "size"
    if 0 <= before < most:
        low, full_low = (f"{name}{moved} - {before}" for name in ("first", "last"))
    if 0 <= after < most:
        high, full_high = (f"{name}{moved} + {after + 1}" for name in ("last", "first"))
    return low, full_low, full_high, high
