"""Fill the README's measured table from stored results: python scripts/readme_table.py [--check].

The text between the two ``measured`` marks belongs to this script. With ``--check`` nothing is
written, and the exit status is 1 where the README differs from benchmarks/.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from tilewise.lab import bench

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(<!-- measured: begin[^\n]*-->\n).*?(<!-- measured: end -->)", re.DOTALL)


def table(stored: Path) -> str:
    """One stored result as Markdown, as the bench itself prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.main(["cpu", "--from", str(stored), "--markdown", "--brief"])
    return printed.getvalue().strip()


def filled(readme: str, stored: list[Path]) -> str:
    """The README with the tables of these results."""
    tables = "\n\n".join(table(path) for path in stored)
    return BLOCK.sub(lambda block: f"{block[1]}{tables}\n{block[2]}", readme)


def main(arguments: list[str]) -> int:
    """Write the README, or compare."""
    readme = ROOT / "README.md"
    before = readme.read_text()
    stored = sorted((ROOT / "benchmarks").glob("*/cpu.json"))
    after = filled(before, stored) if stored else before
    if arguments == ["--check"]:
        print("the README shows benchmarks/" if after == before else "the README is out of date")
        return int(after != before)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
