"""A team that measures nothing: what it says of blocks is made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tilelab.gpu_check.record import Row
from tilelab.tune.worker import Job, table_blocks
from tilewise.kernels.gpu.config import Blocks

FAMILY, CHIP = "sm_90", "NVIDIA H200"

Samples = Callable[[Blocks, bool], Sequence[float]]


def gain(of: dict[str, float]) -> Samples:
    """Blocks by text that are faster than the others: their share of a millisecond."""

    def samples(blocks: Blocks, is_table: bool) -> Sequence[float]:
        middle = 1e-3 * (1.0 if is_table else of.get(str(blocks), 2.0))
        return [middle * share for share in (0.999, 1.0, 1.0, 1.0, 1.001)]

    return samples


class FakeTeam:
    """Stands for ``conduct.Team``.

    Args:
        samples: seconds of blocks, given whether they are the table's.
        checked: rows of blocks by text that are not good.
        before: called before each job is checked.
        failed: blocks by text that fail when they are timed.
    """

    def __init__(
        self,
        samples: Samples,
        checked: dict[str, Row] | None = None,
        before: Callable[[Job], None] = lambda job: None,
        failed: Sequence[str] = (),
    ) -> None:
        self.samples, self.checked, self.before = samples, checked or {}, before
        self.failed = failed
        self.measured: list[list[str]] = []
        self.closed = False
        self.until = math.inf

    def check(self, job: Job, blocks: Sequence[Blocks]) -> list[Row]:
        self.before(job)
        good = Row("check", str(job), values={"spills": 0})
        return [self.checked.get(str(each), good) for each in blocks]

    def measure(self, job: Job, blocks: Sequence[Blocks]) -> Row:
        self.measured.append([str(each) for each in blocks])
        table = table_blocks(FAMILY, job)
        values: dict[str, Any] = {
            str(each): list(self.samples(each, each == table))
            for each in blocks
            if str(each) not in self.failed
        }
        failed = {str(each): "OutOfMemory" for each in blocks if str(each) in self.failed}
        return Row("measure", str(job), values={"samples_s": values, "failed": failed})

    def close(self) -> None:
        self.closed = True
