"""Tuning jobs: a pass for a dtype, a width and a kind of call, and the blocks to try."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tilelab.gate.search import ladder
from tilewise.inspect.gpu import FAMILIES, PASSES, Blocks, Pass, tiles_for
from tilewise.plan.tuned import Place


class Job(NamedTuple):
    """One entry of the table of blocks that is questioned.

    Args:
        pass_name: "forward", "dkdv" or "dq".
        dtype: "bfloat16" and so on.
        width: the class of D and Dv.
        kind: "plain", "+" or "*", as in the table.
    """

    pass_name: Pass
    dtype: str
    width: int
    kind: str

    @property
    def type(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def place(self) -> Place:
        """The place of its blocks in a file."""
        return Place(self.pass_name, self.type, self.width, self.kind)

    def __str__(self) -> str:
        return f"{self.pass_name} {self.dtype} {self.width} {self.kind}"


def table_blocks(family: str, job: Job) -> Blocks:
    """Return the table's blocks for a job."""
    width, heavy = job.width, job.kind != "plain"
    return tiles_for(family, job.pass_name, job.type, width, width, heavy, job.kind == "*")


def candidates(family: str, job: Job, most: int) -> list[Blocks]:
    """Return other blocks worth a try: the nearest to the table's that fit the chip.

    The distance counts doublings of sides and of warps, and stages. It adds one for blocks that
    give a thread more pairs than the table's do: the table has the most that did not spill. Among
    equally near blocks the larger come first.

    Args:
        family: a name of FAMILIES.
        job: for what.
        most: how many.
    """
    table = table_blocks(family, job)
    fitting = ladder(FAMILIES[family], job.pass_name, job.width, job.type.itemsize)
    others = [blocks for blocks in fitting if blocks != table]
    return sorted(others, key=lambda blocks: _distance(blocks, table))[:most]


def _distance(one: Blocks, other: Blocks) -> float:
    doublings = sum(abs(math.log2(a / b)) for a, b in zip(one[:3], other[:3], strict=True))
    return doublings + abs(one.stages - other.stages) + (_pairs(one) > _pairs(other))


def _pairs(blocks: Blocks) -> int:
    """Return the pairs of a warp."""
    return blocks.queries * blocks.keys // blocks.warps


def read_job(words: str) -> tuple[Job, list[Blocks]]:
    """Parse "dq bfloat16 64 + 64x32/4/2 64x64/8/1": a job and blocks as ``str`` has them."""
    name, dtype, width, kind, *texts = words.split()
    job = Job(next(each for each in PASSES if each == name), dtype, int(width), kind)
    numbers = ([int(number) for number in text.replace("x", "/").split("/")] for text in texts)
    return job, [Blocks(*each) for each in numbers]
