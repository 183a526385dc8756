"""Resources that a compiled kernel uses, counted in its machine code.

NVIDIA's comes as a cubin, read with cuobjdump and nvdisasm from Triton's wheel; AMD's as the text
of the assembler. Both become the same numbers.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
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


class Machine(NamedTuple):
    """The counts of one kernel.

    Args:
        registers: of a thread (AMD: vector registers, accumulators among them).
        spills: accesses of local memory (AMD: vector registers spilled).
        scratch_bytes: local memory of a thread.
        instructions: all of them, without padding.
        matrix: matrix instructions by kind.
        copies: asynchronous copies to shared memory by kind.
    """

    registers: int
    spills: int
    scratch_bytes: int
    instructions: int
    matrix: dict[str, int]
    copies: dict[str, int]


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
    return Machine(
        registers=registers,
        spills=_sum(opcodes, _LOCAL),
        scratch_bytes=stack + local,
        instructions=opcodes.total() - _sum(opcodes, _IDLE),
        matrix=_kinds(opcodes, MATRIX),
        copies=_kinds(opcodes, _COPIES),
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
    return Machine(
        registers=_field(text, "vgpr_count"),
        spills=_field(text, "vgpr_spill_count"),
        scratch_bytes=_field(text, "private_segment_fixed_size"),
        instructions=opcodes.total() - _sum(opcodes, _IDLE),
        matrix=dict(matrix),
        copies={"lds": to_shared} if to_shared else {},
    )


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
