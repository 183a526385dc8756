"""``tilewise bench``: the cases that have goals, a suite, or a comparison of two runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches

from tilelab.bench import command

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
        # Only these need the extra packages.
        from tilelab.bench.suites.command import compare_main, main, show_main

        if first in SUITES:
            return main(given)
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
    return command.main(given)
