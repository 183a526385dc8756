"""A call as plain values: what the fuzzer draws, prints, and makes smaller.

``repr`` of a ``Case`` is Python that makes the same case again, and the tensors follow from it
(``build.py``). Masks and scores are trees of source text: ``text`` is what a user would write, and
``means`` is the same in plain torch over index tensors, for the reference.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, NamedTuple


def _call(name: str, value: Any) -> str:
    """The shortest constructor call of a named tuple."""
    defaults = value._field_defaults
    parts = [
        f"{field}={each!r}" if field in defaults else repr(each)
        for field, each in zip(value._fields, value, strict=True)
        if field not in defaults or each != defaults[field]
    ]
    return f"{name}({', '.join(parts)})"


class Node(NamedTuple):
    """One piece of a mask or score.

    Args:
        kind: what it is: a "mask" or "score" object, or a "bool", "int" or "float" of a pair.
        text: source with ``{}`` for each argument.
        args: the pieces that it is made of.
        means: source of the same in plain torch; None where ``text`` says it already.
        kink: whether its value or derivative jumps somewhere in a float that is computed.
    """

    kind: str
    text: str
    args: tuple[Node, ...] = ()
    means: str | None = None
    kink: bool = False

    def __repr__(self) -> str:
        return _call("Node", self)

    def source(self) -> str:
        """What a user would write."""
        return self.text.format(*[arg.source() for arg in self.args])

    def meaning(self) -> str:
        """The same over index tensors b, h, m, n and the numbers M and N."""
        form = self.text if self.means is None else self.means
        return form.format(*[arg.meaning() for arg in self.args])

    def kinked(self) -> bool:
        """Whether rounding may choose another branch somewhere in it."""
        return self.kink or any(arg.kinked() for arg in self.args)


class Layout(NamedTuple):
    """How a tensor lies in memory.

    Args:
        order: a permutation of its last three dimensions, outermost first; () is as they are.
        pads: elements left free behind each of those dimensions, in that order.
        step: the stride of the innermost dimension.
        offset: elements before the first one.
        expanded: dimensions of stride 0, whose values are all the same.
    """

    order: tuple[int, ...] = ()
    pads: tuple[int, ...] = ()
    step: int = 1
    offset: int = 0
    expanded: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return _call("Layout", self)


PLAIN = Layout()


class Table(NamedTuple):
    """A captured tensor.

    Args:
        kind: "float", "int" or "bool".
        sizes: its shape.
        low, high: the range of its values; of integers both are included.
        wide: whether its floats are float32 where the call's are 16 bits.
        grad: whether its gradient is wanted.
        how: "" for independent values, "sorted" along the last dimension (document ids), or
            "holes": a third is -inf.
        layout: in memory.
    """

    kind: str
    sizes: tuple[int, ...]
    low: float = -1.0
    high: float = 1.0
    wide: bool = False
    grad: bool = False
    how: str = ""
    layout: Layout = PLAIN

    def __repr__(self) -> str:
        return _call("Table", self)


@dataclass(frozen=True)
class Case:
    """One call, forward and backward.

    ``sequences`` (lengths of queries and keys) makes it a variable-length call, with ``page_size``
    one over pages; batch, queries and keys then follow from it. ``grads`` names which of q, k, v
    and sinks want a gradient; tables say it themselves. ``layouts`` are those of q, k, v and of the
    gradient that is sent into the output. ``second`` differentiates the gradients again, along a
    random direction. ``listed`` gives each row a list of so many places: blocks of ``list_block``
    keys, of each key head or (``lists_shared``) of all heads. ``values`` seeds every number.
    """

    values: int = 0
    dtype: str = "float32"
    isa: str = "portable"
    threads: int = 1
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    queries: int = 1
    keys: int = 1
    head_dim: int = 1
    value_dim: int = 1
    sequences: tuple[tuple[int, int], ...] | None = None
    page_size: int = 0
    mask: Node | None = None
    scores: tuple[Node, ...] = ()
    tables: tuple[Table, ...] = ()
    sinks: bool = False
    scale: float | None = None
    dropout_p: float = 0.0
    gain: float = 1.0
    layouts: tuple[Layout, Layout, Layout, Layout] = (PLAIN, PLAIN, PLAIN, PLAIN)
    grads: tuple[str, ...] = ()
    lse_grad: bool = False
    entropy_grad: bool = False
    stats: str = ""
    second: bool = False
    listed: int = 0
    list_block: int = 1
    lists_shared: bool = False

    def __repr__(self) -> str:
        changed = [
            f"{each.name}={getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]
        return f"Case({', '.join(changed)})"

    @property
    def differentiated(self) -> bool:
        """Whether any gradient is wanted."""
        return bool(self.grads) or any(table.grad for table in self.tables)

    @property
    def kinked(self) -> bool:
        """Whether a branch of the score hangs on a computed number."""
        return any(node.kinked() for node in self.scores)

    @property
    def extents(self) -> tuple[int, int, int, int]:
        """B, Hq, and the largest M and N of a sequence."""
        if self.sequences is None:
            return self.batch, self.heads, self.queries, self.keys
        longest = [max((pair[i] for pair in self.sequences), default=0) for i in (0, 1)]
        return len(self.sequences), self.heads, longest[0], longest[1]

    def work(self) -> int:
        """Multiplications of a forward pass, about."""
        spans = self.sequences
        if spans is None:
            spans = ((self.queries, self.keys),) * self.batch
        pairs = sum(m * n for m, n in spans)
        return pairs * self.heads * (self.head_dim + self.value_dim)

    def used(self) -> set[int]:
        """The tables that the mask and the scores read."""
        roots = [node for node in (self.mask, *self.scores) if node is not None]
        text = " ".join(root.source() for root in roots)
        return {int(number) for number in re.findall(r"\bt(\d+)\b", text)}


def reread(text: str) -> Case:
    """The case that a ``repr`` says."""
    names: dict[str, Any] = {"Case": Case, "Node": Node, "Layout": Layout, "Table": Table}
    found = eval(text, {"__builtins__": {}}, names)
    assert isinstance(found, Case)
    return found
