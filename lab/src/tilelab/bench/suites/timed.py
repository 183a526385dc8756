"""One step of a sweep: all methods on one work, gated, then timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tilelab.bench.clock import rounds_for
from tilelab.bench.suites import timer
from tilelab.bench.suites.budget import Budget
from tilelab.bench.suites.gate import Measured, compare
from tilelab.bench.suites.methods import OURS, Method
from tilelab.bench.suites.point import Point, Status
from tilelab.bench.suites.work import Attend, Given, Work, call_of, draw
from tilewise.errors import TilewiseError

__all__ = ["time_all"]

Wrap = Callable[[Work, Given, Attend], Callable[[], Any]]


class _Ready(NamedTuple):
    """A method that passed the gate."""

    method: Method
    call: Callable[[], Any]
    seconds: float
    measured: Measured


def time_all(
    work: Work, methods: Sequence[Method], budget: Budget, *, wrap: Wrap = call_of
) -> Iterator[Point]:
    """Yield the points of all methods on one work.

    Args:
        work: what is measured.
        methods: in the order of the record.
        budget: what may be spent.
        wrap: makes the timed call of a method that passed the gate.
    """
    given = draw(work)
    ready: list[_Ready] = []
    for method in methods:
        reason = _reason(work, method, budget)
        if reason:
            yield _without(work, method, "skipped", reason)
            continue
        began = time.monotonic()
        try:
            found = _prepare(work, given, method, wrap)
        except (RuntimeError, TilewiseError, NotImplementedError, MemoryError) as error:
            status: Status = "failed" if method.name == OURS else "skipped"
            yield _without(work, method, status, _first_line(error))
            continue
        if isinstance(found, Point):
            yield found
            continue
        once_s = max(0.0, time.monotonic() - began - 3 * found.seconds)  # compiling, comparing
        budget.took(_key(work, method), work.length, found.seconds, once_s)
        ready.append(found)
    yield from _timed(work, ready, budget)


def _key(work: Work, method: Method) -> tuple[str, ...]:
    return work.suite, work.case, work.dtype, method.name


def _reason(work: Work, method: Method, budget: Budget) -> str:
    return (
        method.why_not(work)
        or budget.too_long(_key(work, method), work.length)
        or budget.too_large(method.bytes(work), work.device)
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _without(work: Work, method: Method, status: Status, note: str) -> Point:
    return Point.of(work, method.name, status=status, note=note, exact=method.exact)


def _prepare(work: Work, given: Given, method: Method, wrap: Wrap) -> _Ready | Point:
    """Return the call of a method, warm; a point where it is wrong."""
    attend = judged_attend = method.make(work, given)
    judged = work
    if work.dropout_p and not method.same_dropout:
        judged = replace(work, dropout_p=0.0)  # it drops other pairs: judged without
        judged_attend = method.make(judged, given)
    measured = compare(judged, given, judged_attend)
    if method.exact and measured.complaint:
        return _without(work, method, "wrong", measured.complaint)
    call = wrap(work, given, attend)
    call()
    return _Ready(method, call, timer.once(call, work.device), measured)


def _timed(work: Work, ready: Sequence[_Ready], budget: Budget) -> Iterator[Point]:
    repeats = [timer.repeats_for(each.seconds, work.device) for each in ready]
    round_s = sum(each.seconds * count for each, count in zip(ready, repeats, strict=True))
    spend = min(budget.round_budget_s, max(budget.left_s, 0.0))
    rounds = rounds_for(round_s, spend, *budget.rounds)
    found = timer.interleave([each.call for each in ready], repeats, rounds, work.device)
    for each, samples in zip(ready, found, strict=True):
        exact = each.method.exact
        yield Point.of(
            work,
            each.method.name,
            exact=exact,
            samples=tuple(samples),
            error=None if exact else each.measured.relative,
            note=""
            if each.method.same_dropout or not work.dropout_p
            else "compared without dropout",
        )
