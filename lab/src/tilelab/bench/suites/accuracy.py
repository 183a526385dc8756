"""Suite ``accuracy``: the largest error of every exact method, and what the 2x rule allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from tilelab.bench.suites.points import Point
from tilelab.bench.suites.steps import Budget, Settings, Step
from tilelab.bench.suites.timed import attempted
from tilelab.peers.compare import compare
from tilelab.peers.methods import Method, exact
from tilelab.peers.work import Pass, Work, draw
from tilewise import masks

SUITE = "accuracy"
_PASSES: tuple[Pass, ...] = ("forward", "backward")
# Scores of a standard deviation of 1, and of 8: a softmax that is nearly one key.
_LARGE = 8.0
_FACTORS = (("usual scores", 1.0), ("large scores", _LARGE))
# Few queries: a long inner product under a large score. (M, D), keys, and heads: enough rows that
# the largest error of one method can be compared with another's.
FEW = ((1, 64), (1, 128), (2, 320), (8, 128), (8, 256), (8, 512))
_FEW_KEYS, _FEW_HEADS = 600, 32


def steps(settings: Settings) -> list[Step]:
    """Return steps for every length, dtype and pass, usual and large scores; then few queries."""
    methods = exact(settings.device, with_flex=False)
    found = []
    for work, factor in [*_swept(settings), *_few(settings)]:
        name = f"{work.case}, {work.length}, {work.dtype}"
        found.append(Step(name, partial(_errors, work, factor, methods)))
    return found


def _swept(settings: Settings) -> Iterator[tuple[Work, float]]:
    for length, dtype, passes in product(settings.lengths, settings.dtypes, _PASSES):
        for words, factor in _FACTORS:
            case = f"{passes}, {words}"
            more = {"passes": passes, "mask": masks.causal()}
            yield settings.work(SUITE, case, length, dtype, **more), factor


def _few(settings: Settings) -> Iterator[tuple[Work, float]]:
    for (queries, width), dtype, passes in product(FEW, settings.dtypes, _PASSES):
        case = f"{passes}, {queries} queries of {width}, large scores"
        more = {"head_dim": width, "passes": passes, "queries": queries, "batch": 1}
        more |= {"heads": _FEW_HEADS, "kv_heads": _FEW_HEADS}
        yield settings.work(SUITE, case, _FEW_KEYS, dtype, **more), _LARGE


def _errors(
    work: Work, factor: float, methods: Sequence[Method], budget: Budget
) -> Iterator[Point]:
    given = draw(work, factor)
    for method in methods:
        if budget.left_s < 0:
            yield Point.without(work, method, "error", "skipped", "no time is left")
            continue
        found = attempted(
            work,
            method,
            budget,
            lambda: compare(work, given, method.make(work, given)),  # noqa: B023  called here
            "error",
        )
        if isinstance(found, Point):
            yield found
            continue
        yield Point.of(
            work,
            method.name,
            quantity="error",
            status="wrong" if found.complaint else "ok",
            note=found.complaint,
            samples=(found.largest,),
            allowed=found.allowed,
        )
