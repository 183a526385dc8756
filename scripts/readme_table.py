"""Fill the tables of pages from stored results: python scripts/readme_table.py [--check].

The text between the two ``measured`` marks (of the bench) and between the two ``studied`` marks (of
the study) of docs/measured.md belongs to this script, that between the two ``sparse`` and the two
``suites`` marks of benchmarks/README.md, that between the two ``counted`` marks of docs/io-model.md
and those between the ``lists`` and the ``list-memory`` marks of docs/key-lists.md. With ``--check``
nothing is written, and the exit status is 1 where a page differs from benchmarks/.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import runpy
import sys
from pathlib import Path

from tilelab import bench
from tilelab.bench.command import SUITES
from tilelab.bench.sentences import sentences
from tilelab.bench.steps import Point, SuiteRecord, amount_of
from tilelab.bench.suites import (
    LIST_HEADS,
    LIST_MEMORY_HEADS,
    LIST_ROWS,
    LIST_WIDTH,
    LISTED,
)
from tilelab.bench.tables import suite_heading
from tilelab.counted.cases import Row, verdict
from tilelab.counted.cases import table as tabulated
from tilelab.peers.methods import OURS, by_drawn_lists, masked_by_lists, over_all_keys

ROOT = Path(__file__).resolve().parent.parent
STUDY = "benchmarks/studies/laptop/report.md"
OLD_ROWS = "The decode rows of the Zen 5 predate the decode kernel."
# What readers call the processors of benchmarks/, by folder; others have the folder's name.
PROCESSORS = {
    "amd-epyc-25-17": "AMD Zen 4",
    "amd-epyc-25-17-avx2": "AMD Zen 4, AVX2 alone",
    "amd-epyc-26-2": "AMD Zen 5",
    "intel-r-xeon-r-processor-6-167": "Intel Xeon with AMX",
    "intel-r-xeon-r-processor-6-207": "Intel Xeon without AMX",
}
PEER = "\npeer "  # what was not measured, and why
BLOCK = r"(<!-- {0}: begin[^\n]*-->\n).*?(<!-- {0}: end -->)"


def processor(stored: Path) -> str:
    """The processor of a stored result."""
    return PROCESSORS.get(stored.parent.name, stored.parent.name)


def table(stored: Path) -> str:
    """One stored result as Markdown, as the bench itself prints it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        bench.main(["cpu", "--from", str(stored), "--markdown", "--brief"])
    return printed.getvalue().strip()


def others(stored: Path) -> str:
    """The table of other packages of a stored result, under its machine."""
    machine, _, rest = table(stored).partition("\n")
    _, title, after = rest.partition("**Other packages")
    return f"{machine}\n\n{title}{after.partition(PEER)[0].strip()}"


def verdicts(report: str) -> str:
    """The verdict tables of a report of a study, each under its question and its meaning."""
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
    return "\n".join([*facts, *shown, "", f"The whole report: [{STUDY}](../{STUDY})."])


def sparse(stored: Path) -> str:
    """What empty tiles save, as ``scripts/bench_sparse.py`` prints it, with its plot."""
    report = runpy.run_path(str(ROOT / "scripts" / "bench_sparse.py"))["report"]
    picture = stored.with_suffix(".svg").relative_to(ROOT / "benchmarks")
    return f"![Time against density]({picture})\n\n{report(json.loads(stored.read_text()))}"


def suites(folder: Path) -> list[str]:
    """What each stored suite of a chip found: its own sentences, and figures that lie beside it."""
    found, place = [], folder.relative_to(ROOT / "benchmarks")
    for name in (*SUITES, "all"):
        stored = folder / f"{name}.json"
        if not stored.exists():
            continue
        record = SuiteRecord.read(stored)
        machine, _, *missing = suite_heading(record)
        lines = [f"### {name}", "", f"{machine} ([tables]({place}/{name}.md))."]
        said = [line for suite in record.suites for line in sentences(record, suite)]
        lines += [*missing, "", *(f"- {line}" for line in said)]
        for picture in sorted(folder.glob(f"{name}-*.svg")):
            lines += ["", f"![{name}]({place}/{picture.name})"]
        found.append("\n".join(lines))
    return found


def lists(stored: Path) -> str:
    """What the suite ``lists`` found: a line for each direction, length and share of the keys."""
    record = SuiteRecord.read(stored)
    found: dict[tuple[str, int], dict[str, Point]] = {}
    for point in record.points:
        if point.dtype == "float32":
            found.setdefault((point.case, point.length), {})[point.method] = point
    others = [name for name in next(iter(found.values())) if name != OURS]
    titles = {"sdpa": "torch with a mask", "plain": "plain with a mask"}
    rows = [["", "keys in all", "keys read", "time by lists"]]
    rows[0] += [titles.get(name, name) for name in others]
    for (case, length), points in found.items():
        direction, share = case.split(", 1 of ")
        ours = points[OURS].median
        if ours is None:
            continue
        beside = [
            why_not(each) if each.median is None else f"{each.median / ours:.1f}x as long"
            for each in (points[name] for name in others)
        ]
        keys = length // int(share.split()[0])
        of_row = f"{ours / points[OURS].shape.get('queries', LIST_ROWS) * 1e3:.2f} ms"
        rows.append([direction, f"{length:,}", f"{keys:,}", of_row, *beside])
    machine, *_ = suite_heading(record)
    return (
        f"Time of a query row with {LIST_HEADS} heads of width {LIST_WIDTH} that share one key "
        f"head, float32, one thread. {machine}.\n\n{in_markdown(rows)}"
    )


def in_markdown(rows: list[list[str]]) -> str:
    """A table, whose first row is its heading."""
    heading, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([heading, f"|{'---|' * len(rows[0])}", *rest])


def why_not(point: Point) -> str:
    """Why a point has no samples, in two or three words."""
    if point.status == "wrong":
        return "breaks the 2x rule"
    reasons = {"are left": "no time left", "are free": "too much memory"}
    return next((words for text, words in reasons.items() if text in point.note), "not measured")


def list_memory(stored: Path) -> str:
    """What the suite ``list-memory`` found: a line for each pass and length."""
    record = SuiteRecord.read(stored)
    found: dict[tuple[str, int], dict[str, str]] = {}
    for point in record.points:
        median = point.median
        held = why_not(point) if median is None else amount_of(median, point.quantity)
        found.setdefault((point.case, point.length), {})[point.method] = held
    titles = {
        by_drawn_lists().name: "by lists",
        over_all_keys().name: "tilewise, all keys",
        masked_by_lists().name: "torch with a mask",
    }
    rows = [["", "queries and keys", *titles.values()]]
    for (case, length), held in sorted(found.items()):
        words = "forward" if case == "forward" else "forward and backward"
        rows.append([words, f"{length:,}", *(held[method] for method in titles)])
    machine, *_ = suite_heading(record)
    longest = max(
        (point for point in record.points if point.method == by_drawn_lists().name),
        key=lambda point: point.length,
    )
    own = 4 * longest.length * LISTED  # bytes of the int32 lists themselves
    times = (longest.median or math.nan) / own
    return (
        f"{LIST_MEMORY_HEADS} heads of width 64 that share one key head, float32, lists of "
        f"{LISTED} keys that all heads share. {machine}. At {longest.length:,} keys a call by "
        f"lists needs {times:.1f} times the size of its lists.\n\n{in_markdown(rows)}"
    )


def counted(stored: Path) -> str:
    """Predicted bytes beside counted ones."""
    rows = [Row.read(each) for each in json.loads(stored.read_text())["rows"]]
    return f"{tabulated(rows)}\n\nIn short, {verdict(rows)}."


def filled(page: str, mark: str, text: str) -> str:
    """The page with a text between two marks."""
    block = re.compile(BLOCK.format(mark), re.DOTALL)
    return block.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def pages() -> dict[Path, str]:
    """Every page with tables, as it should be."""

    def stored(pattern: str) -> list[Path]:
        return sorted((ROOT / "benchmarks").glob(pattern))

    measured = [f"### {processor(path)}\n\n{table(path)}" for path in stored("*/cpu.json")]
    measured += [OLD_ROWS] if measured else []
    measured += [
        f"### Other packages, {processor(path)}\n\n{others(path)}"
        for path in stored("*/peers.json")
    ]
    texts = {
        ("docs/measured.md", "measured"): measured,
        ("docs/measured.md", "studied"): [verdicts(path.read_text()) for path in ROOT.glob(STUDY)],
        ("benchmarks/README.md", "sparse"): [sparse(path) for path in stored("*/sparse.json")],
        ("benchmarks/README.md", "suites"): [
            text for folder in stored("*/suites") for text in suites(folder)
        ],
        ("docs/key-lists.md", "lists"): [lists(path) for path in stored("*/suites/lists.json")],
        ("docs/key-lists.md", "list-memory"): [
            list_memory(path) for path in stored("*/suites/list-memory.json")
        ],
        ("docs/io-model.md", "counted"): [
            counted(path) for path in stored("cachegrind/counted.json")
        ],
    }
    found: dict[Path, str] = {}
    for (name, mark), parts in texts.items():
        page = ROOT / name
        before = found.get(page) or page.read_text()
        found[page] = filled(before, mark, "\n\n".join(parts)) if parts else before
    return found


def main(arguments: list[str]) -> int:
    """Write the pages, or compare."""
    pending = {path: text for path, text in pages().items() if path.read_text() != text}
    if arguments == ["--check"]:
        for path in pending:
            print(f"{path.relative_to(ROOT)} is out of date")
        if not pending:
            print("the pages show benchmarks/")
        return int(bool(pending))
    for path, text in pending.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
