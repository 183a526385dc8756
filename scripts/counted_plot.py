"""Draw counted against predicted bytes: scripts/counted_plot.py [docs/io-model-counted.svg].

Left: every case. Right: one attention behind smaller and smaller caches. From what
``scripts/counted.sh --json`` stored; the lines are what the model says today. Needs the extra
``lab`` (matplotlib).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilelab.counted.cases import Case, Row
from tilewise.errors import InvalidArgument

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "cachegrind" / "counted.json"
OURS, PLAIN, OTHER, CAUSAL = "#0a7a8f", "#565d69", "#c4551b", "#7a5ca8"
STEP = 4 << 10  # bytes of cache between two points of a line


def _cases(axes: Any, rows: Sequence[Row]) -> None:
    """Counted against predicted, and the bands that are promised."""
    ends = [0.25, 30.0]
    for share, colour in ((0.20, PLAIN), (0.15, OURS)):
        low, high = ([end * (1 + sign * share) for end in ends] for sign in (-1, 1))
        axes.fill_between(ends, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.plot(ends, ends, color="black", linewidth=0.6)
    for method, direction, marker, colour, name in (
        ("core", "forward", "o", OURS, "ours, forward"),
        ("core", "backward", "s", OURS, "ours, backward"),
        ("plain", "forward", "o", PLAIN, "plain, forward"),
        ("plain", "backward", "s", PLAIN, "plain, backward"),
    ):
        of = [row for row in rows if (row.case.method, row.case.direction) == (method, direction)]
        counted, predicted = ([x / 1e6 for x in each] for each in zip(
            *((row.counted, row.predicted) for row in of), strict=True))  # fmt: skip
        axes.plot(counted, predicted, marker, color=colour, markersize=5, label=name, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ends)
    axes.set_ylim(ends)
    axes.set_xlabel("MB counted by cachegrind")
    axes.set_ylabel("MB predicted")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Every case, and 15 % and 20 % around it", fontsize=10)


def _sweep(axes: Any, rows: Sequence[Row]) -> None:
    """Points counted, lines predicted."""
    for method, task, colour, name in (
        ("plain", 512, PLAIN, "plain"),
        ("core", 64, OURS, "ours, tasks of 64 queries"),
        ("core", 512, OTHER, "ours, tasks of 512"),
        ("core", 128, CAUSAL, "ours, causal, N 1024, D 32"),
    ):
        of = [row for row in rows if (row.case.method, row.case.task) == (method, task)]
        axes.plot(
            [row.case.cache >> 10 for row in of],
            [row.counted / 1e6 for row in of],
            "o",
            color=colour,
            markersize=4,
            label=name,
        )
        caches, predicted = _line(of[0].case, of[0].case.cache, of[-1].case.cache)
        axes.plot(caches, predicted, color=colour, linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [2**n for n in range(6, 13)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel("last-level cache, KiB")
    axes.set_ylabel("MB filled, forward")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("N 512, D 64, one head: points counted, lines predicted", fontsize=10)


def _line(case: Case, first: int, last: int) -> tuple[list[float], list[float]]:
    caches, predicted = [], []
    for cache in range(first, last + 1, STEP):
        caches.append(cache / 1024)
        predicted.append(replace(case, cache=cache).predicted().bytes / 1e6)
    return caches, predicted


def draw(path: Path, stored: Path = STORED) -> None:
    """Write the picture as SVG: the same bytes every time."""
    from tilelab.common.svg import plotted

    if not stored.exists():
        raise InvalidArgument("stored", f"no {stored.name}", "what counted.sh --json wrote")
    counts = json.loads(stored.read_text())
    rows, sweep = ([Row.read(each) for each in counts[part]] for part in ("rows", "sweep"))
    with plotted(path, (11, 4.2), 1, 2) as (left, right):
        _cases(left, rows)
        _sweep(right, sweep)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "io-model-counted.svg")
