"""Makes a failing case smaller while it still fails in the same way: greedy, field by field."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from tests.fuzz.case import PLAIN, Case, Node

_SIMPLEST = {
    "mask": Node("mask", "masks.causal()", (), "(n <= m + N - M)"),
    "bool": Node("bool", "(m >= n)"),
    "int": Node("int", "n"),
    "float": Node("float", "s"),
}


def smaller_numbers(number: int, least: int) -> Iterator[int]:
    """Numbers from ``least`` to below this one, the boldest first."""
    step = number - least
    while step > 0:
        yield number - step
        step //= 2


def descendants(node: Node, kind: str) -> Iterator[Node]:
    """Pieces of a tree of this kind, the outer ones first."""
    for arg in node.args:
        if arg.kind == kind:
            yield arg
        yield from descendants(arg, kind)


def smaller_trees(node: Node) -> Iterator[Node]:
    """The same tree with one piece replaced by a part of it, or by the simplest of its kind."""
    yield from descendants(node, node.kind)
    simplest = _SIMPLEST.get(node.kind)
    if simplest is not None and len(node.source()) > len(simplest.source()):
        yield simplest
    for i, arg in enumerate(node.args):
        for smaller in smaller_trees(arg):
            yield node._replace(args=(*node.args[:i], smaller, *node.args[i + 1 :]))


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, one step away, the boldest first."""
    for each in fields(case):
        now: Any = getattr(case, each.name)
        kept = {"values", "isa", "dtype", "tables", *_SIZES}
        if now != each.default and each.name not in kept:
            default: dict[str, Any] = {each.name: each.default}
            yield replace(case, **default)
    if case.scores:
        for i in range(len(case.scores)):
            yield replace(case, scores=(*case.scores[:i], *case.scores[i + 1 :]))
    if case.sequences is not None:
        yield from _fewer_sequences(case)
    for name in _SIZES:
        number = getattr(case, name)
        for smaller in smaller_numbers(number, 1 if name != "batch" else min(1, number)):
            changes: dict[str, Any] = {name: smaller}
            if name == "kv_heads":
                changes["heads"] = smaller * (case.heads // case.kv_heads)
            if (changes.get("heads", smaller) if name == "heads" else 0) % case.kv_heads:
                continue
            yield resized(case, changes)
    for smaller in smaller_numbers(case.listed, 1):
        yield replace(case, listed=smaller)
    if case.mask is not None:
        for tree in smaller_trees(case.mask):
            yield replace(case, mask=tree)
    for i, score in enumerate(case.scores):
        for tree in smaller_trees(score):
            yield replace(case, scores=(*case.scores[:i], tree, *case.scores[i + 1 :]))
    for i, layout in enumerate(case.layouts):
        for field in layout._fields:
            plain = layout._replace(**{field: getattr(PLAIN, field)})
            if plain != layout:
                yield replace(case, layouts=(*case.layouts[:i], plain, *case.layouts[i + 1 :]))  # type: ignore[arg-type]
    for name in case.grads:
        yield replace(case, grads=tuple(each for each in case.grads if each != name))
    for i, table in enumerate(case.tables):
        for simpler in (
            table._replace(layout=PLAIN),
            table._replace(grad=False),
            table._replace(wide=False),
        ):
            if simpler != table:
                yield replace(case, tables=(*case.tables[:i], simpler, *case.tables[i + 1 :]))
    if case.dtype != "float32":
        yield replace(case, dtype="float32")


_SIZES = ("batch", "heads", "kv_heads", "queries", "keys", "head_dim", "value_dim")


def _fewer_sequences(case: Case) -> Iterator[Case]:
    spans = case.sequences
    assert spans is not None
    if len(spans) == 1 and not case.page_size:
        yield replace(case, sequences=None, batch=1, queries=spans[0][0], keys=spans[0][1])
    for i in range(len(spans)):
        yield resized(case, {"sequences": (*spans[:i], *spans[i + 1 :])})
    for i, (m, n) in enumerate(spans):
        for fewer in smaller_numbers(m, 0):
            yield resized(case, {"sequences": (*spans[:i], (fewer, n), *spans[i + 1 :])})
        for fewer in smaller_numbers(n, 0):
            yield resized(case, {"sequences": (*spans[:i], (m, fewer), *spans[i + 1 :])})


def resized(case: Case, changes: dict[str, Any]) -> Case:
    """The case with other sizes, its tables cut where they had one of the old ones.

    A table may then be larger than what is read of it, which is allowed; where it is not, the
    candidate fails in another way and is not taken.
    """
    changed = replace(case, **changes)
    sizes = dict(zip(case.extents, changed.extents, strict=True))
    tables = tuple(
        table._replace(sizes=tuple(sizes.get(size, size) for size in table.sizes))
        for table in case.tables
    )
    return replace(changed, tables=tables)


def without_spare_tables(case: Case) -> Case:
    """The case without tables that nothing reads, if it has any at its end."""
    used, tables = case.used(), case.tables
    while tables and len(tables) - 1 not in used:
        tables = tables[:-1]
    return replace(case, tables=tables)


def shrink(
    case: Case, fails: Callable[[Case], str | None], most: int = 400, say: Any = None
) -> Case:
    """The smallest case found that fails in the same way.

    Args:
        case: fails.
        fails: the kind of a case's fault, or None.
        most: cases that are tried.
        say: called with a line now and then.
    """
    kind, tried = fails(case), 0
    if kind is None:
        return case
    progress = True
    while progress and tried < most:
        progress = False
        for candidate in candidates(case):
            candidate = without_spare_tables(candidate)
            if candidate == case:
                continue
            tried += 1
            if fails(candidate) == kind:
                case, progress = candidate, True
                if say is not None:
                    say(f"  {tried}: {len(repr(case))} characters, work {case.work()}")
                break
            if tried >= most:
                break
    return case
