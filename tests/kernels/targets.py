"""What the numeric suite runs on: the CPU backend on each instruction set, and the tiled one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest

from tests.cases import Case
from tests.conftest import NO_CORE, available_isas


class Target(NamedTuple):
    """A backend and, for the CPU's, the instruction set to force; rank 0 is the fastest."""

    backend: str
    isa: str
    rank: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.isa}" if self.isa else self.backend


def _targets() -> tuple[Target, ...]:
    isas = [isa for isa in available_isas() if isa != NO_CORE]
    cpu = [Target("cpu", isa, rank) for rank, isa in enumerate(isas)]
    return (*cpu, Target("tiled", "", 0))


TARGETS = _targets()
CPU_TARGETS = [target for target in TARGETS if target.backend == "cpu"]
only_cpu = pytest.mark.parametrize("target", CPU_TARGETS, ids=str, indirect=True)


@contextmanager
def forced(target: Target) -> Iterator[None]:
    """Run the CPU backend on the target's instruction set meanwhile."""
    if not target.isa:
        yield
        return
    from tilewise import _core

    before = _core.isa_active()
    _core.set_isa(target.isa)
    try:
        yield
    finally:
        _core.set_isa(before)


def pairs(cases: Sequence[Case], quick_every: int = 1) -> list[Any]:
    """Parameters (target, case): every pair, of which all but a sample are slow off the best one.

    Args:
        cases: the cases.
        quick_every: lower instruction sets (and the tiled reference) quickly run one case in so
            many, each starting at another one.
    """
    found = []
    for offset, target in enumerate(TARGETS):
        best = target.rank == 0 and target.backend == "cpu"
        for index, case in enumerate(cases):
            sampled = best or (index + offset) % quick_every == 0
            marks = () if sampled else (pytest.mark.slow,)
            found.append(pytest.param(target, case, marks=marks, id=f"{target}-{case}"))
    return found
