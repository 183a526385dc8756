"""The bench: ours and torch's attention measured side by side, against the machine's own peak.

``tilewise bench`` measures the cases that have goals or suites, shows a run, or compares two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; its exit status is that of the part that was asked for.

    Args:
        argv: ``cpu [options]`` (or options alone), ``SUITE ... [options]``, ``compare A B``, or
            ``show FILE``; None takes them from the command line.
    """
    from tilelab.bench.command import run  # children import this package without it

    return run(list(sys.argv[1:] if argv is None else argv))
