"""What the gate judges: cases, the chips to compile for, records of kernels, and their table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from tilelab.common.tables import aligned
from tilewise.inspect.gpu import FAMILIES, Family, Launch


class Case(NamedTuple):
    """The launches of a pass.

    Args:
        name: short, unique.
        launches: from a chip family ("sm_90", "gfx942") to the launches.
        sixteen_bit: the products are of types of 16 bits or 8, so matrix instructions are due.
        without_products: kernels by name that multiply no matrices.
        key: part of the quick run.
        families: only for these families; empty for all.
        described: whole blocks come by tensor descriptors, on families that have them.
    """

    name: str
    launches: Callable[[str], Sequence[Launch]]
    sixteen_bit: bool = True
    without_products: frozenset[str] = frozenset()
    key: bool = False
    families: tuple[str, ...] = ()
    described: bool = False


def cases_of(module: str) -> dict[str, Case]:
    """Return the cases by name that a module lists as ``CASES``."""
    return {case.name: case for case in import_module(module).CASES}


class Record(NamedTuple):
    """One kernel of one case on one chip; its fields are those of the JSON.

    Args:
        target: the chip's name.
        case: the case's name.
        kernel: the kernel's name, with a number where a case launches it more than once.
        tile: block sizes by name.
        warps, stages: as compiled.
        registers, spills, scratch_bytes, instructions, matrix, copies: see ``machine.Machine``.
        shared_bytes: shared memory of one program.
        seconds: that Triton took, the disassembly not counted.
        error: why there is nothing of this; empty where it compiled.
    """

    target: str
    case: str
    kernel: str
    tile: dict[str, int]
    warps: int
    stages: int
    registers: int = 0
    spills: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0
    instructions: int = 0
    matrix: dict[str, int] = {}  # noqa: RUF012  never changed
    copies: dict[str, int] = {}  # noqa: RUF012  never changed
    seconds: float = 0.0
    error: str = ""

    @property
    def key(self) -> str:
        """Its name on its chip: what baselines are kept under."""
        return f"{self.case} / {self.kernel}"

    @property
    def choice(self) -> str:
        """The tile in words: "BM=128 BN=64 8 warps 3 stages"."""
        sizes = [f"{name}={value}" for name, value in self.tile.items()]
        return " ".join([*sizes, f"{self.warps} warps", f"{self.stages} stages"])


# Families whose code runs on this very chip only: Triton compiles for the letter.
_EXACT = ("sm_90", "sm_100", "sm_120")
_WHY_NOT = {
    "sm_75": "Triton makes no matrix instructions for it: products become scalar code on local "
    "memory",
}


class Target(NamedTuple):
    """One chip family.

    Args:
        name: as the makers' compilers say it.
        family: its row in ``config.FAMILIES``.
        why_not: why Triton has no good code for it; empty where it has.
    """

    name: str
    family: Family
    why_not: str = ""

    @property
    def arch(self) -> int | str:
        """Triton's name of the chip: a number for NVIDIA, the name for AMD."""
        return int(self.family.name[3:]) if self.family.maker == "cuda" else self.family.name


TARGETS = tuple(
    Target(name + "a" * (name in _EXACT), family, _WHY_NOT.get(name, ""))
    for name, family in FAMILIES.items()
    if family.maker
)


def target_named(name: str) -> Target:
    """Return the target of this name.

    Raises:
        KeyError: there is none.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise KeyError(name)


_HEAD = ("case", "kernel", "tile", "regs", "spill", "scratch", "shared KB", "matrix", "async")
_TAIL = ("instr", "s", "verdict")
_WORDS = ("case", "kernel", "tile", "matrix", "async", "verdict")


def table(target: Target, records: Sequence[tuple[Record, list[str]]]) -> str:
    """Return the kernels of one chip.

    Args:
        target: the chip.
        records: each with its faults.
    """
    head = (*_HEAD, *_TAIL)
    rows = [head, *(_cells(record, target, faults) for record, faults in records)]
    left = {column for column, name in enumerate(head) if name in _WORDS}
    return "\n".join([target.name, *(f"  {line}" for line in aligned(rows, left))])


def _cells(record: Record, target: Target, faults: list[str]) -> tuple[str, ...]:
    verdict = "FAIL: " + "; ".join(faults) if faults else "ok"
    if record.error:
        return (record.case, record.kernel, *[""] * (len(_HEAD) + len(_TAIL) - 3), verdict)
    tile = " ".join(f"{name}={value}" for name, value in record.tile.items())
    return (
        record.case,
        record.kernel,
        f"{tile} w{record.warps} s{record.stages}".strip(),
        str(record.registers),
        str(record.spills),
        str(record.scratch_bytes),
        f"{record.shared_bytes / 1024:.1f}/{target.family.shared_bytes // 1024}",
        _counts(record.matrix),
        _counts(record.copies),
        str(record.instructions),
        f"{record.seconds:.1f}",
        verdict,
    )


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{count} {kind}" for kind, count in counts.items()) or "-"
