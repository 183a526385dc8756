"""The gate's record of one kernel on one chip."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Record"]


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
