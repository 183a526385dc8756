"""Draw pictures of pages: python scripts/readme_pictures.py [--check].

``docs/speed.svg`` shows how many times faster than torch attention is on one core,
``docs/study.svg`` what each choice of the study ``ladder`` does to the loss, by the text that was
read, ``docs/key-lists.svg`` the time of a row by the keys that it reads, and
``docs/key-lists-memory.svg`` the memory of lists by the length, all four from stored results.
``docs/long-context.svg`` shows what ``tilewise.distributed.forecast`` predicts. They follow the
reader's light or dark theme. With ``--check`` nothing is written, and the exit status is 1 where a
picture does not show what is stored, or predicted.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tilelab.bench.steps import SuiteRecord
from tilelab.bench.suites import LIST_ROWS, LISTED
from tilelab.common.svg import (
    INK,
    RULE,
    SOFT,
    arm_colour,
    beside,
    canvas,
    finish,
    house_style,
    place,
    spread,
    standalone,
)
from tilelab.peers.methods import OURS, by_drawn_lists, masked_by_lists, over_all_keys
from tilelab.study.recipes.ladder import EFFECT_BITS_PER_BYTE
from tilelab.study.report import gather
from tilelab.study.report.ladders import effect_chart
from tilewise import masks
from tilewise.chips import CHIPS
from tilewise.distributed import Forecast, forecast

ROOT = Path(__file__).resolve().parent.parent
SPEED = ROOT / "benchmarks/amd-epyc-26-2/cpu.json"
LADDER = ROOT / "benchmarks/studies/ladder"
LISTS = ROOT / "benchmarks/amd-epyc-25-17/suites/lists.json"
LIST_MEMORY = ROOT / "benchmarks/amd-epyc-25-1-avx2/suites/list-memory.json"
# Names in the record, and what the picture calls them.
CASES = {
    "forward full 2k D64": "forward, 2k tokens",
    "forward causal 2k": "forward, causal, 2k",
    "forward causal 16k": "forward, causal, 16k",
    "backward full 2k": "backward, 2k",
    "backward causal 2k": "backward, causal, 2k",
    "window 256 at 2k": "window of 256, 2k",
    "dropout 0.1 at 2k": "dropout 0.1, 2k",
    "grouped 32:4 at 2k": "32 heads on 4, 2k",
}
DTYPES = ("float32", "bfloat16")
_WIDTH, _LINE = 680.0, 44.0
# Of the forecast: ranks, lengths, and the layers of the model.
RANKS, LENGTHS, LAYERS = (1, 4, 16, 64, 256), (8_000, 64_000, 500_000, 4_000_000, 10_000_000), 32


def ratios(stored: Path) -> dict[tuple[str, str], float]:
    """Torch's median time over ours, by case and dtype."""
    found = {
        (each["name"], each["dtype"]): each["summary"]["ratio"]
        for each in json.loads(stored.read_text())["cases"]
    }
    return {(case, dtype): found[case, dtype] for case in CASES for dtype in DTYPES}


def speed() -> str:
    """Bars: a case's two dtypes under each other, and a line where torch is."""
    found = ratios(SPEED)
    figure = canvas(_WIDTH, _LINE * len(CASES) + 60)
    axes = place(figure, 168, 48, 60, 12)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=1)
    axes.set_ylim(len(CASES) - 0.5, -0.5)
    axes.set_yticks(range(len(CASES)), labels=list(CASES.values()))
    for label in axes.get_yticklabels():
        label.set_color(INK)
    axes.set_xlim(0, max(found.values()) * 1.04)
    for row, case in enumerate(CASES):
        for place_of, dtype in enumerate(DTYPES):
            ratio, at = found[case, dtype], row + (place_of - 0.5) * 0.38
            axes.barh(at, ratio, height=0.34, color=arm_colour(place_of + 1), zorder=3)
            beside(axes, (ratio, at), f"{ratio:.1f}x" + ("" if row else f", {dtype}"))
    axes.axvline(1, color=INK, linewidth=1.2, zorder=5)
    axes.set_xlabel("times faster than torch (line: torch), one core", color=SOFT, labelpad=7)
    told = "; ".join(f"{CASES[case]}, {dtype}: {found[case, dtype]:.1f}x" for case, dtype in found)
    return standalone(finish(figure, "speed", f"Times faster than torch. {told}"))


def study() -> str:
    """A line for each choice: its effect by the text read, with the band of the fit."""
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room) / "ladder"
        shutil.copytree(LADDER, folder)
        shutil.unpack_archive(folder / "records.tar.gz", folder)
        (found,) = (each for each in gather(folder).verdict.ladders if each.axis == "text")
    chart = effect_chart(found, EFFECT_BITS_PER_BYTE, "study", _WIDTH)
    assert chart is not None, f"{LADDER} has too few rungs"
    return standalone(chart.svg)


def key_lists() -> str:
    """A line for each length: the time of a row by lists; dashed, over all of its keys."""
    record = SuiteRecord.read(LISTS)
    figure = canvas(_WIDTH, 300)
    axes = place(figure, 60, 48, 150, 16)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    told = []
    points = [
        point for point in record.points if point.case.startswith("forward") and point.samples
    ]
    for index, length in enumerate(sorted({point.length for point in points})):
        by_lists, over_all = {}, []
        for point in points:
            of_row = point.median / point.shape.get("queries", LIST_ROWS) * 1e3
            if point.length == length and point.method == OURS:
                by_lists[length // int(point.case.split()[3])] = of_row
            elif point.length == length and point.method == over_all_keys().name:
                over_all.append(of_row)
        read, dense, colour = sorted(by_lists), statistics.median(over_all), arm_colour(index + 1)
        axes.plot(read, [by_lists[each] for each in read], color=colour, marker="o", zorder=4)
        axes.plot([read[0], length], [dense] * 2, color=colour, linestyle="--", zorder=3)
        beside(axes, (length, dense), f"all of {length:,} keys")
        told.append(
            ", ".join(f"{each:,} of {length:,} keys: {by_lists[each]:.2f} ms" for each in read)
            + f"; all of them: {dense:.1f} ms"
        )
    axes.set_xlabel("keys that a row reads by its list", color=SOFT, labelpad=7)
    axes.set_ylabel("ms a row, forward", color=SOFT)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    return standalone(finish(figure, "lists", f"Time of a row. {'. '.join(told)}"))


def key_list_memory() -> str:
    """Two panels, forward and training: a line for each method, the peak by the length."""
    record = SuiteRecord.read(LIST_MEMORY)
    figure = canvas(_WIDTH, 320)
    panels = place(figure, 62, 48, 392, 34), place(figure, 366, 48, 88, 34)
    titles = {"forward": "forward", "training": "forward and backward"}
    names = {
        by_drawn_lists().name: "key lists",
        over_all_keys().name: "all keys",
        masked_by_lists().name: "torch, mask",
    }
    told, most = [], max(point.median or 0 for point in record.points) / 1e6
    for axes, (case, title) in zip(panels, titles.items(), strict=True):
        ends = {}
        for index, (method, name) in enumerate(names.items()):
            held = {
                point.length: point.median / 1e6
                for point in record.points
                if (point.case, point.method) == (case, method) and point.median
            }
            colour = arm_colour(index + 1)
            axes.plot(list(held), list(held.values()), color=colour, marker="o", zorder=4)
            ends[name] = max(held), held[max(held)], colour
            values = ", ".join(f"{length:,}: {count:,.0f} MB" for length, count in held.items())
            told.append(f"{title}, {name}: {values}")
        for name, (length, count, colour) in ends.items():
            beside(axes, (length, count), name, colour=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_ylim(2, 2 * most)
        lengths = sorted({point.length for point in record.points})
        axes.set_xticks(lengths, [f"{each // 1024}k" for each in lengths])
        axes.set_xlabel("queries and keys", color=SOFT, labelpad=7)
        axes.set_title(title, color=INK, loc="left", fontsize=12.5)
        axes.yaxis.set_major_formatter(
            lambda value, _: f"{value:g} MB" if value < 1000 else f"{value / 1000:g} GB"
        )
    summary = f"Memory at the highest, lists of {LISTED} keys. {'. '.join(told)}"
    return standalone(finish(figure, "list-memory", summary))


def _forecast(length: int, ranks: int, schedule: Any) -> Forecast:
    """A layer of Llama 3 8B in training."""
    shapes = [(1, heads, length, 128) for heads in (32, 8, 8)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    return forecast(
        q, k, v, mesh=ranks, schedule=schedule, chip="h100", link="infiniband", mask=masks.causal()
    )


def long_context() -> str:
    """Lines over the ranks: the longest sequence that fits, and the time of a layer."""
    figure = canvas(_WIDTH, 320)
    fits, times = place(figure, 52, 48, 398, 34), place(figure, 396, 48, 62, 34)
    room, told, last = CHIPS["h100"].memory_bytes or 0, [], {}
    for index, schedule in enumerate(("zigzag", "ulysses", "gather")):
        held = [_forecast(2**20, each, schedule).memory.peak(LAYERS) for each in RANKS]
        lengths = [2**20 * room / each for each in held]  # what is held grows with the length
        fits.plot(RANKS, lengths, color=arm_colour(index + 1), marker="o", zorder=4)
        last[schedule] = math.log10(lengths[-1])
        each = zip(RANKS, lengths, strict=True)
        told.append(f"{schedule} " + ", ".join(f"{on}: {tokens(fit)}" for on, fit in each))
    labels = zip(last, spread(list(last.values()), 0.19, 4, 8), strict=True)
    for index, (name, at) in enumerate(labels):
        beside(fits, (RANKS[-1], 10**at), name, colour=arm_colour(index + 1))
    for index, length in enumerate(LENGTHS):
        seconds = [_forecast(length, each, "zigzag").seconds for each in RANKS]
        times.plot(RANKS, seconds, color=arm_colour(index + 1), marker="o", zorder=4)
        beside(times, (RANKS[-1], seconds[-1]), tokens(length))
        each = zip(RANKS, seconds, strict=True)
        told.append(f"{tokens(length)} " + ", ".join(f"{on}: {took:.3g} s" for on, took in each))
    titles = ("longest sequence that fits", "time of a layer, forward and backward")
    for axes, title in zip((fits, times), titles, strict=True):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(RANKS, [str(each) for each in RANKS])
        axes.set_xlabel("ranks", color=SOFT, labelpad=7)
        axes.set_title(title, color=INK, loc="left", fontsize=12.5)
    fits.yaxis.set_major_formatter(lambda value, _: tokens(value))
    times.yaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    summary = f"{titles[0].capitalize()}, by ranks: {'; '.join(told[:3])}. Time of a layer: "
    return standalone(finish(figure, "context", summary + "; ".join(told[3:])))


def tokens(count: float) -> str:
    """8192 -> "8k", 10_000_000 -> "10M": two digits."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if count >= 0.95 * size:
            return f"{float(f'{count / size:.2g}'):g}{unit}"
    return f"{count:.2g}"


def label(picture: str) -> str:
    """What a picture says to those who do not see it: every number in it."""
    found = re.search(r'aria-label="([^"]*)"', picture)
    return found[1] if found else ""


def main(arguments: list[str]) -> int:
    """Draw the pictures, or compare what they say."""
    with house_style():
        drawn = {
            ROOT / "docs/speed.svg": speed(),
            ROOT / "docs/study.svg": study(),
            ROOT / "docs/key-lists.svg": key_lists(),
            ROOT / "docs/key-lists-memory.svg": key_list_memory(),
            ROOT / "docs/long-context.svg": long_context(),
        }
    if arguments == ["--check"]:
        old = [
            path
            for path, picture in drawn.items()
            if not path.exists() or label(path.read_text()) != label(picture)
        ]
        for path in old:
            print(f"{path.relative_to(ROOT)} is out of date: run scripts/readme_pictures.py")
        return int(bool(old))
    for path, picture in drawn.items():
        path.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
