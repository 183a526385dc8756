"""Cases, the chips to compile for, records of kernels and their table, and what is wrong with them.

``baselines/3.7.1.json`` holds ``{target: {"case / kernel": [registers, instructions, choice]}}``.
Compilers differ from version to version, and a version without a file has nothing to be held to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from tilelab.common.tables import aligned, left_columns
from tilewise.inspect.gpu import FAMILIES, Family, Launch

# Kernels whose products have a row per query.
_BY_QUERIES = frozenset({"attend", "attend_split", "describe", "attend_in_groups"})


class Case(NamedTuple):
    """The launches of a pass."""

    name: str  # short, unique
    launches: Callable[[str], Sequence[Launch]]  # of a chip family ("sm_90", "gfx942")
    sixteen_bit: bool = True  # products are of 16 bits or 8, so matrix instructions are due
    without_products: frozenset[str] = frozenset()  # kernels by name that multiply no matrices
    key: bool = False  # part of the quick run
    families: tuple[str, ...] = ()  # only for these families; empty for all
    columns: int = 64  # of the narrowest wgmma that is not at fault in a loop of a key case
    measured: bool = True  # spills that were measured (``MEASURED_SPILLS``) are let off


def cases_of(module: str) -> dict[str, Case]:
    """Return the cases by name that a module lists as ``CASES``."""
    return {case.name: case for case in import_module(module).CASES}


class Record(NamedTuple):
    """One kernel of one case on one chip; its fields are those of the JSON.

    ``machine.Machine`` explains the fields that are its own too.
    """

    target: str  # the chip's name
    case: str  # the case's name
    kernel: str  # the kernel's name, with a number where a case launches it more than once
    tile: dict[str, int]  # block sizes by name
    warps: int  # these two: as compiled
    stages: int
    registers: int = 0
    spills: int = 0
    scratch_bytes: int = 0
    shared_bytes: int = 0  # shared memory of one program
    instructions: int = 0
    matrix: dict[str, int] = {}  # noqa: RUF012  never changed
    copies: dict[str, int] = {}  # noqa: RUF012  never changed
    seconds: float = 0.0  # that Triton took, the disassembly not counted
    error: str = ""  # why there is nothing of this; empty where it compiled
    # Multiply-adds by matrix instructions over those that the products need; 0 where instructions
    # do not say how many they do: one thread issues those of tcgen05 for all.
    issued: float = 0.0
    loop_spills: int = 0
    narrowest: int = 0
    waiting: int = 0
    buffers: int = 0  # of the tiles that are copied in a loop, the fewest; 0 for none
    hidden: int = 0
    exponentials: int = 0

    @property
    def key(self) -> str:
        """Its name on its chip: what baselines are kept under."""
        return f"{self.case} / {self.kernel}"

    @property
    def choice(self) -> str:
        """The tile in words: "BM=128 BN=64 8 warps 3 stages"."""
        sizes = [f"{name}={value}" for name, value in self.tile.items()]
        return " ".join([*sizes, f"{self.warps} warps", f"{self.stages} stages"])


_WHY_NOT = {
    "sm_75": "Triton makes no matrix instructions for it: products become scalar code on local "
    "memory",
}


class Target(NamedTuple):
    """One chip family."""

    name: str  # as the makers' compilers say it
    family: Family  # its row in ``config.FAMILIES``
    why_not: str = ""  # why Triton has no good code for it; empty where it has

    @property
    def arch(self) -> int | str:
        """Triton's name of the chip: a number for NVIDIA, the name for AMD."""
        return int(self.family.name[3:]) if self.family.maker == "cuda" else self.family.name


TARGETS = tuple(
    Target(name + "a" * family.exact, family, _WHY_NOT.get(name, ""))
    for name, family in FAMILIES.items()
    if family.maker
)


def target_named(name: str) -> Target:
    """Return the target of this name."""
    return {target.name: target for target in TARGETS}[name]


_HEAD = (
    *("case", "kernel", "tile", "regs", "spill", "in loops", "shared KB"),
    *("matrix", "issued", "n", "async", "buffers", "hidden exp2", "instr", "s", "verdict"),
)


def table(target: Target, records: Sequence[tuple[Record, list[str]]]) -> str:
    """Return the kernels of one chip."""
    rows = [_HEAD, *(_cells(record, target, faults) for record, faults in records)]
    lines = aligned(rows, left_columns(_HEAD))
    return "\n".join([target.name, *(f"  {line}" for line in lines)])


def _cells(record: Record, target: Target, faults: list[str]) -> tuple[str, ...]:
    verdict = "FAIL: " + "; ".join(faults) if faults else "ok"
    if record.error:
        return (record.case, record.kernel, *[""] * (len(_HEAD) - 3), verdict)
    tile = " ".join(f"{name}={value}" for name, value in record.tile.items())
    return (
        record.case,
        record.kernel,
        f"{tile} w{record.warps} s{record.stages}".strip(),
        str(record.registers),
        str(record.spills),
        str(record.loop_spills),
        f"{record.shared_bytes / 1024:.1f}/{target.family.shared_bytes // 1024}",
        _counts(record.matrix),
        f"{record.issued:.2f}" if record.issued else "-",
        str(record.narrowest or "-"),
        _counts(record.copies),
        str(record.buffers or "-"),
        f"{record.hidden}/{record.exponentials}" if record.exponentials else "-",
        str(record.instructions),
        f"{record.seconds:.1f}",
        verdict,
    )


def _counts(counts: dict[str, int]) -> str:
    return " ".join(f"{count} {kind}" for kind, count in counts.items()) or "-"


# Chips whose key kernels are held to the rules of loops, and to a baseline.
HELD = ("sm_80", "sm_90a", "sm_100a", "gfx942")
FOLDER = Path(__file__).resolve().parent / "baselines"


class Entry(NamedTuple):
    """The stored numbers of one kernel, as ``machine.Machine`` explains them."""

    registers: int
    instructions: int
    choice: str  # its tile in words


Baseline = dict[str, dict[str, Entry]]


def baseline_path(version: str, folder: Path) -> Path:
    """The file of a version of Triton; what follows a "+" names a build and not a version."""
    return folder / f"{version.partition('+')[0]}.json"


def load(path: Path) -> Baseline:
    """Return the baseline of a file; empty where there is none."""
    if not path.is_file():
        return {}
    found = json.loads(path.read_text())
    return {
        target: {key: Entry(*entry) for key, entry in kernels.items()}
        for target, kernels in found.items()
    }


def has_baseline(record: Record, case: Case) -> bool:
    """Return whether a kernel is held to what it was: the key kernels of the chips of ``HELD``."""
    return case.key and record.target in HELD


def store(path: Path, records: Iterable[Record], *, whole: bool) -> None:
    """Put records into a file, over what it said of the same kernels.

    With ``whole`` these are all the cases of their targets, so that other entries of these targets
    are of kernels that are no more.
    """
    baseline = load(path)
    kept = [record for record in records if not record.error]
    if whole:
        for target in {record.target for record in kept}:
            baseline[target] = {}
    for record in kept:
        entry = Entry(record.registers, record.instructions, record.choice)
        baseline.setdefault(record.target, {})[record.key] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_text(baseline))


def _text(baseline: Baseline) -> str:
    """JSON with one kernel per line, sorted, so that a change is a line of a diff."""
    blocks = []
    for target, kernels in sorted(baseline.items()):
        lines = [
            f"    {json.dumps(key)}: {json.dumps(list(entry))}"
            for key, entry in sorted(kernels.items())
        ]
        blocks.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(blocks) + "\n}\n"


# Spills in loops that cost less than what avoids them, as measured on the chip: at most so many of
# a kernel. ``keys_in_groups`` reached 636 TFLOP/s with 43 of them, where blocks without spills
# reached 407; it has 4 now, with a table. A mask of documents with a table had 10 in
# ``attend_in_groups`` where it reached 343, FlexAttention 273; it has 6 now on Triton 3.6.0.
MEASURED_SPILLS = {("sm_90a", "keys_in_groups"): 4, ("sm_90a", "attend_in_groups"): 10}
ISSUED = 1.05  # of multiply-adds that are done over those that are needed; more is a fault
GROWTH = 1.05  # of registers or instructions over the baseline; more is a fault


def faults(record: Record, case: Case, target: Target, before: Entry | None) -> list[str]:
    """Reasons to fail a kernel; empty for a good one."""
    if record.error:
        return [record.error]
    found = []
    kernel = record.kernel.partition(" ")[0]
    allowed = MEASURED_SPILLS.get((target.name, kernel), 0) if case.measured else 0
    if record.loop_spills > allowed:
        found.append(f"{record.loop_spills} of {record.spills} spills are in loops")
    shared_bytes, most = record.shared_bytes, target.family.shared_bytes
    if shared_bytes > most:
        found.append(f"{shared_bytes} bytes of shared memory, the chip has {most}")
    if case.sixteen_bit and kernel not in case.without_products:
        found += _matrix_faults(record, target)
        if case.key and target.name in HELD:
            found += _loop_faults(record, case, target)
    if before is not None:
        for what in ("registers", "instructions"):
            found += _growth(what, before, record)
    return found


# Kernels of 16 rows, which wait for memory: four of AMD's warps all multiply them.
_FEW_ROWS = ("attend_split", "listed_key_kernel")


def _loop_faults(record: Record, case: Case, target: Target) -> list[str]:
    """What keeps the matrix units of a chip from their work in the loops of a key kernel."""
    found = []
    few = target.family.maker == "hip" and record.kernel in _FEW_ROWS
    if record.issued > ISSUED and not few:
        found.append(f"matrix instructions do {record.issued:.2f} times what the products need")
    if 0 < record.narrowest < case.columns:
        found.append(f"a wgmma of {record.narrowest} columns, {case.columns} are due")
    if target.family.maker == "cuda":
        if record.waiting and "tma" not in record.copies:  # else a warp of its own copies
            found.append(f"{record.waiting} loops without an asynchronous copy")
        if record.buffers < 2:
            found.append(f"{record.buffers} buffers for a tile that a loop copies, 2 are due")
    return found


def out_of_date(record: Record, target: Target) -> str:
    """Return how a probe's record contradicts the target's reason to be left out; empty if not."""
    if record.error:
        return f"the probe failed: {record.error}"
    if record.matrix:
        return f"Triton does make matrix instructions for {target.name}: targets.py is out of date"
    return ""


def _matrix_faults(record: Record, target: Target) -> list[str]:
    if not record.matrix:
        return ["no matrix instruction"]
    # Hopper's and Blackwell's own instructions take 64 rows; smaller products keep to the old ones.
    # Those of the forward pass have a row per query, those of the backward one per query or key.
    # Of key lists, where few keys are neighbours, it has one per key.
    rows = max(record.tile.values(), default=64)
    if record.kernel.split()[0] in _BY_QUERIES:
        rows = record.tile["BM"]
    elif record.kernel == "listed_key_kernel":
        rows = record.tile["BN"]
    if target.family.unit not in record.matrix and rows >= 64:
        return [f"{'/'.join(record.matrix)} instead of {target.family.unit}"]
    return []


def _growth(what: str, entry: Entry, record: Record) -> list[str]:
    before, now = getattr(entry, what), getattr(record, what)
    if now <= before * GROWTH:
        return []
    tile = "" if entry.choice == record.choice else f"; was {entry.choice}, is {record.choice}"
    return [f"{what} {before} -> {now} (+{now / before - 1:.1%}{tile})"]
