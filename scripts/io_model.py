"""Draw the IO model's pictures: scripts/io_model.py [FOLDER], else docs/.

``io-model.svg``. Left: the account of the FlashAttention paper. Right: traffic and time of the
forward pass against the block that stays in fast memory, in both loop orders.

``io-model-counted.svg``. Left: every case, counted against predicted. Right: one attention behind
smaller and smaller caches. Counts are what ``scripts/counted.sh --json`` stored; the lines are what
the model says today.

Needs the extra ``lab`` (matplotlib).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilelab.common.svg import plotted
from tilelab.counted import paper
from tilelab.counted.cases import Case, Row

ROOT = Path(__file__).resolve().parent.parent
STORED = ROOT / "benchmarks" / "cachegrind" / "counted.json"
BLOCKS = (32, 64, 128, 256, 512, 1024)
OURS, PLAIN, OTHER, CAUSAL = "#0a7a8f", "#565d69", "#c4551b", "#7a5ca8"
STEP = 4 << 10  # bytes of cache between two points of a line


def _account(axes: Any) -> None:
    """Bytes of forward and backward, beside what the paper printed."""
    tiles = paper.ours()
    behind = tiles.behind(paper.CHIP.last_cache_bytes, paper.CHIP.cores)
    rows = [
        ("standard", paper.standard().bytes, PLAIN),
        ("standard, printed", paper.PRINTED["standard"][0], PLAIN),
        ("FlashAttention", paper.the_first().bytes, OTHER),
        ("FlashAttention, printed", paper.PRINTED["flash"][0], OTHER),
        ("tilewise, tiles", tiles.bytes, OURS),
        ("tilewise, to memory", behind.bytes, OURS),
    ]
    for place, (name, size, colour) in enumerate(rows):
        printed = "printed" in name
        axes.barh(place, size / 1e9, color="none" if printed else colour, edgecolor=colour)
        axes.text(size / 1e9 + 0.6, place, f"{size / 1e9:.1f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 47)
    axes.set_xlabel("GB, forward and backward")
    axes.set_title("GPT-2 medium, N 1024, d 64, 16 heads, batch 64", fontsize=10)


def _curve(axes: Any) -> None:
    """The forward pass against the block, keys outside and queries outside."""
    time = axes.twinx()
    for keys_outside, colour, name in ((True, OTHER, "keys"), (False, OURS, "queries")):
        points = paper.against_blocks(BLOCKS, keys_outside)
        traffic = [at.traffic.bytes / 1e9 for at in points]
        axes.plot(BLOCKS, traffic, "o-", color=colour, label=f"traffic, {name} outside")
        seconds = [at.seconds.total * 1e3 for at in points]
        time.plot(BLOCKS, seconds, "s--", color=colour, alpha=0.55, markersize=4)
        axes.plot([], [], "s--", color=colour, alpha=0.55, label=f"time, {name} outside")
    axes.set_xscale("log", base=2)
    axes.set_xticks(BLOCKS, [str(block) for block in BLOCKS])
    axes.set_ylim(0)
    time.set_ylim(0)
    axes.set_xlabel("rows that stay in fast memory")
    axes.set_ylabel("GB, forward")
    time.set_ylabel("ms, forward, A100")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("Traffic and time against the block", fontsize=10)


def draw(path: Path) -> None:
    """Write the account as SVG: the same bytes every time."""
    with plotted(path, (11, 3.6), 1, 2) as (left, right):
        _account(left)
        _curve(right)


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


def draw_counted(path: Path) -> None:
    """Write what was counted as SVG, likewise."""
    counts = json.loads(STORED.read_text())
    rows, sweep = ([Row.read(each) for each in counts[part]] for part in ("rows", "sweep"))
    with plotted(path, (11, 4.2), 1, 2) as (left, right):
        _cases(left, rows)
        _sweep(right, sweep)


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs"
    draw(folder / "io-model.svg")
    draw_counted(folder / "io-model-counted.svg")
