"""Random masks and scores as trees of source text, and the tensors that they capture.

What is drawn is defined everywhere: an index stays inside of its tensor, a logarithm and a root
get what is positive, and no number grows beyond what float16 holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from tests.fuzz.case import PLAIN, Layout, Node, Table

_MOST_TABLES = 5  # of one variant: the core takes 16 loads, and one table may be read thrice
_MOST_ELEMENTS = 1 << 20  # of what an expression reads, before a last small dimension


class Trees:
    """Draws masks and scores for a problem of B, Hq, M, N and the keys that every sequence has."""

    def __init__(
        self, random: Random, extents: tuple[int, int, int, int], least: int, ragged: bool
    ) -> None:
        self.random = random
        self.extents = dict(zip("bhmn", extents, strict=True))
        self.least, self.ragged = least, ragged
        self.tables: list[Table] = []
        self.may_learn = False

    # ---- tensors

    def table(
        self,
        kind: str,
        sizes: tuple[int, ...],
        low: float = -1.0,
        high: float = 1.0,
        how: str = "",
        learn: bool = True,
    ) -> str:
        """The name of a new tensor."""
        random = self.random
        layout = PLAIN
        if sizes and random.random() < 0.25:
            last = min(3, len(sizes))
            order = random.sample(range(last), last)
            pads = tuple(random.choice((0, 0, 1, 5)) for _ in order)
            expanded = tuple(dim for dim in range(len(sizes)) if random.random() < 0.15)
            step, offset = random.choice((1, 1, 2)), random.choice((0, 1, 7))
            layout = Layout(tuple(order), pads, step, offset, expanded)
        grad = kind == "float" and learn and self.may_learn and random.random() < 0.5
        # The number of a table without dimensions is torch's own, which rounds what it makes of it.
        wide = random.random() < 0.3 or not sizes
        self.tables.append(Table(kind, sizes, low, high, wide, grad, how, layout))
        return f"t{len(self.tables) - 1}"

    def broadcastable(self) -> tuple[int, ...]:
        """A shape that broadcasts to [B, Hq, M, N]."""
        random = self.random
        sizes = [n if random.random() < 0.5 else 1 for n in self.extents.values()]
        return tuple(sizes[random.choice((0, 0, 0, 1, 2, 3)) :])

    def load(self, kind: str, depth: int) -> Node:
        """An element of a new tensor, or of one that is there."""
        random = self.random
        fitting = [i for i, t in enumerate(self.tables) if t.kind == kind and t.how == "read"]
        full = len(self.tables) >= _MOST_TABLES
        if fitting and (full or random.random() < 0.3):
            place = random.choice(fitting)
            name, sizes = f"t{place}", self.tables[place].sizes
            if all(sizes):
                indices = tuple(self.index(size, depth) for size in sizes)
                return self._read(kind, name, indices)
        if full:
            return _SPARE[kind]
        rank = random.choice((0, 1, 1, 1, 2, 2, 3)) if kind == "float" else random.choice((1, 1, 2))
        indices_: list[Node] = []
        sizes_: list[int] = []
        for _ in range(rank):
            letter = random.choice("bhmn")
            how = random.random()
            last = max(self.extents["n"] - 1, 0)
            room = _MOST_ELEMENTS // max(1, math.prod(sizes_))
            if how < 0.6 and self.extents[letter] <= room:
                sizes_.append(self.extents[letter])
                indices_.append(Node("int", letter))
            elif 0.6 <= how < 0.75 and self.extents["m"] + last <= room:
                sizes_.append(self.extents["m"] + last)
                indices_.append(Node("int", f"m - n + {last}"))
            else:
                sizes_.append(random.choice((1, 2, 3, 7, 16)))
                indices_.append(self.index(sizes_[-1], depth))
        low, high = (-1.0, 1.0) if kind != "int" else (0, random.choice((1, 3, 60)))
        name = self.table(kind, tuple(sizes_), low, high, "read")
        return self._read(kind, name, tuple(indices_))

    def _read(self, kind: str, name: str, indices: tuple[Node, ...]) -> Node:
        if not indices:
            return Node(kind, f"{name}[()]")
        return Node(kind, f"{name}[{', '.join('{}' for _ in indices)}]", indices)

    def index(self, size: int, depth: int) -> Node:
        """A place in a dimension of this size."""
        if self.random.random() < 0.5:
            return Node("int", "({}) % " + str(size), (self.integer(max(0, depth - 1)),))
        clamped = "torch.clamp({}, 0, " + str(size - 1) + ")"
        return Node("int", clamped, (self.integer(max(0, depth - 1), computed=True),))

    # ---- integers and booleans

    def integer(self, depth: int, computed: bool = False) -> Node:
        """An integer of a pair; ``computed`` is never a constant."""
        random = self.random
        if depth <= 0 or random.random() < 0.3:
            if not computed and random.random() < 0.15:
                return Node("int", str(random.choice((0, 1, 2, 5, 31))))
            return Node("int", *_leaf(random))
        a = self.integer(depth - 1, computed=True)
        if random.random() < 0.12:
            return self.load("int", depth - 1)
        few = random.choice((1, 2, 3, 4, 7, 8, 16))
        form = random.choice(
            (
                "({} + {})",
                "({} - {})",
                "abs({})",
                f"({{}} * {few})",
                f"({{}} // {few})",
                f"({{}} % {few})",
                "minimum({}, {})",
                "maximum({}, {})",
                "where({}, {}, {})",
                f"({{}} ^ {few})",
                f"({{}} & {few})",
                f"({{}} | {few})",
                f"({{}} >> {few % 5})",
                f"({{}} << {few % 3})",
                "(-{})",
            )
        )
        if form.startswith("where"):
            return Node("int", form, (self.boolean(depth - 1), a, self.integer(depth - 1)))
        count = form.count("{}")
        return Node("int", form, (a, *[self.integer(depth - 1) for _ in range(count - 1)]))

    def boolean(self, depth: int, floats: Callable[[], Node] | None = None) -> Node:
        """A condition of a pair."""
        random = self.random
        if depth > 0 and random.random() < 0.45:
            form = random.choice(("({} & {})", "({} | {})", "({} ^ {})", "(~{})"))
            arms = form.count("{}")
            return Node("bool", form, tuple(self.boolean(depth - 1) for _ in range(arms)))
        chance = random.random()
        if chance < 0.1:
            return self.load("bool", depth)
        if chance < 0.2 and floats is not None:
            return Node("bool", "({} > {})", (floats(), Node("float", "0.25")), None, True)
        if chance < 0.3:
            load = self.load("float", 0)
            return Node("bool", "({} > 0.25)", (load,))
        sign = random.choice(("<", "<=", ">", ">=", "==", "!="))
        first = self.integer(depth, computed=True)
        return Node("bool", f"({{}} {sign} {{}})", (first, self.integer(depth)))

    # ---- floats

    def number(self, depth: int) -> Node:
        """A float of a pair, of moderate size."""
        random = self.random
        if depth <= 0 or random.random() < 0.25:
            chance = random.random()
            if chance < 0.4:
                return Node("float", "s")
            if chance < 0.75:
                return self.load("float", 1)
            return Node("float", "({} * 0.01)", (self.integer(1, computed=True),))
        form, kink = random.choice(_FLOATS)
        if form == "where":
            condition = self.boolean(depth - 1, lambda: self.number(depth - 1))
            arms = (self.number(depth - 1), self.number(depth - 1))
            return Node("float", "where({}, {}, {})", (condition, *arms))
        if form in _JUMPS:  # of what is stored alone: it has no rounding that decides
            return Node("float", form, (self.load("float", 1),))
        args = tuple(self.number(depth - 1) for _ in range(form.count("{}")))
        return Node("float", form, args, None, kink)

    # ---- masks and scores

    def mask(self, depth: int) -> Node:
        """A mask: a library's, a function, or several of them joined."""
        random = self.random
        if depth > 0 and random.random() < 0.4:
            form = random.choice(("({} & {})", "({} | {})", "(~{})"))
            return Node("mask", form, tuple(self.mask(depth - 1) for _ in range(form.count("{}"))))
        if random.random() < 0.45:
            text = "masks.function(lambda b, h, m, n: {})"
            return Node("mask", text, (self.boolean(random.choice((0, 1, 2, 2))),), "{}")
        return self.known_mask()

    def known_mask(self) -> Node:
        """One of ``tilewise.masks``."""
        random = self.random
        batch, _, M, N = self.extents.values()
        name = random.choice(
            (
                "causal",
                "causal",
                "window",
                "window",
                "prefix",
                "prefix_each",
                "lengths",
                "document",
                "document_each",
                "dense",
            )
        )
        align, own = random.choice((("", "(m + N - M)"), ('align="top_left"', "m")))
        if name == "causal":
            return Node("mask", f"masks.causal({align})", (), f"(n <= {own})")
        if name == "window":
            left, right = (random.choice((None, 0, 1, 5, 16, 40, 100)) for _ in range(2))
            comma = ", " if align else ""
            low = f"n >= {own} - {left}" if left is not None else "n >= 0"
            high = f"n <= {own} + {right}" if right is not None else "n >= 0"
            call = f"masks.window({left}, {right}{comma}{align})"
            return Node("mask", call, (), f"(({low}) & ({high}))")
        if name == "prefix":
            count = random.choice((0, 1, N // 3, N))
            return Node("mask", f"masks.prefix({count})", (), f"((n <= m + N - M) | (n < {count}))")
        if name in ("prefix_each", "lengths"):
            tensor = self.table("int", (batch,), 0, self.least)
            below = f"(n < {tensor}[b])"
            means = below if name == "lengths" else f"((n <= m + N - M) | {below})"
            call = name.removesuffix("_each")
            return Node("mask", f"masks.{call}({tensor})", (), means)
        if name == "dense":
            tensor = self.table("bool", self.broadcastable())
            return Node("mask", f"masks.dense({tensor})", (), f"at({tensor}, b, h, m, n)")
        each = (batch,) if name.endswith("each") else ()
        of_keys = self.table("int", (*each, N), 0, 4, random.choice(("", "sorted", "sorted")))
        of_rows = self.table("int", (*each, M), 0, 4, random.choice(("", "sorted", "sorted")))
        at = "b, " if each else ""
        means = f"({of_rows}[{at}m] == {of_keys}[{at}n])"
        return Node("mask", f"masks.document({of_keys}, {of_rows})", (), means)

    def score(self, depth: int, last: bool = True) -> Node:
        """A score: one of ``tilewise.scores`` or a function; -inf only where nothing follows."""
        random = self.random
        heads, batch = self.extents["h"], self.extents["b"]
        chance = random.random()
        if chance < 0.12:
            sizes = random.choice(((heads,), (batch, heads)))
            slopes = self.table("float", sizes, 0.0, 0.5, learn=False)
            means = f"s - at({slopes}, b, h) * abs(m + (N - M) - n)"
            return Node("score", f"scores.alibi({slopes})", (), means)
        if chance < 0.24:
            cap = random.choice((0.7, 3.0, 30.0))
            return Node("score", f"scores.softcap({cap})", (), f"{cap} * torch.tanh(s / {cap})")
        if chance < 0.5:
            how = "holes" if last and random.random() < 0.25 else ""
            tensor = self.table("float", self.broadcastable(), -2.0, 2.0, how)
            return Node("score", f"scores.bias({tensor})", (), f"s + at({tensor}, b, h, m, n)")
        text = "scores.function(lambda s, b, h, m, n: {})"
        chance, number = random.random(), self.number(depth)
        if chance < 0.5:
            body = Node("float", "s + {}", (number,))
        elif chance < 0.75:
            body = Node("float", "s * {}", (number,))
        else:
            body = number
        return Node("score", text, (body,), "{}")


# What a pair is given where it has enough tensors.
_SPARE = {
    "float": Node("float", "((m - n) * 0.125)"),
    "int": Node("int", "(n - m)"),
    "bool": Node("bool", "(m >= n)"),
}
_JUMPS = ("torch.round({})", "torch.floor({})", "torch.sign({})")
# Forms of floats, and whether their value or derivative jumps.
_FLOATS: tuple[tuple[str, bool], ...] = (
    ("({} + {})", False),
    ("({} - {})", False),
    ("({} * {})", False),
    ("({} / (1.0 + abs({})))", True),
    ("torch.tanh({})", False),
    ("torch.sigmoid({})", False),
    ("torch.exp(-abs({}))", True),
    ("torch.exp2(torch.tanh({}))", False),
    ("torch.log(1.0 + {} ** 2)", False),
    ("torch.log2(1.5 + torch.sin({}))", False),
    ("torch.sqrt(0.5 + {} ** 2)", False),
    ("torch.rsqrt(1.0 + {} ** 2)", False),
    ("torch.sin({})", False),
    ("torch.cos({})", False),
    ("(-{})", False),
    ("abs({})", True),
    ("minimum({}, {})", True),
    ("maximum({}, {})", True),
    ("torch.clamp({}, -2.0, 2.0)", True),
    ("torch.relu({})", True),
    ("(1.0 + {} ** 2) ** torch.tanh({})", False),
    ("({} ** 3)", False),
    ("({} * 1.5)", False),
    ("({} + 0.1)", False),
    ("(-0.75 - {})", False),
    ("(2.0 / (1.0 + {} ** 2))", False),
    ("torch.round({})", False),
    ("torch.floor({})", False),
    ("torch.sign({})", False),
    ("where", False),
    ("where", False),
)


def _leaf(random: Random) -> tuple[str, tuple[Node, ...], str | None]:
    text = random.choice("mmnnhb")
    if random.random() < 0.06:
        return ("m.length", (), "(m * 0 + M)") if text == "m" else ("n.length", (), "(n * 0 + N)")
    return text, (), None
