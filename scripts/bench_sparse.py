"""What empty tiles save: scripts/bench_sparse.py [--json FILE] [--plot FILE] [--from FILE].

Forward and backward of random layouts of tiles at falling density, and of the published patterns,
against attention without a mask: one thread, processor time of the calling thread, all cases of a
length in turn; medians, and the least and the largest ratio of any round. ``--from`` shows a
stored run instead. The plot needs the extra ``lab`` (matplotlib).

Times of random layouts are fitted as ``row cost x rows of tiles + tile cost x tiles that are not
empty``. If time went with the tiles alone, the row cost would be 0 and the tile cost that of
attention without a mask.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tilelab.cases.case import Pass
from tilelab.common.clock import Call, interleave, once, repeats_for
from tilelab.peers.methods import ours
from tilelab.peers.work import Work, call_of
from tilelab.peers.work import draw as drawn
from tilewise import BlockMask, masks, patterns
from tilewise.chips import detect
from tilewise.inspect.peaks import isa

WIDTH = 64
HEADS = {4096: 4, 16384: 2, 65536: 1}  # fewer where a call takes long; times are by the tile
ROUNDS = {4096: 15, 16384: 7, 65536: 5}
DENSITIES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02)
LONG = (
    32768  # from here on without layouts of more than LONG_DENSITY, and patterns with no empty tile
)
LONG_DENSITY = 0.2
QUERIES, KEYS = 64, 128  # of a tile
PASSES: tuple[Pass, ...] = ("forward", "backward")
DENSE, RANDOM, PATTERN = "dense", "random", "pattern"

Record = dict[str, Any]


class Fit(NamedTuple):
    """``time = row_s * rows + tile_s * tiles``, by least squares of the relative residuals."""

    row_s: float  # of a row of tiles, whether any of them is visited or not
    tile_s: float  # of a tile that is not empty
    slope: float  # tile_s over the time of a tile without a mask; 1 is proportional
    exponent: float  # of the tiles in ``time ~ tiles ** exponent``; 1 is proportional
    worst: float  # the largest relative residual


def published(length: int) -> dict[str, masks.Mask]:
    """The published patterns at one length, by name."""
    stride = 2 ** round(math.log2(length) / 2)
    found = {
        "butterfly(128)": patterns.butterfly(128),
        "local_global(256, 64), Longformer": patterns.local_global(256, 64),
        "bigbird, blocks of 64": patterns.bigbird(length),
        "bigbird, blocks of 128": patterns.bigbird(length, block=128),
        "dilated(64, 4)": patterns.dilated(64, 4),
    }
    if length < LONG:
        found[f"strided({stride})"] = patterns.strided(stride)
        found[f"fixed({stride}, 8)"] = patterns.fixed(stride, 8)
    return found


def block_masks(length: int) -> Iterator[tuple[str, str, BlockMask | None]]:
    """What is measured at one length: kind, name and mask."""
    yield DENSE, "no mask", None
    generator = torch.Generator().manual_seed(length)
    grid = (-(-length // QUERIES), -(-length // KEYS))
    for density in DENSITIES:
        if length >= LONG and density > LONG_DENSITY:
            continue
        tiles = torch.rand(grid, generator=generator) < density
        yield RANDOM, f"random {density:g}", BlockMask.from_layout(tiles)
    for name, mask in published(length).items():
        yield PATTERN, name, BlockMask.of(mask, length)


def measure(length: int, heads: int, rounds: int) -> Record:
    """Every case of one length, forward and backward, in turn."""
    cases: list[Record] = []
    calls: dict[str, Call] = {}
    rows = heads * -(-length // QUERIES)
    for kind, name, mask in block_masks(length):
        all_of_them = (0, 0, rows // heads * -(-length // KEYS))
        empty, partial, full = all_of_them if mask is None else mask.counts
        cases.append(
            {
                "kind": kind,
                "name": name,
                "density": (partial + full) / (empty + partial + full),
                "tiles": heads * (partial + full),
                "partial": heads * partial,
            }
        )
        both = both_passes(length, heads, mask)
        calls |= {f"{name}, {each}": call for each, call in both.items()}
    repeats = {name: repeats_for(once(call).wall_s) for name, call in calls.items()}
    samples = interleave(calls, repeats, rounds, once)
    for case in cases:
        for each in PASSES:
            case[each] = [times.cpu_s for times in samples[f"{case['name']}, {each}"]]
    return {"length": length, "heads": heads, "rows": rows, "cases": cases}


def both_passes(length: int, heads: int, mask: BlockMask | None) -> dict[str, Call]:
    """The forward pass, and the backward pass by q, k and v."""
    found: dict[str, Call] = {}
    for each in PASSES:
        sizes = (1, heads, heads, length, length, WIDTH, WIDTH)
        made = () if mask is None else (lambda _: mask,)
        work = Work(each, *sizes, mask=made, passes=each)
        given = drawn(work)
        found[each] = call_of(work, given, ours().make(work, given))
    return found


def whole(length: int, heads: int, threads: int, rounds: int) -> Record:
    """The butterfly with all heads of a layer on several threads: wall time."""
    mask = BlockMask.of(patterns.butterfly(128), length)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    calls = both_passes(length, heads, mask)
    samples = interleave(calls, dict.fromkeys(PASSES, 1), rounds, once)
    torch.set_num_threads(before)
    found = {name: [each.wall_s for each in times] for name, times in samples.items()}
    return {"length": length, "heads": heads, "threads": threads, "density": mask.density, **found}


def fit(measured: Record, name: str) -> Fit:
    """The two costs of the pass of a name, from the random layouts of one length."""
    rows = measured["rows"]
    found = [x for x in measured["cases"] if x["kind"] == RANDOM and x["tiles"]]
    times = [statistics.median(x[name]) for x in found]
    tiles = [x["tiles"] for x in found]
    # Each equation divided by its time: a share of 1 = row_s * a + tile_s * b.
    shares = np.array([[rows / t, count / t] for t, count in zip(times, tiles, strict=True)])
    found_s, *_ = np.linalg.lstsq(shares, np.ones(len(times)), rcond=None)
    row_s, tile_s = (float(seconds) for seconds in found_s)
    worst = float(np.abs(shares @ found_s - 1).max())
    dense = next(x for x in measured["cases"] if x["kind"] == DENSE)
    exponent = statistics.linear_regression(
        [math.log(count) for count in tiles], [math.log(t) for t in times]
    ).slope
    slope = tile_s / (statistics.median(dense[name]) / dense["tiles"])
    return Fit(row_s, tile_s, slope, exponent, worst)


def _ratio(dense: list[float], other: list[float]) -> str:
    """How many times faster, with the least and the largest of any round."""
    ratios = [x / y for x, y in zip(dense, other, strict=True)]
    middle = statistics.median(dense) / statistics.median(other)
    return f"{middle:.1f} ({min(ratios):.1f} to {max(ratios):.1f})"


def cost_table(record: Record) -> list[str]:
    """The fits, as lines of Markdown."""
    lines = [
        "| N, heads | pass | a tile without a mask, us | a tile, us | against proportional "
        "| exponent | a row of tiles, us | its share at density 0.1, 0.02 | residual |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for measured in record["lengths"]:
        dense = next(x for x in measured["cases"] if x["kind"] == DENSE)
        for name in PASSES:
            found = fit(measured, name)
            plain = statistics.median(dense[name]) / dense["tiles"]
            whole_grid = dense["tiles"] / measured["rows"]  # tiles of a row
            shares = [
                found.row_s / (found.row_s + found.tile_s * density * whole_grid)
                for density in (0.1, 0.02)
            ]
            lines.append(
                f"| {measured['length']}, {measured['heads']} | {name} | {plain * 1e6:.2f} "
                f"| {found.tile_s * 1e6:.2f} | {(found.slope - 1) * 100:+.0f} % "
                f"| {found.exponent:.2f} | {found.row_s * 1e6:.1f} "
                f"| {shares[0] * 100:.0f} %, {shares[1] * 100:.0f} % | {found.worst * 100:.0f} % |"
            )
    return lines


def time_table(measured: Record) -> list[str]:
    """The cases of one length, as lines of Markdown."""
    lines = [
        "| mask | density | forward, ms | times faster than without | backward, ms "
        "| times faster than without |",
        "|---|---|---|---|---|---|",
    ]
    dense = next(x for x in measured["cases"] if x["kind"] == DENSE)
    for case in measured["cases"]:
        cells = []
        for name in PASSES:
            cells.append(f"{statistics.median(case[name]) * 1e3:.1f}")
            cells.append("" if case is dense else _ratio(dense[name], case[name]))
        lines.append(f"| {case['name']} | {case['density']:.3f} | " + " | ".join(cells) + " |")
    return lines


def report(record: Record) -> str:
    """Everything that was stored, as Markdown."""
    parts = ["\n".join(cost_table(record))]
    for measured in record["lengths"]:
        heads = f"{measured['heads']} head" + ("s" if measured["heads"] > 1 else "")
        title = f"N = {measured['length']}, {heads}, D = {record['width']}, {record['dtype']}:"
        parts += [title, "\n".join(time_table(measured))]
    if record.get("whole"):
        run = record["whole"]
        times = [f"{name} {statistics.median(run[name]):.2f} s" for name in PASSES]
        parts.append(
            f"The butterfly over {run['length']} tokens with {run['heads']} heads on "
            f"{run['threads']} threads (density {run['density']:.3f}), wall time: "
            f"{', '.join(times)}."
        )
    return "\n\n".join(parts)


def draw(record: Record, path: Path) -> None:
    """Time against density, relative to no mask, as SVG: the same record gives the same bytes."""
    from tilelab.common.svg import plotted

    count = len(record["lengths"])
    with plotted(path, (3.6 * count, 4.2), 1, count, sharey=True, squeeze=False) as axes:
        for axis, measured in zip(axes.flat, record["lengths"], strict=True):
            _panel(axis, measured)
        axes.flat[0].set_ylabel("time, relative to no mask")
        axes.flat[0].figure.legend(
            *axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=3
        )


def _panel(axis: Any, measured: Record) -> None:
    """One length: points, what was fitted through them, and the line of proportion."""
    dense = next(x for x in measured["cases"] if x["kind"] == DENSE)
    ends = (0.01, 1.0)
    axis.plot(ends, ends, color="#999999", linestyle=":", label="proportional")
    line = [ends[0] ** (1 - step / 40) for step in range(41)]
    for name, colour in zip(PASSES, ("#1f6fb4", "#c2571a"), strict=True):
        base = statistics.median(dense[name])
        found = fit(measured, name)
        fitted = [
            (found.row_s * measured["rows"] + found.tile_s * x * dense["tiles"]) / base
            for x in line
        ]
        axis.plot(line, fitted, color=colour, linewidth=1)
        for kind, marker, fill in ((RANDOM, "o", colour), (PATTERN, "D", "none")):
            cases = [x for x in measured["cases"] if x["kind"] == kind]
            axis.plot(
                [x["density"] for x in cases],
                [statistics.median(x[name]) / base for x in cases],
                marker,
                color=colour,
                markerfacecolor=fill,
                markersize=5,
                label=f"{name}, {'random tiles' if kind == RANDOM else 'published patterns'}",
            )
    axis.set(xscale="log", yscale="log", xlim=(0.0085, 1.2), ylim=(0.0085, 1.7))
    axis.set_xlabel("share of tiles that are not empty")
    axis.set_title(f"N = {measured['length']}", fontsize=10)
    axis.grid(which="major", color="#e4e4e4", linewidth=0.6)


def run(lengths: list[int], rounds: int | None, heads: int) -> Record:
    """Measure everything on this machine, on one thread but for the run with all heads.

    ``rounds`` are for every length; None for ROUNDS. 0 ``heads`` leave the run with all heads out.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    record: Record = {
        "chip": detect().name,
        "isa": isa(),
        "system": platform.platform(terse=True),
        "torch": torch.__version__,
        "dtype": "float32",
        "width": WIDTH,
        "tile": [QUERIES, KEYS],
        "lengths": [],
    }
    begin = time.monotonic()
    for length in lengths:
        record["lengths"].append(measure(length, HEADS[length], rounds or ROUNDS[length]))
    if heads:
        record["whole"] = whole(max(lengths), heads, threads, 3)
    record["seconds"] = round(time.monotonic() - begin, 1)
    return record


def main() -> None:
    """Measure or read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="where to store the samples")
    parser.add_argument("--plot", type=Path, help="where to draw time against density (SVG)")
    parser.add_argument("--from", dest="stored", type=Path, help="show a stored run")
    parser.add_argument("--lengths", type=int, nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--heads", type=int, default=8, help="of the run with all heads; 0: none")
    options = parser.parse_args()
    if options.stored is not None:
        record = json.loads(options.stored.read_text())
    else:
        record = run(options.lengths, options.rounds, options.heads)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot is not None:
        draw(record, options.plot)
    print(report(record))


if __name__ == "__main__":
    main()
