"""Check that a number of threads suits this machine."""

from __future__ import annotations

import os

__all__ = ["crowded"]


def crowded(threads: int, argument: str = "--threads") -> str:
    """Return a warning where threads would share a core; empty where they need not.

    Args:
        threads: that work at once.
        argument: that asks for them.
    """
    affinity = hasattr(os, "sched_getaffinity")  # Linux: the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if affinity else os.cpu_count() or 1
    if threads <= cores:
        return ""
    return (
        f"Warning: {argument} {threads} on {cores} core{'s' if cores > 1 else ''}: threads wait "
        f"for one another, so it is slower and says little. Take at most {cores}."
    )
