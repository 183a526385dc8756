"""``tilewise bench me``: eight cases in a minute, as bars and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from tilelab.bench.goals import CaseResult, GoalRecord
from tilelab.bench.tables import heading

EIGHT = (
    "forward causal 2k float32",
    "forward causal 2k bfloat16",
    "backward causal 2k float32",
    "backward causal 2k bfloat16",
    "window 256 at 2k float32",
    "dropout 0.1 at 2k float32",
    "grouped 32:4 at 2k bfloat16",
    "decode 8 heads, 16k keys bfloat16",
)
PICTURE = Path("tilewise-bench.png")
_EVEN = 0.03  # of a ratio: within it neither is faster
_OURS, _THEIRS = "#2f6fb5", "#c2554d"  # bars of what is faster, and of what is slower


def results(record: GoalRecord) -> list[CaseResult]:
    """Return what a record has of the eight, in their order, without what was wrong."""
    found = {f"{each.name} {each.dtype}": each for each in record.cases if not each.wrong}
    return [found[key] for key in EIGHT if key in found]


def show(record: GoalRecord, console: Console) -> None:
    """Print a bar for each case, how many times faster than torch it is, and a sentence."""
    found = results(record)
    table = Table.grid(padding=(0, 2))
    longest = max((each.ratio for each in found), default=1.0)
    for each in found:
        colour = "green" if each.ratio >= 1 else "red"
        bar = Bar(longest, 0, each.ratio, color=colour)
        table.add_row(each.name, each.dtype, f"{each.ratio:.2f}x", bar)
    for line in heading(record):
        console.print(line, markup=False, highlight=False)
    console.print("Times faster than torch's scaled_dot_product_attention:", highlight=False)
    console.print(table)
    console.print(sentence(found), highlight=False)


def sentence(found: Sequence[CaseResult]) -> str:
    """Return how many cases are faster, by how much on average, and which are slower."""
    if not found:
        return "None of the eight cases was measured."
    ahead = sum(each.ratio > 1 + _EVEN for each in found)
    behind = [each for each in found if each.ratio < 1 - _EVEN]
    mean = geometric_mean(each.ratio for each in found)
    said = f"tilewise is faster in {ahead} of {len(found)}; geometric mean {mean:.2f}x."
    if behind:
        said += " Slower: " + "; ".join(f"{each.name} {each.dtype}" for each in behind) + "."
    return said


def draw(record: GoalRecord, path: Path) -> None:
    """Draw the bars into a file; its ending says the format, such as ``.png`` or ``.svg``.

    Raises:
        ValueError: matplotlib has no such format.
        OSError: the file cannot be written.
    """
    found = results(record)
    with matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 11}):
        figure = Figure((8.4, 0.9 + 0.42 * max(len(found), 1)), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for row, each in enumerate(found):
            axes.barh(row, each.ratio, color=_OURS if each.ratio >= 1 else _THEIRS)
            axes.annotate(
                f"{each.ratio:.2f}x",
                (each.ratio, row),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        axes.set_yticks(range(len(found)), [f"{each.name}, {each.dtype}" for each in found])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.axvline(1, color="black", linewidth=1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xlabel(label(record))
        figure.savefig(path)


def label(record: GoalRecord) -> str:
    """Return what the bars of the picture say, and where it was measured."""
    machine = record.machine
    threads = "one thread" if record.threads == 1 else f"{record.threads} threads"
    versions = machine["versions"]
    return f"times faster than torch {versions['torch']} (line), {threads} of {machine['chip']}"
