"""The chips to compile for, as Triton names them, and the least that a good kernel does on each."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TARGETS", "Target", "target_named"]

KIB = 1024


class Target(NamedTuple):
    """One chip family.

    Args:
        name: as the makers' compilers say it.
        backend: "cuda" or "hip".
        arch: what Triton calls it: a number for NVIDIA, a name for AMD.
        warp: threads that run in step.
        shared_bytes: shared memory that one program may have.
        unit: the kind of matrix instruction (``machine.MATRIX``) of a full-sized product.
        why_not: why Triton has no good code for it; empty where it has.
    """

    name: str
    backend: str
    arch: int | str
    warp: int
    shared_bytes: int
    unit: str
    why_not: str = ""

    @property
    def family(self) -> str:
        """The name without the letter that says "this very chip": sm_90a is of sm_90."""
        return self.name.rstrip("a") if self.backend == "cuda" else self.name


TARGETS = (
    Target(
        "sm_75",
        "cuda",
        75,
        32,
        64 * KIB,
        "mma",
        why_not="Triton makes no matrix instructions for it: products become scalar code on "
        "local memory",
    ),
    Target("sm_80", "cuda", 80, 32, 163 * KIB, "mma"),
    Target("sm_86", "cuda", 86, 32, 99 * KIB, "mma"),
    Target("sm_89", "cuda", 89, 32, 99 * KIB, "mma"),
    Target("sm_90a", "cuda", 90, 32, 227 * KIB, "wgmma"),
    Target("sm_100a", "cuda", 100, 32, 227 * KIB, "tcgen05"),
    Target("sm_120a", "cuda", 120, 32, 99 * KIB, "mma"),
    Target("gfx90a", "hip", "gfx90a", 64, 64 * KIB, "mfma"),
    Target("gfx942", "hip", "gfx942", 64, 64 * KIB, "mfma"),
    Target("gfx950", "hip", "gfx950", 64, 160 * KIB, "mfma"),
    Target("gfx1100", "hip", "gfx1100", 32, 64 * KIB, "wmma"),
    Target("gfx1201", "hip", "gfx1201", 32, 64 * KIB, "wmma"),
)


def target_named(name: str) -> Target:
    """The target of this name.

    Raises:
        KeyError: there is none.
    """
    for target in TARGETS:
        if target.name == name:
            return target
    raise KeyError(name)
