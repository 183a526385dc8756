"""The compiled core: whether it is there, its instruction set, and its bare loops, the peak.

``fast_products`` tells of torch's own products of matrices.
"""

from __future__ import annotations

from typing import Literal

from tilewise.kernels.cpu import absence, core, fast_products

__all__ = ["Clock", "absence", "fast_products", "isa", "loop", "measure", "team_s"]

Clock = Literal["cpu", "wall"]


def isa() -> str:
    """Return the instruction set that runs, e.g. ``"avx512_bf16"``."""
    return str(core().isa_active())


def loop(dtype: str, name: str) -> str:
    """Return the bare loop that bounds a dtype: ``"bf16"`` or ``"fma"``.

    float16 is computed in float32, and so is bfloat16 where its dot product is missing.

    Args:
        dtype: e.g. ``"bfloat16"``.
        name: of the instruction set.
    """
    return "bf16" if dtype == "bfloat16" and name in ("avx512_bf16", "neon_bf16") else "fma"


def measure(kind: str, threads: int, clock: Clock) -> float:
    """Operations per second of the bare loop, all threads together.

    Args:
        kind: as ``loop`` gives it.
        threads: how many run it.
        clock: ``"cpu"`` counts the time that each thread ran, ``"wall"`` also what it waited.
    """
    return float(core().peak(kind, threads, clock))


def team_s(kind: str, threads: int, operations: float, repeats: int) -> float:
    """Wall seconds of one team that shares so many operations of the bare loop, mean of repeats.

    A short call pays for waking its threads; so does this loop, which does nothing else.

    Args:
        kind: as ``loop`` gives it.
        threads: how many share the operations.
        operations: of all threads together.
        repeats: teams started one after the other.
    """
    return float(core().team_seconds(kind, threads, operations, repeats))
