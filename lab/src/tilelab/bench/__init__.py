"""The bench: ours and torch's attention measured side by side, against the machine's own peak.

``tilewise bench`` measures the cases that have goals or a suite, or compares two runs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

__all__ = ["SUITES", "main"]

SUITES = ("speed", "memory", "accuracy", "paper", "models", "variants", "all")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench.

    Args:
        argv: ``cpu [options]`` (or options alone), ``SUITE ... [options]``, ``compare A B``, or
            ``show FILE``; None takes them from the command line.

    Returns:
        the exit status, as of the part that was asked for.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    first = given[0] if given else ""
    if first in SUITES or first in ("compare", "show"):
        from tilelab.bench.suites.command import compare_main, show_main, suites_main

        if first in SUITES:
            return suites_main(given)
        return (compare_main if first == "compare" else show_main)(given[1:])
    if first and first != "cpu" and not first.startswith("-"):
        known = ("cpu", *SUITES, "compare", "show")
        near = get_close_matches(first, known, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print(
            f"tilewise bench: no suite {first!r}.{meant} There are: cpu, {', '.join(SUITES)}; "
            "and compare A.json B.json, show FILE.json.",
            file=sys.stderr,
        )
        sys.exit(2)  # as argparse does
    from tilelab.bench.command import main as goals_main

    return goals_main(given)
