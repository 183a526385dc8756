"""What the machine code of a compiled kernel says: resources that it uses, and its loops.

NVIDIA's comes as a cubin, read with cuobjdump and nvdisasm from Triton's wheel; AMD's as the text
of the assembler. Both become the same numbers.

A loop is natural: a branch back to an instruction that every way to the branch passes, with all
that leads to the branch from there. Hot are the loops that multiply matrices and have no loop in
them that does so; in code without matrix instructions, the innermost loops.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

# Kinds of matrix instructions by the opcodes that are them.
MATRIX = {
    "mma": ("HMMA", "QMMA", "OMMA", "IMMA", "DMMA"),
    "wgmma": ("HGMMA", "QGMMA", "IGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA"),
}
_COPIES = {"cp.async": ("LDGSTS",), "tma": ("UTMALDG", "UTMASTG", "UBLKCP")}
_LOCAL = ("LDL", "STL")
# Padding, not work: how many there are depends on alignment alone.
_IDLE = ("NOP", "BRA", "s_nop", "s_code_end")

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")
# "/*0440*/  @!P0 HGMMA.64x64x16.F32.BF16 R24, ..." -> "HGMMA"
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)
# Instructions are indented by one tab; directives begin with a point, remarks with a semicolon.
_GCN = re.compile(r"^\t([a-z]+_\w+)(.*)$", re.MULTILINE)
_OWN = re.compile(r"[HQI]GMMA\.64x(\d+)x(\d+)")  # of a warp group: four warps share its rows
_OLD = re.compile(r"[HQI]MMA(?:\.SP)?\.(16)(8)(\d+)\b")
_AMD = re.compile(r"v_w?mf?ma_\w+?_(\d+)x(\d+)x(\d+)(?:_(\d+)b)?_")
_PRODUCT = re.compile(r"\b(?:UTC)?[HQOID]G?MMA\b|\bv_w?mf?ma_")
_SPILL = re.compile(r"^(?:@!?U?P\w+\s+)?(?:LDL|STL)\b|Folded (?:Spill|Reload)")
# Of Triton's own code: "tt.dot ... : tensor<64x32xbf16, ...> * tensor<32x128xbf16, ...> -> ...".
_DOT = re.compile(
    r"\b(?:tt\.dot|ttng\.warp_group_dot) .*? : \S*?<(\d+)x(\d+)x\w.*? \* \S*?<\d+x(\d+)x\w"
)
_BUFFERS = re.compile(r"local_alloc : \(\) -> !ttg\.memdesc<(\d+)x\d+x\d+x(?:\d+x\d+x)?\w?[if]\w+")
_COPY = re.compile(r"\b(?:LDGSTS|UTMALDG|UBLKCP)\b|^(?:buffer|global)_load\S*.*\blds\b|_load_lds_")
_SASS_LINE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;")
_SASS_LABEL = re.compile(r"^(\.L_\w+):")
_SASS_TARGET = re.compile(r"`\((\.L_\w+)\)")
_GCN_LINE = re.compile(r"^\t([a-z]+_\w+.*)$")
_GCN_LABEL = re.compile(r"^(\.LBB\w+):")
_GCN_TARGET = re.compile(r"^s_c?branch\w*\s+(\.LBB\w+)")
# Nothing follows these. "@P0 BRA" and "BRA.U !UP0, ..." may be passed by.
_SASS_END = re.compile(r"EXIT|BRA(?:\.\w+)* `")
_GCN_END = re.compile(r"s_branch|s_endpgm|s_setpc")


class Machine(NamedTuple):
    """The counts of one kernel; hot loops are those of ``hot``."""

    registers: int  # of a thread (AMD: vector registers, accumulators among them)
    spills: int  # accesses of local memory (AMD: vector registers spilled)
    scratch_bytes: int  # local memory of a thread
    instructions: int  # all of them, without padding
    matrix: dict[str, int]  # matrix instructions by kind
    copies: dict[str, int]  # asynchronous copies to shared memory by kind
    # Multiply-adds that the matrix instructions of a warp do, each counted once; None where some do
    # not say their size.
    warp_products: int | None
    loop_spills: int  # accesses of local memory, or of what is spilled, in hot loops
    narrowest: int  # columns of the narrowest wgmma in hot loops; 0 where there is none
    waiting: int  # hot loops without an asynchronous copy
    hidden: int = 0  # exponentials in hot loops under an outstanding wgmma
    exponentials: int = 0  # all in hot loops


def of_cubin(cubin: bytes, tools: Path) -> Machine:
    """Return the counts of a cubin with one kernel.

    Raises:
        RuntimeError: a tool failed, or said something else than expected.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _said(tools / "cuobjdump", "--dump-resource-usage", file.name)
        code = _said(tools / "nvdisasm", "-c", file.name)
    return of_sass(usage, code)


def of_sass(usage: str, code: str) -> Machine:
    """Return the counts from what cuobjdump says of the resources and nvdisasm of the code."""
    found = _RESOURCES.search(usage)
    opcodes = Counter(_SASS.findall(code))
    if found is None or not opcodes:
        raise RuntimeError(f"cuobjdump and nvdisasm said nothing of use: {usage[-200:]!r}")
    registers, stack, local = map(int, found.groups())
    body = [*hot(sass(code), _multiplies)]
    within = [line for each in body for line in each]
    hidden = [hidden_exponentials(each) for each in body]
    return Machine(
        registers=registers,
        spills=_sum(opcodes, _LOCAL),
        scratch_bytes=stack + local,
        instructions=opcodes.total() - _sum(opcodes, _IDLE),
        matrix=_kinds(opcodes, MATRIX),
        copies=_kinds(opcodes, _COPIES),
        warp_products=None if "tcgen05" in _kinds(opcodes, MATRIX) else _products(code),
        loop_spills=_count(_SPILL, within),
        narrowest=min((int(n) for n, _ in _OWN.findall("\n".join(within))), default=0),
        waiting=sum(not _count(_COPY, each) for each in body),
        hidden=sum(under for under, _ in hidden),
        exponentials=sum(all_ for _, all_ in hidden),
    )


def of_amdgcn(text: str) -> Machine:
    """Return the counts from the assembler text of one AMD kernel.

    Scalar registers that spill into lanes of a vector register cost nothing that shows, and are
    not counted.

    Raises:
        RuntimeError: the text has no metadata.
    """
    lines = _GCN.findall(text)
    opcodes = Counter(opcode for opcode, _ in lines)
    to_shared = sum(
        opcode.startswith(("buffer_load", "global_load")) and ("lds" in opcode or " lds" in rest)
        for opcode, rest in lines
    )
    matrix = Counter(
        opcode[2:6] for opcode in opcodes.elements() if opcode.startswith(("v_mfma", "v_wmma"))
    )
    body = [*hot(amdgcn(text), _multiplies)]
    return Machine(
        registers=_field(text, "vgpr_count"),
        spills=_field(text, "vgpr_spill_count"),
        scratch_bytes=_field(text, "private_segment_fixed_size"),
        instructions=opcodes.total() - _sum(opcodes, _IDLE),
        matrix=dict(matrix),
        copies={"lds": to_shared} if to_shared else {},
        warp_products=_products(text),
        loop_spills=_count(_SPILL, [line for each in body for line in each]),
        narrowest=0,
        waiting=sum(not _count(_COPY, each) for each in body),
    )


def _multiplies(line: str) -> bool:
    return _PRODUCT.search(line) is not None


def _count(pattern: re.Pattern[str], lines: list[str]) -> int:
    return sum(pattern.search(line) is not None for line in lines)


def _products(text: str) -> int:
    """Multiply-adds of a warp: rows x columns x depth of each matrix instruction."""
    own = sum(16 * int(n) * int(k) for n, k in _OWN.findall(text))
    old = sum(int(m) * int(n) * int(k) for m, n, k in _OLD.findall(text))
    amd = sum(int(m) * int(n) * int(k) * int(blocks or 1) for m, n, k, blocks in _AMD.findall(text))
    return own + old + amd


def needed_products(text: str) -> int:
    """Multiply-adds of a program by Triton's own code of it (ttgir): those of its products."""
    return sum(int(m) * int(k) * int(n) for m, k, n in _DOT.findall(text))


def buffers(text: str) -> int:
    """Buffers of the tiles that Triton's code (ttgir) copies in a loop: the fewest; 0 for none."""
    return min((int(count) for count in _BUFFERS.findall(text)), default=0)


def _said(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed: {done.stderr.strip()[-200:]}")
    return done.stdout


def _field(text: str, name: str) -> int:
    found = re.search(rf"^\s+\.{name}:\s+(\d+)", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"the assembler text does not say {name}")
    return int(found[1])


def _sum(opcodes: Counter[str], names: tuple[str, ...]) -> int:
    return sum(opcodes[name] for name in names)


def _kinds(opcodes: Counter[str], kinds: dict[str, tuple[str, ...]]) -> dict[str, int]:
    """Counts by kind, without the kinds that are not there."""
    counts = {kind: _sum(opcodes, names) for kind, names in kinds.items()}
    return {kind: count for kind, count in counts.items() if count}


class Code(NamedTuple):
    """Instructions of a kernel, as text, and to which others each may go on."""

    lines: list[str]
    after: list[list[int]]  # of each the indices of those that may follow it


def sass(text: str) -> Code:
    """Return what nvdisasm says of a kernel."""
    return _code(text, _SASS_LINE, _SASS_LABEL, _SASS_TARGET, _SASS_END)


def amdgcn(text: str) -> Code:
    """Return what the assembler text of a kernel says; remarks stay at the end of a line."""
    return _code(text, _GCN_LINE, _GCN_LABEL, _GCN_TARGET, _GCN_END)


def _code(
    text: str,
    instruction: re.Pattern[str],
    label: re.Pattern[str],
    target: re.Pattern[str],
    end: re.Pattern[str],
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
        following = [] if end.match(line) or i + 1 == len(lines) else [i + 1]
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
