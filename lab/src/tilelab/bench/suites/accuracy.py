"""Suite ``accuracy``: the largest error of every exact method, and what the 2x rule allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

from tilelab.bench.suites.budget import Budget
from tilelab.bench.suites.gate import compare
from tilelab.bench.suites.methods import OURS, Method, exact
from tilelab.bench.suites.point import Point, Status
from tilelab.bench.suites.steps import Settings, Step
from tilelab.bench.suites.work import Pass, Work, draw
from tilewise import masks
from tilewise.errors import TilewiseError

__all__ = ["FEW", "steps"]

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
            work = Work(
                SUITE,
                f"{passes}, {words}",
                length,
                dtype,
                settings.heads,
                settings.heads,
                batch=settings.batch,
                passes=passes,
                mask=masks.causal(),
                device=settings.device,
            )
            yield work, factor


def _few(settings: Settings) -> Iterator[tuple[Work, float]]:
    for (queries, width), dtype, passes in product(FEW, settings.dtypes, _PASSES):
        work = Work(
            SUITE,
            f"{passes}, {queries} queries of {width}, large scores",
            _FEW_KEYS,
            dtype,
            _FEW_HEADS,
            _FEW_HEADS,
            head_dim=width,
            passes=passes,
            queries=queries,
            device=settings.device,
        )
        yield work, _LARGE


def _errors(
    work: Work, factor: float, methods: Sequence[Method], budget: Budget
) -> Iterator[Point]:
    given = draw(work, factor)
    for method in methods:
        reason = method.why_not(work) or budget.too_large(method.bytes(work), work.device)
        if not reason and budget.left_s < 0:
            reason = "no time is left"
        status: Status = "skipped"
        if not reason:
            try:
                found = compare(work, given, method.make(work, given))
            except (RuntimeError, TilewiseError, NotImplementedError, MemoryError) as error:
                reason = (str(error).splitlines() or ["no reason"])[0]
                status = "failed" if method.name == OURS else "skipped"
        if reason:
            yield Point.of(work, method.name, quantity="error", status=status, note=reason)
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
