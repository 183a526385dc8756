"""Suite ``accuracy``: the largest error of every exact method, and what the 2x rule allows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from tilewise import masks
from tilewise.errors import TilewiseError
from tilewise.lab.bench.suites.budget import Budget
from tilewise.lab.bench.suites.gate import compare
from tilewise.lab.bench.suites.methods import OURS, Method, exact
from tilewise.lab.bench.suites.point import Point, Status
from tilewise.lab.bench.suites.steps import Settings, Step
from tilewise.lab.bench.suites.work import Pass, Work, draw

__all__ = ["steps"]

SUITE = "accuracy"
# Scores of a standard deviation of 1, and of 8: a softmax that is nearly one key.
_FACTORS = (("usual scores", 1.0), ("large scores", 8.0))


def steps(settings: Settings) -> list[Step]:
    """Every length, dtype and pass, with usual and with large scores."""
    methods = exact(settings.device, with_flex=False)
    passes: tuple[Pass, ...] = ("forward", "backward")
    found = []
    for length in settings.lengths:
        for dtype in settings.dtypes:
            for direction in passes:
                for words, factor in _FACTORS:
                    work = Work(
                        SUITE,
                        f"{direction}, {words}",
                        length,
                        dtype,
                        settings.heads,
                        settings.heads,
                        batch=settings.batch,
                        passes=direction,
                        mask=masks.causal(),
                        device=settings.device,
                    )
                    name = f"{work.case}, {length}, {dtype}"
                    found.append(Step(name, partial(_errors, work, factor, methods)))
    return found


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
