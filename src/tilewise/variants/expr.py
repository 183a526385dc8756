"""Expressions: what a mask or a score says of one pair, as an immutable typed graph.

An ``Expr`` is a tuple of nodes in which arguments come before the nodes that use them, each value
once. Structurally equal expressions are equal, and the text form turns into the same expression
again. Nodes hold no tensor: a captured tensor is named by its slot.

Leaves: ``s`` (the score, float), ``b h m n`` (batch item, query head, query row, key), ``M N`` (the
numbers of rows and keys of that sequence), constants, and loads from captured tensors.

Integers are 64 bits wide and divide as Python's and torch's do: ``floordiv`` rounds down, ``mod``
has the sign of the divisor. Floats are of the type that the kernel computes in. Where a mask is
false its score does not count, and an index outside of its tensor reads the nearest element.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from tilewise.errors import InvalidArgument
from tilewise.variants.operations import OPS
from tilewise.variants.rows import Constant, Kind


class Node(NamedTuple):
    """One value.

    Args:
        op: a key of ``LEAVES`` or of ``operations.OPS``, ``const_<kind>`` or ``load_<kind>``.
        args: places of the arguments among the nodes; of a load, one index per dimension.
        value: of a constant; the slot of a load; else None.
    """

    op: str
    args: tuple[int, ...] = ()
    value: Constant | None = None


class Expr(NamedTuple):
    """A graph and the places of its results.

    Args:
        nodes: each after its arguments.
        outputs: one for a mask or score; the derivatives of a score have several.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]


LEAVES: dict[str, Kind] = {"s": "float", **dict.fromkeys("bhmnMN", "int")}
_LETTERS: dict[str, Kind] = {"b": "bool", "i": "int", "f": "float"}
_INT_BITS = 63


class Graph:
    """Collects nodes: equal ones once, constants folded, what changes nothing left out."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.kinds: list[Kind] = []
        self._places: dict[tuple[object, ...], int] = {}

    def leaf(self, name: str) -> int:
        """Return the place of a leaf of ``LEAVES``."""
        return self._place(Node(name), LEAVES[name])

    def constant(self, value: Constant) -> int:
        """Return the place of a constant: its kind is that of its Python type.

        Raises:
            InvalidArgument: an integer of more than 64 bits.
        """
        if isinstance(value, float) and value == 0.0 and math.copysign(1.0, value) < 0.0:
            # To Python -0.0 equals 0.0, and so would the expressions: no constant is -0.0.
            return self._place(Node("neg", (self.constant(0.0),)), "float")
        if isinstance(value, bool):
            return self._place(Node("const_bool", (), value), "bool")
        if isinstance(value, int):
            if not -(2**_INT_BITS) <= value < 2**_INT_BITS:
                raise InvalidArgument("constant", str(value), "an integer of 64 bits")
            return self._place(Node("const_int", (), value), "int")
        return self._place(Node("const_float", (), float(value)), "float")

    def load(self, kind: Kind, slot: int, indices: Sequence[int]) -> int:
        """Return the place of an element of a captured tensor, one integer index per dimension."""
        return self._place(Node(f"load_{kind}", tuple(indices), slot), kind)

    def apply(self, op: str, *args: int) -> int:
        """Return the place of an operation's value.

        Raises:
            InvalidArgument: arguments of a kind that it does not take.
        """
        kind = _kind_of(op, tuple([self.kinds[arg] for arg in args]))
        values = [self.constant_at(arg) for arg in args]
        if op in _REPEATING:
            simpler = self._simplified(op, args, values)
            if simpler is not None:
                return simpler
        fold = OPS[op].fold
        if fold is not None and None not in values:
            found = _folded(fold, values)
            if found is not None:
                return self.constant(found)
        if op in ("lt", "le"):
            certain = self._certain(op, args, values)
            if certain is not None:
                return self.constant(certain)
        return self._place(Node(op, args), kind)

    def include(
        self,
        expr: Expr,
        leaves: Mapping[str, int] = MappingProxyType({}),
        first: Mapping[int, int] = MappingProxyType({}),
    ) -> list[int]:
        """Add the nodes of an expression.

        Args:
            expr: what to add.
            leaves: places that replace leaves.
            first: places that loads from some slots get as one more index, the first.

        Returns:
            the places of its outputs here.
        """
        places: list[int] = []
        for node in expr.nodes:
            args = tuple([places[arg] for arg in node.args])
            if node.op in leaves:
                places.append(leaves[node.op])
            elif node.op in LEAVES:
                places.append(self.leaf(node.op))
            elif node.op.startswith("const_"):
                places.append(self._place(node, _stored_kind(node)))
            elif node.op.startswith("load_"):
                slot = slot_of(node)
                args = (first[slot], *args) if slot in first else args
                places.append(self.load(_stored_kind(node), slot, args))
            else:
                places.append(self.apply(node.op, *args))
        return [places[output] for output in expr.outputs]

    def expr(self, *outputs: int) -> Expr:
        """Return the expression with these results: what they need, in a canonical order."""
        order: dict[int, int] = {}
        for output in outputs:
            self._visit(output, order)
        nodes = []
        for place in order:
            op, args, value = node = self.nodes[place]
            nodes.append(Node(op, tuple([order[arg] for arg in args]), value) if args else node)
        return Expr(tuple(nodes), tuple([order[output] for output in outputs]))

    def _visit(self, root: int, order: dict[int, int]) -> None:
        """Depth first, without recursion: graphs may be deep."""
        stack = [root]
        while stack:
            place = stack[-1]
            waiting = [arg for arg in self.nodes[place].args if arg not in order]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if place not in order:
                order[place] = len(order)

    def _place(self, node: Node, kind: Kind) -> int:
        value = repr(node.value) if node.op == "const_float" else node.value  # nan is not nan
        key = (node.op, node.args, value)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = len(self.nodes)
            self.nodes.append(node)
            self.kinds.append(kind)
        return place

    def constant_at(self, place: int) -> Constant | None:
        """Return the value of the constant at a place; None if it is no constant."""
        node = self.nodes[place]
        return node.value if node.op.startswith("const_") else None

    def _certain(
        self, op: str, args: tuple[int, ...], values: list[Constant | None]
    ) -> bool | None:
        """Compare a position, which is 0 or more, with a number at or below all positions."""
        for at, number in enumerate(values):
            if number is None or self.nodes[args[1 - at]].op not in _POSITIONS:
                continue
            strictly = (op == "lt") == (at == 0)
            if number < 0 or (number == 0 and not strictly):
                return at == 0
        return None

    def _simplified(
        self, op: str, args: tuple[int, ...], values: list[Constant | None]
    ) -> int | None:
        """Return the place of an argument that the operation would only repeat."""
        first, second = values[0], values[1] if len(args) > 1 else None
        kind = self.kinds[args[-1]]
        match op:
            case "add" | "sub" | "or" | "xor" if kind == "int" and _is(second, 0):
                return args[0]
            case "add" | "or" | "xor" if kind == "int" and _is(first, 0):
                return args[1]
            case "mul" | "floordiv" | "div" if kind != "bool" and _is(second, 1):
                return args[0] if op != "floordiv" or kind == "int" else None
            case "mul" if _is(first, 1):
                return args[1]
            case "and" if kind == "bool" and (first is True or second is True):
                return args[1] if first is True else args[0]
            case "or" if kind == "bool" and (first is False or second is False):
                return args[1] if first is False else args[0]
            case "and" | "or" if kind == "bool" and (first is not None or second is not None):
                return args[0] if first is not None else args[1]
            case "and" | "or" | "min" | "max" if args[0] == args[1]:
                return args[0]
            case "not" if self.nodes[args[0]].op == "not":
                return self.nodes[args[0]].args[0]
            case "where" if first is not None:
                return args[1] if first else args[2]
            case "where" if args[1] == args[2]:
                return args[1]
            case "to_float" | "to_int" if kind == op.removeprefix("to_"):
                return args[0]
        return None


def slot_of(load: Node) -> int:
    """Return the slot of the tensor that a load reads."""
    assert load.value is not None
    return int(load.value)


def slots_of(expr: Expr) -> list[int]:
    """Return the slots of the tensors that an expression reads, in order."""
    return sorted({slot_of(node) for node in expr.nodes if node.op.startswith("load_")})


def with_slots(expr: Expr, slots: Sequence[int] | Mapping[int, int]) -> Expr:
    """Return an expression that reads the tensor in ``slots[slot]`` in place of each slot's."""
    nodes = [
        node._replace(value=slots[slot_of(node)]) if node.op.startswith("load_") else node
        for node in expr.nodes
    ]
    return expr._replace(nodes=tuple(nodes))


def _is(value: Constant | None, number: int) -> bool:
    return value is not None and not isinstance(value, bool) and value == number


def _folded(fold: Callable[..., Constant], values: list[Constant | None]) -> Constant | None:
    """Return a constant's value; None where Python has none or it does not fit 64 bits."""
    try:
        found = fold(*values)
    except (ArithmeticError, ValueError):
        return None
    if isinstance(found, int) and not -(2**_INT_BITS) <= found < 2**_INT_BITS:
        return None
    return found


_POSITIONS = frozenset("bhmn")

# Operations that may do nothing but repeat an argument.
_REPEATING = frozenset(
    [
        "add",
        "sub",
        "mul",
        "floordiv",
        "div",
        "and",
        "or",
        "xor",
        "min",
        "max",
        "not",
        "where",
        "to_float",
        "to_int",
    ]
)


def _taken(op: str, kind: Kind) -> tuple[Kind, ...]:
    """The kinds of an operation's arguments where those that may have any kind have this one."""
    return ("bool", kind, kind) if op == "where" else (kind,) * OPS[op].arity


# The kind of every operation's value, for each of the kinds that its arguments may have.
_KINDS = {
    (op, _taken(op, kind)): row.gives or kind for op, row in OPS.items() for kind in row.forms
}


def _kind_of(op: str, given: tuple[Kind, ...]) -> Kind:
    found = _KINDS.get((op, given))
    if found is None:
        row = OPS.get(op)
        if row is None:
            raise InvalidArgument("expression", f"the operation {op!r}", f"one of {', '.join(OPS)}")
        any_of = " or ".join(row.forms)
        wanted = ", ".join([any_of if x == "float" else x for x in _taken(op, "float")])
        raise InvalidArgument(
            f"expression ({op})",
            f"arguments of kinds {', '.join(given)}",
            f"({wanted}) of one kind",
        )
    return found


def _stored_kind(node: Node) -> Kind:
    """Return the kind of a constant or load, from its operation's name."""
    return _LETTERS[node.op.partition("_")[2][0]]


@lru_cache(maxsize=1024)
def kinds(expr: Expr) -> tuple[Kind, ...]:
    """Return the kind of every node.

    Raises:
        InvalidArgument: it is no expression: see ``check``.
    """
    found: list[Kind] = []
    for place, node in enumerate(expr.nodes):
        if any(not 0 <= arg < place for arg in node.args):
            raise InvalidArgument("expression", f"{node}", "arguments that come before it")
        given = [found[arg] for arg in node.args]
        if node.op in LEAVES and not given:
            found.append(LEAVES[node.op])
        elif node.op in ("const_bool", "const_int", "const_float") and not given:
            found.append(_stored_kind(node))
        elif node.op in ("load_bool", "load_int", "load_float"):
            if any(kind != "int" for kind in given) or not isinstance(node.value, int):
                raise InvalidArgument("expression", f"{node}", "a slot and integer indices")
            found.append(_stored_kind(node))
        else:
            found.append(_kind_of(node.op, tuple(given)))
    if not expr.outputs or any(not 0 <= output < len(found) for output in expr.outputs):
        raise InvalidArgument("expression", f"outputs {expr.outputs}", "places of its nodes")
    return tuple(found)


def encode(expr: Expr) -> str:
    """Return the text of an expression, without blanks: ``m;n;sub(0,1);const_int:3;lt(2,3)``.

    More than one output, or one that is not the last node, is named at the end: ``...;=4,2``.
    """
    parts = []
    for node in expr.nodes:
        value = "" if node.value is None else f":{_spelled(node.value)}"
        args = f"({','.join(map(str, node.args))})" if node.args else ""
        parts.append(f"{node.op}{value}{args}")
    if expr.outputs != (len(expr.nodes) - 1,):
        parts.append("=" + ",".join(map(str, expr.outputs)))
    return ";".join(parts)


def _spelled(value: Constant) -> str:
    return repr(value).lower()  # true, not True


@lru_cache(maxsize=1024)
def decode(text: str) -> Expr:
    """Return the expression that a text stands for: ``decode(encode(e)) == e``.

    Raises:
        InvalidArgument: the text is no expression.
    """
    nodes: list[Node] = []
    outputs: tuple[int, ...] | None = None
    try:
        for part in text.split(";"):
            if outputs is not None:
                raise ValueError
            if part.startswith("="):
                outputs = tuple([int(place) for place in part[1:].split(",")])
                continue
            head, _, rest = part.partition("(")
            if bool(rest) != part.endswith(")"):
                raise ValueError
            args = tuple([int(place) for place in rest[:-1].split(",")]) if rest else ()
            op, _, value = head.partition(":")
            nodes.append(Node(op, args, _value(op, value)))
    except (KeyError, ValueError):
        required = "nodes such as sub(0,1), separated by ;"
        raise InvalidArgument("expression", repr(text), required) from None
    expr = Expr(tuple(nodes), (len(nodes) - 1,) if outputs is None else outputs)
    kinds(expr)
    return expr


def _value(op: str, text: str) -> Constant | None:
    if not text:
        if op.startswith(("const_", "load_")):
            raise ValueError
        return None
    if op == "const_bool":
        return {"true": True, "false": False}[text]
    if op == "const_float":
        return float(text)
    if op == "const_int" or op.startswith("load_"):
        return int(text)
    raise ValueError
