"""Draw the IO model's picture: scripts/io_model.py [docs/io-model.svg].

Left: the account of the FlashAttention paper. Right: traffic and time of the forward pass against
the block that stays in fast memory, in both loop orders. Needs the extra ``lab`` (matplotlib).
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tilewise
from tilelab.counted import paper

BLOCKS = (32, 64, 128, 256, 512, 1024)
OURS, PLAIN, OTHER = "#0a7a8f", "#565d69", "#c4551b"


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
    """Write the picture as SVG: the same bytes every time."""
    from tilelab.common.svg import plotted

    with plotted(path, (11, 3.6), 1, 2) as (left, right):
        _account(left)
        _curve(right)


if __name__ == "__main__":
    root = Path(tilewise.__file__).resolve().parents[2]
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else root / "docs" / "io-model.svg")
