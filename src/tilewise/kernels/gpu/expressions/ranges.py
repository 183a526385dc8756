"""Write as text which keys a mask allows a run of queries, and which queries a run of keys.

The range of a mask follows its program. Bands of the diagonal and lengths bound both sides. ``and``
and ``or`` combine what is known of two masks. Nothing is known of other operations. A range is four
numbers: the mask hides every pair before ``low`` and from ``high`` on, and shows all of them in
[full_low, full_high).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tilewise.variants.program import Instr, Program

_SMALL = 2**24
_UNKNOWN = ("zero", "zero", "zero", "size")


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
    most = 2 * max(largest, _SMALL)
    whole = "tl.int32" if largest <= _SMALL else "tl.int64"
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
