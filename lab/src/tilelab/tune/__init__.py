"""``tilewise tune``: measures blocks for the GPU that is there, and keeps those that are faster.

It needs torch, Triton, numpy and the standard library only, and no compiled core.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tuner; arguments and exit status as of its command."""
    from tilelab.tune.command import main as run  # the worker's processes do without it

    return run(argv)
