"""The process that compiles for one chip: ``child TARGET MODULE LIMIT_S CASE...``.

It writes JSON lines: the version of Triton, the name of each launch before it is compiled, and its
record. A compiler that crashes or hangs takes this process with it, and the parent sees how far it
came.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["main"]


def main(arguments: Sequence[str]) -> None:
    """Compile the named cases and write what came out."""
    target_name, module, limit_s, *names = arguments
    tell = _line_writer()
    # Imported here, so that what Triton prints already goes to standard error.
    import triton

    from tilelab.gate.case import cases_of
    from tilelab.gate.compiling import compile_launch
    from tilelab.gate.targets import target_named

    target = target_named(target_name)
    tell({"triton": triton.__version__})
    cases = cases_of(module)
    for name in names:
        tell({"case": name})
        seen: Counter[str] = Counter()
        for launch in cases[name].launches(target.family.name):
            kernel = launch.kernel.__name__
            seen[kernel] += 1
            if seen[kernel] > 1:
                kernel = f"{kernel} {seen[kernel]}"
            tell({"case": name, "kernel": kernel})
            signal.alarm(int(limit_s))  # nobody handles it: it ends the process
            record = compile_launch(name, kernel, launch, target)
            signal.alarm(0)
            tell({"record": record._asdict()})
        tell({"done": name})


def _line_writer() -> Callable[[dict[str, Any]], None]:
    """Return a writer to the standard output, from which everybody else is turned away."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(words: dict[str, Any]) -> None:
        lines.write(json.dumps(words) + "\n")

    return tell


if __name__ == "__main__":
    main(sys.argv[1:])
