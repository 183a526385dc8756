"""Loops in machine code, and what goes on in those where a kernel spends its time.

A loop is natural: a branch back to an instruction that every way to the branch passes, with all
that leads to the branch from there. Hot are the loops that multiply matrices and have no loop in
them that does so; in code without matrix instructions, the innermost loops.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;")
_SASS_LABEL = re.compile(r"^(\.L_\w+):")
_SASS_TARGET = re.compile(r"`\((\.L_\w+)\)")
_GCN = re.compile(r"^\t([a-z]+_\w+.*)$")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")
_GCN_TARGET = re.compile(r"^s_c?branch\w*\s+(\.LBB\w+)")


class Code(NamedTuple):
    """Instructions of a kernel, as text, and to which others each may go on.

    Args:
        lines: the instructions.
        after: of each the indices of those that may follow it.
    """

    lines: list[str]
    after: list[list[int]]


def sass(text: str) -> Code:
    """Return what nvdisasm says of a kernel."""
    return _code(text, _SASS, _SASS_LABEL, _SASS_TARGET, _ends_sass)


def amdgcn(text: str) -> Code:
    """Return what the assembler text of a kernel says; remarks stay at the end of a line."""
    return _code(text, _GCN, _GCN_LABEL, _GCN_TARGET, _ends_gcn)


def _ends_sass(line: str) -> bool:
    # "@P0 BRA" and "BRA.U !UP0, ..." may be passed by.
    return line.startswith("EXIT") or bool(re.match(r"BRA(\.\w+)* `", line))


def _ends_gcn(line: str) -> bool:
    return line.startswith(("s_branch", "s_endpgm", "s_setpc"))


def _code(
    text: str,
    instruction: re.Pattern[str],
    label: re.Pattern[str],
    target: re.Pattern[str],
    ends: Callable[[str], bool],
) -> Code:
    lines: list[str] = []
    places: dict[str, int] = {}
    for line in text.splitlines():
        if found := label.match(line):
            places[found[1]] = len(lines)
        elif found := instruction.match(line):
            lines.append(found[1])
    after = []
    for i, line in enumerate(lines):
        following = [] if ends(line) or i + 1 == len(lines) else [i + 1]
        found = target.search(line)
        place = places.get(found[1]) if found else None
        after.append(following if place is None or place == len(lines) else [*following, place])
    return Code(lines, after)


def loops(code: Code) -> list[frozenset[int]]:
    """Return the instructions of each loop; branches back to one place make one loop."""
    before: dict[int, list[int]] = defaultdict(list)
    for i, following in enumerate(code.after):
        for j in following:
            before[j].append(i)
    bodies: dict[int, frozenset[int]] = {}
    entry = range(len(code.lines))[:1]
    alive = _reached(entry, code.after, -1)
    for i, following in enumerate(code.after):
        for head in following:
            if head <= i and i in alive and i not in _reached(entry, code.after, head):
                body = _reached([i], before, head) | {head}
                bodies[head] = bodies.get(head, frozenset()) | body
    return list(bodies.values())


def _reached(
    begin: Sequence[int], following: Sequence[list[int]] | dict[int, list[int]], without: int
) -> frozenset[int]:
    """Return what is reached from some instructions on ways that do not pass one."""
    seen: set[int] = set()
    left = [i for i in begin if i != without]
    while left:
        i = left.pop()
        if i not in seen:
            seen.add(i)
            left += [j for j in following[i] if j != without]
    return frozenset(seen)


def hot(code: Code, multiplies: Callable[[str], bool]) -> Iterator[list[str]]:
    """Yield the instructions of each hot loop, in order; ``multiplies`` knows matrix products."""
    found = loops(code)
    busy = [body for body in found if any(multiplies(code.lines[i]) for i in body)] or found
    for body in busy:
        if not any(other < body for other in busy):
            yield [code.lines[i] for i in sorted(body)]


def hidden_exponentials(body: Sequence[str]) -> tuple[int, int]:
    """(hidden, all) exponentials of a loop in SASS: hidden are those under an outstanding wgmma.

    A wgmma is outstanding until the wait for all of them; the loop is gone through twice, as one
    may be outstanding from one round to the next.
    """
    hidden = total = outstanding = 0
    for _ in range(2):
        hidden = total = 0
        for line in body:
            if re.search(r"\b[HQI]GMMA\.", line):
                outstanding = 1
            elif re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0", line):
                outstanding = 0
            elif "MUFU.EX2" in line:
                hidden, total = hidden + outstanding, total + 1
    return hidden, total
