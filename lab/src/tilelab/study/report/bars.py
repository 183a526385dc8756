"""Figures with a row per arm: memory, and what it took to reach the target."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from tilelab.common.svg import INK, PART_COLOURS, RULE, SOFT, arm_colour, canvas, finish, place
from tilelab.study.report.curves import WIDTH
from tilelab.study.report.view import Chart
from tilelab.study.verdict import text as words
from tilelab.study.verdict.result import MemorySplit

__all__ = ["PARTS", "ArmMemory", "ArmTarget", "memory_chart", "target_chart"]

PARTS = ("weights", "gradients", "optimizer", "activations")
_ROW = 34.0  # height of an arm
_LETTER = 9.2
_LONGEST = 15


class ArmMemory(NamedTuple):
    """An arm's memory."""

    arm: str
    place: int
    split: MemorySplit


class ArmTarget(NamedTuple):
    """The cost of an arm to reach the target, one number per seed; None for a miss."""

    arm: str
    place: int
    taken: tuple[float | None, ...]


def memory_chart(arms: Sequence[ArmMemory], name: str) -> Chart | None:
    """Draw the parts of memory, a bar per arm, and the peak as a mark.

    Args:
        arms: the baseline first; those without a measurement are not among them.
        name: of the figure, unique in the page.
    """
    if not arms:
        return None
    summary = "Memory: " + "; ".join(
        f"{each.arm}: peak {words.size(each.split.peak_bytes)}" for each in arms
    )
    figure, axes = _rows([each.arm for each in arms], [each.place for each in arms], 58)
    most = max(max(each.split.peak_bytes, sum(_parts(each.split))) for each in arms)
    factor, unit = _unit(most)
    axes.set_xlim(0, most / factor)
    for row, each in enumerate(arms):
        left = 0.0
        for part, colour in zip(_parts(each.split), PART_COLOURS, strict=True):
            axes.barh(row, part / factor, left=left, height=0.6, color=colour, linewidth=0)
            left += part / factor
        peak = each.split.peak_bytes / factor
        axes.plot([peak, peak], [row - 0.42, row + 0.42], color=INK, linewidth=2, clip_on=False)
        at = (max(peak, left), row)
        _beside(axes, at, words.size(each.split.peak_bytes), INK)
    axes.set_xlabel(unit, color=SOFT, labelpad=7)
    caption = (
        "Storages counted once; activations are what autograd keeps of one micro-batch. "
        "The mark and the number are the peak of the process (of the allocator on a GPU)."
    )
    legend = tuple((part, f"--part-{number}") for number, part in enumerate(PARTS))
    return Chart("Where memory goes", finish(figure, name, summary), caption, legend)


def target_chart(
    arms: Sequence[ArmTarget], what: str, heading: str, target: str, name: str
) -> Chart | None:
    """Draw the cost to the target: a dot per seed, the median as a bar, misses at the edge.

    Args:
        arms: the baseline first; those of which nothing is known are not among them.
        what: the unit, e.g. ``"training tokens"``.
        heading: of the figure.
        target: in words.
        name: of the figure, unique in the page.
    """
    numbers = [number for each in arms for number in each.taken if number is not None]
    if not numbers:
        return None
    right = 118 if any(None in each.taken for each in arms) else 84  # room for "3 of 5"
    figure, axes = _rows([each.arm for each in arms], [each.place for each in arms], right)
    axes.set_xlim(0, max(numbers) * 1.04)
    told = []
    for row, each in enumerate(arms):
        colour = arm_colour(each.place)
        reached = sorted(number for number in each.taken if number is not None)
        missed = len(each.taken) - len(reached)
        half = missed * 2 >= len(each.taken)
        ranked = [*reached, *[math.inf] * missed]
        middle = (ranked[(len(ranked) - 1) // 2] + ranked[len(ranked) // 2]) / 2
        if not half:
            axes.plot([0, middle], [row, row], color=colour, linewidth=2.4, alpha=0.35, zorder=2)
            axes.plot(
                [middle] * 2, [row - 0.3, row + 0.3], color=colour, linewidth=2.6, clip_on=False
            )
        axes.plot(
            reached,
            [row] * len(reached),
            color=colour,
            marker="o",
            markersize=6.5,
            markeredgewidth=0,
            linestyle="none",
            alpha=0.75,
            clip_on=False,
            zorder=5,
        )
        label = "not reached" if half else _amount(middle, what)
        if missed and not half:
            label += f", {len(reached)} of {len(each.taken)}"
        _beside(axes, (axes.get_xlim()[1], row), label, SOFT if half else INK)
        told.append(f"{each.arm}: {label}")
    axes.set_xlabel(what, color=SOFT, labelpad=7)
    caption = (
        f"The first evaluation at {target} or better. Dots: seeds; bar: their median. A run that "
        "missed the target counts as longer than any that reached it."
    )
    summary = f"{heading}: {'; '.join(told)}"
    return Chart(heading, finish(figure, name, summary), caption)


def _rows(arms: Sequence[str], indices: Sequence[int], right: float) -> tuple[Figure, Axes]:
    """Axes with a row per arm, the first on top, and the arms' names on the left."""
    figure = canvas(WIDTH, _ROW * len(arms) + 62)
    longest = min(max(map(len, arms)), _LONGEST)
    axes = place(figure, 16 + _LETTER * longest, 50, right, 12)
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", color=RULE, linewidth=1)
    axes.set_ylim(len(arms) - 0.5, -0.5)
    names = [words.short_name(arm, _LONGEST) for arm in arms]
    axes.set_yticks(range(len(arms)), labels=names, parse_math=False)
    for label, index in zip(axes.get_yticklabels(), indices, strict=True):
        label.set_color(arm_colour(index))
        label.set_fontweight("bold")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda number, _: words.shorten(number)))
    return figure, axes


def _beside(axes: Axes, at: tuple[float, float], text: str, colour: str) -> None:
    axes.annotate(
        text,
        xy=at,
        xytext=(9, 0),
        textcoords="offset points",
        va="center",
        color=colour,
        annotation_clip=False,
    )


def _parts(split: MemorySplit) -> tuple[float, float, float, float]:
    return (
        split.weights_bytes,
        split.gradients_bytes,
        split.optimizer_bytes,
        split.activations_bytes,
    )


def _unit(most: float) -> tuple[float, str]:
    return (1e9, "GB") if most >= 2e9 else (1e6, "MB") if most >= 2e6 else (1e3, "kB")


def _amount(number: float, what: str) -> str:
    return words.duration(number) if "second" in what else words.shorten(float(f"{number:.3g}"))
