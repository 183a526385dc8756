"""Suite ``speed``: exact methods side by side along the length, and the cases that have goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from tilelab.bench.cases import CASES, Case
from tilelab.bench.measure import QUICK, measure_cases
from tilelab.bench.results import CaseResult
from tilelab.bench.suites.points import Point
from tilelab.bench.suites.steps import Budget, Settings, Step
from tilelab.bench.suites.timed import timed
from tilelab.peers.methods import OURS, exact
from tilelab.peers.work import Pass
from tilewise import masks
from tilewise.inspect.peaks import absence

SUITE = "speed"
_SHORT = 2048
GOALS = "goals"  # the prefix of the cases that have them


def steps(settings: Settings) -> list[Step]:
    """Return the sweep's steps; on a CPU ``bench cpu``'s cases come before the longest lengths."""
    short = [length for length in settings.lengths if length <= _SHORT]
    long = [length for length in settings.lengths if length > _SHORT]
    return [*_sweep(settings, short), *_with_goals(settings), *_sweep(settings, long)]


def _sweep(settings: Settings, lengths: Sequence[int]) -> list[Step]:
    passes: tuple[Pass, ...] = ("forward", "backward")
    kinds = (("full", None), ("causal", masks.causal()))
    works = [
        settings.work(SUITE, f"{way}, {kind}", length, dtype, passes=way, mask=mask)
        for length, dtype, way, (kind, mask) in product(lengths, settings.dtypes, passes, kinds)
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex))


def _with_goals(settings: Settings) -> list[Step]:
    if settings.device != "cpu" or absence():
        return []
    longest = max(settings.lengths)
    return [
        Step(case.key, partial(_case, case))
        for case in CASES
        if case.dtype in settings.dtypes
        and (case.quick or not settings.quick)
        and max(case.attention.queries, case.attention.keys) <= longest
    ]


def _case(case: Case, budget: Budget) -> Iterator[Point]:
    yield from points_of(next(measure_cases([case], QUICK, 1)))


def points_of(result: CaseResult) -> list[Point]:
    """Return a result of ``bench cpu`` as points."""
    shape = {key: result.shape[key] for key in ("batch", "heads", "kv_heads", "head_dim")}
    about = (SUITE, f"{GOALS}: {result.name}", result.shape["keys"], result.dtype)
    if result.wrong:
        return [Point(*about, OURS, shape=shape, status="wrong", note=result.wrong)]
    note = ""
    if result.goal is not None:
        share = "" if result.goal.peak is None else f", {result.goal.peak:.0%} of peak"
        note = (
            f"{result.ratio:.2f}x, {result.peak_fraction:.0%} of peak; "
            f"goal {result.goal.ratio:g}x{share}: {result.met}"
        )
    return [
        Point(*about, name, shape=shape, samples=tuple(result.seconds(side)), note=said)
        for name, side, said in ((OURS, result.ours, note), ("sdpa", result.torch, ""))
    ]
