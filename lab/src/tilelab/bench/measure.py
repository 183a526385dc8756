"""Measures the cases and the overhead of a call, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.bench.build import Pair, build, operands
from tilelab.bench.cases import Case
from tilelab.bench.clock import interleave, once, repeats_for, rounds_for
from tilelab.bench.gate import complaint
from tilelab.bench.result import CaseResult, Overhead
from tilewise.inspect import peaks

__all__ = ["FULL", "QUICK", "Effort", "measure_cases", "overhead"]

_TINY = (1, 1, 8, 16)  # small enough that the call itself is all that costs


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        budget_s: for the rounds of one case.
        least, most: rounds of one case, whatever the budget says.
    """

    budget_s: float
    least: int
    most: int


FULL = Effort(2.0, 3, 15)
QUICK = Effort(0.8, 3, 9)


def measure_cases(cases: Iterable[Case], effort: Effort, threads: int) -> Iterator[CaseResult]:
    """Measure one case after the other, each gated by its correctness.

    Args:
        cases: which.
        effort: how long.
        threads: of torch and of ours. One is timed by its own processor time, more by the wall.
    """
    torch.set_num_threads(threads)
    for case in cases:
        yield _measure(case, effort, threads)


def _measure(case: Case, effort: Effort, threads: int) -> CaseResult:
    clock: peaks.Clock = "cpu" if threads == 1 else "wall"
    given = operands(case)
    pair = build(case, given)
    wrong = complaint(case, given, pair.ours())  # the first call also warms ours up
    if wrong:
        return CaseResult.describing(case, clock, wrong=wrong)
    kind = peaks.loop(case.dtype, peaks.isa())
    found: list[float] = []

    def measure_peak() -> None:
        found.append(peaks.measure(kind, threads, clock))

    repeats, rounds = _plan(pair, effort)
    ours, theirs = interleave(pair, repeats, rounds, measure_peak)
    return CaseResult.describing(
        case, clock, ours=ours, torch=theirs, repeats=repeats, peak_flops_s=tuple(found)
    )


def _plan(pair: Pair, effort: Effort) -> tuple[tuple[int, int], int]:
    """Repeats within a sample, and rounds, from one warm call of each."""
    ours_s, torch_s = once(pair.ours)[0], once(pair.torch)[0]
    if torch_s < 0.2:  # the first call of a short one pays for what it sets up
        torch_s = once(pair.torch)[0]
    repeats = repeats_for(ours_s), repeats_for(torch_s)
    round_s = ours_s * repeats[0] + torch_s * repeats[1]
    return repeats, rounds_for(round_s, effort.budget_s, effort.least, effort.most)


def overhead(rounds: int) -> list[Overhead]:
    """Measure a call of a tiny problem: ours, ours with a held plan, torch's.

    Args:
        rounds: samples of each.
    """
    torch.set_num_threads(1)
    q, k, v = (torch.randn(_TINY) for _ in range(3))
    plan = tilewise.plan(q, k, v)
    calls = (
        lambda: tilewise.attention(q, k, v),
        lambda: tilewise.attention(q, k, v, plan=plan),
        lambda: scaled_dot_product_attention(q, k, v),
    )
    for call in calls:
        once(call, 300)
    direct, held, theirs = (
        samples.cpu_s for samples in interleave(calls, (1000, 1000, 1000), rounds)
    )
    return [
        Overhead("attention", direct, theirs, 3.0),
        Overhead("attention, held plan", held, theirs, 2.0),
    ]
