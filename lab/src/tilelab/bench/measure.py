"""Measures the cases and the overhead of a call, in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilelab.bench.cases import Case
from tilelab.bench.results import CaseResult, Overhead, Samples
from tilelab.common.clock import Call, interleave, once, plan
from tilelab.peers.compare import compare
from tilelab.peers.methods import ours, sdpa
from tilelab.peers.work import call_of, draw
from tilewise.inspect import peaks

_TINY = (1, 1, 8, 16)  # small enough that the call itself is all that costs


@dataclass(frozen=True)
class Effort:
    """How long to measure.

    Args:
        budget_s: for the rounds of one case.
        rounds: of one case, the fewest and the most, whatever the budget says.
    """

    budget_s: float
    rounds: tuple[int, int]


FULL = Effort(2.0, (3, 15))
QUICK = Effort(0.8, (3, 9))


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
    work = case.work()
    given = draw(work)
    attend = ours().make(work, given)
    wrong = compare(work, given, attend).complaint
    if wrong:
        return CaseResult.describing(case, clock, wrong=wrong)
    calls = {
        "ours": call_of(work, given, attend),
        "torch": call_of(work, given, sdpa().make(work, given)),
    }
    kind = peaks.loop(case.dtype, peaks.isa())
    found: list[float] = []

    def measure_peak() -> None:
        found.append(peaks.measure(kind, threads, clock))

    call_s = {name: _warm(call) for name, call in calls.items()}
    repeats, rounds = plan(call_s, effort.budget_s, effort.rounds)
    samples = interleave(calls, repeats, rounds, once, measure_peak)
    return CaseResult.describing(
        case,
        clock,
        ours=Samples.of(samples["ours"]),
        torch=Samples.of(samples["torch"]),
        repeats=(repeats["ours"], repeats["torch"]),
        peak_flops_s=tuple(found),
    )


def _warm(call: Call) -> float:
    """Return the seconds of a warm call."""
    first_s = once(call).cpu_s
    # The first call of a short one pays for what it sets up.
    return once(call).cpu_s if first_s < 0.2 else first_s


def overhead(rounds: int) -> list[Overhead]:
    """Measure a call of a tiny problem: ours, ours with a held plan, torch's.

    Args:
        rounds: samples of each.
    """
    torch.set_num_threads(1)
    q, k, v = (torch.randn(_TINY) for _ in range(3))
    held = tilewise.plan(q, k, v)
    calls: dict[str, Call] = {
        "attention": lambda: tilewise.attention(q, k, v),
        "attention, held plan": lambda: tilewise.attention(q, k, v, plan=held),
        "torch": lambda: scaled_dot_product_attention(q, k, v),
    }
    for call in calls.values():
        once(call, 300)
    found = interleave(calls, dict.fromkeys(calls, 1000), rounds, once)
    samples = {name: Samples.of(times).cpu_s for name, times in found.items()}
    goals = {"attention": 3.0, "attention, held plan": 2.0}
    return [Overhead(name, samples[name], samples["torch"], goal) for name, goal in goals.items()]
