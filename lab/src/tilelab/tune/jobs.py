"""Tuning jobs: a pass for a dtype, a width and a kind of call, the blocks to try, and problems.

Rows of the table stand for a kind of call: small ones for exactness, large ones for time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilelab.cases.case import Case, Use
from tilelab.cases.table import rows
from tilelab.gate.cases import kind_of
from tilelab.gate.search import ladder
from tilewise.inspect.gpu import FAMILIES, PASSES, Pass, tiles_for
from tilewise.plan.tuned import Blocks, Place


class Job(NamedTuple):
    """One entry of the table of blocks that is questioned."""

    pass_name: Pass  # "forward", "dkdv" or "dq"
    dtype: str  # "bfloat16" and so on
    width: int  # the class of D and Dv
    kind: str  # "plain", "+" or "*", as in the table

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


_HIDDEN, _BATCH, _LENGTH = 2048, 4, 4096
_CACHED, _KEYS, _GROUP = 1024, 16384, 4  # of decoding: the width of the heads that share keys
_SHRINK, _TINY_WIDTH, _LARGEST_TINY = 8, 16, 40


def _rows(use: Use, job: Job) -> list[Case]:
    """Return the rows of the job's kind of call."""
    return [case for case in rows(use) if kind_of(case) == job.kind]


def small(job: Job, tiny: bool) -> list[Case]:
    """Problems whose results are compared with the reference's; lengths that no block divides."""
    cases = _rows("tune small", job)
    if job.pass_name == "decode":
        dense = [case for case in cases if case.sequences is None]
        cases = [replace(case, queries=3, keys=1200, kv_heads=2) for case in dense]
    elif job.pass_name != "forward":  # no gradient knows pages
        cases = [case for case in cases if not case.page_size]
    return [_sized(case, job, tiny) for case in cases]


def large(job: Job, tiny: bool) -> list[Case]:
    """Problems that are timed; tiny ones measure nothing.

    They have 16k tokens; those of decoding have eight sequences of one query and 16k keys.
    """
    few, cases = job.pass_name == "decode", _rows("tune large", job)
    if few:  # of one query, causal is full
        ones = [case for case in cases if case.sequences is None and case.name != "causal"]
        cases = [replace(case, queries=1, keys=_KEYS, kv_heads=2) for case in ones]
    heads = max(1, (_CACHED if few else _HIDDEN) // job.width)
    shape: dict[str, Any] = {"batch": _BATCH, "heads": heads, "kv_heads": heads}
    if few:
        shape |= {"batch": 2 * _BATCH, "heads": _GROUP * heads}
    else:
        shape |= {"queries": _LENGTH, "keys": _LENGTH}
    wide = cases if tiny else [replace(case, **shape) for case in cases]
    return [_sized(case, job, tiny) for case in wide]


def _sized(case: Case, job: Job, tiny: bool) -> Case:
    """Return the problem in the job's dtype and width, or tiny."""
    if not tiny:
        return replace(case, dtype=job.type, head_dim=job.width, value_dim=job.width)
    sequences = case.sequences
    if sequences is not None:
        sequences = tuple((min(m, _LARGEST_TINY), min(n, _LARGEST_TINY)) for m, n in sequences[:2])
    return replace(
        case,
        batch=1,
        heads=2,
        kv_heads=1 if case.kv_heads < case.heads else 2,
        queries=_shrunk(case.queries),
        keys=_shrunk(case.keys),
        head_dim=_TINY_WIDTH,
        value_dim=_TINY_WIDTH,
        dtype=job.type,
        sequences=sequences,
    )


def _shrunk(length: int) -> int:
    """Return a length that takes the interpreter no long time; one that is tiny already stays."""
    return length if length <= _LARGEST_TINY else min(length // _SHRINK, 4 * _LARGEST_TINY)
