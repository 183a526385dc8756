"""Fill the README's tables from stored results: python scripts/readme_table.py [--check].

The text between the two ``measured`` marks (of the bench) and between the two ``studied`` marks (of
the study) belongs to this script. With ``--check`` nothing is written, and the exit status is 1
where the README differs from benchmarks/.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

from tilewise.lab import bench

ROOT = Path(__file__).resolve().parent.parent
STUDY = Path("benchmarks/studies/laptop/report.md")
BLOCK = r"(<!-- {0}: begin[^\n]*-->\n).*?(<!-- {0}: end -->)"


def table(stored: Path) -> str:
    """One stored result as Markdown, as the bench itself prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.main(["cpu", "--from", str(stored), "--markdown", "--brief"])
    return printed.getvalue().strip()


def verdicts(report: str) -> str:
    """The verdict tables of a study's report, each under its question and what it means in a line.

    Args:
        report: the Markdown that ``study report`` wrote.
    """
    before, _, rest = report.partition("\n## Verdicts\n")
    facts = [line for line in before.splitlines() if line.startswith("Study **")]
    shown = []
    for line in rest.partition("\n## ")[0].splitlines():
        if line.startswith("### "):
            shown.append(f"\n**{line.removeprefix('### ')}**\n")
        elif line.startswith("**"):
            shown.append(f"{line.strip('*')}\n")
        elif line.startswith("|"):
            shown.append(line)
    return "\n".join([*facts, *shown, "", f"The whole report: [{STUDY}]({STUDY})."])


def filled(readme: str, mark: str, text: str) -> str:
    """The README with a text between two marks."""
    block = re.compile(BLOCK.format(mark), re.DOTALL)
    return block.sub(lambda found: f"{found[1]}{text}\n{found[2]}", readme)


def main(arguments: list[str]) -> int:
    """Write the README, or compare."""
    readme = ROOT / "README.md"
    before = after = readme.read_text()
    measured = [table(path) for path in sorted((ROOT / "benchmarks").glob("*/cpu.json"))]
    if measured:
        after = filled(after, "measured", "\n\n".join(measured))
    if (ROOT / STUDY).exists():
        after = filled(after, "studied", verdicts((ROOT / STUDY).read_text()))
    if arguments == ["--check"]:
        print("the README shows benchmarks/" if after == before else "the README is out of date")
        return int(after != before)
    readme.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
