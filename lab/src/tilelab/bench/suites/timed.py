"""One step of a sweep: all methods on one work, gated, then timed in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from tilelab.bench.suites.points import Point, Quantity, Status
from tilelab.bench.suites.steps import Budget, Step
from tilelab.common.clock import race, seconds_of
from tilelab.common.memory import too_large
from tilelab.peers.compare import Measured, compare
from tilelab.peers.methods import OURS, Method
from tilelab.peers.work import Attend, Given, Work, call_of, draw
from tilewise.errors import TilewiseError

Wrap = Callable[[Work, Given, Attend], Callable[[], Any]]
_Found = TypeVar("_Found")


def timed(works: Iterable[Work], methods: Sequence[Method], wrap: Wrap = call_of) -> list[Step]:
    """Return a step for each work, which times all methods on it; arguments as of ``time_all``."""
    found = []
    for work in works:
        name = f"{work.case}, {work.length}, {work.dtype}"
        found.append(Step(name, partial(time_all, work, methods, wrap=wrap)))
    return found


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
    ready: dict[str, _Ready] = {}
    for method in methods:
        began = time.monotonic()
        found = attempted(work, method, budget, lambda: _prepare(work, given, method, wrap))  # noqa: B023
        if isinstance(found, Point):
            yield found
            continue
        once_s = max(0.0, time.monotonic() - began - 3 * found.seconds)  # compiling, comparing
        budget.took(key_of(work, method), work.length, found.seconds, once_s)
        ready[method.name] = found
    yield from _timed(work, ready, budget)


def attempted(
    work: Work,
    method: Method,
    budget: Budget,
    attempt: Callable[[], _Found],
    quantity: Quantity = "seconds",
) -> _Found | Point:
    """Return what an attempt with a method gives, or a point that says why it gives nothing.

    Args:
        work: what is measured.
        method: with what.
        budget: what may be spent.
        attempt: made where nothing speaks against it.
        quantity: of the point.
    """
    reason = why_skipped(work, method, budget)
    if reason:
        return Point.without(work, method, quantity, "skipped", reason)
    try:
        return attempt()
    except (RuntimeError, TilewiseError, NotImplementedError, MemoryError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        status: Status = "failed" if method.name == OURS else "skipped"
        return Point.without(work, method, quantity, status, line)


def key_of(work: Work, method: Method) -> tuple[str, ...]:
    """Return the name of a method on a case, whatever the length."""
    return work.suite, work.case, work.dtype, method.name


def why_skipped(work: Work, method: Method, budget: Budget) -> str:
    """Return why a method is not tried on a work; empty if it is."""
    if work.statistics and not method.statistics:
        return "it gives no statistics"
    return (
        method.why_not(work)
        or budget.too_long(key_of(work, method), work.length)
        or too_large(method.bytes(work), work.device)
    )


def _prepare(work: Work, given: Given, method: Method, wrap: Wrap) -> _Ready | Point:
    """Return the call of a method, warm; a point where it is wrong."""
    attend = judged_attend = method.make(work, given)
    judged = work
    if work.dropout_p and not method.same_dropout:
        judged = replace(work, dropout_p=0.0)  # it drops other pairs: judged without
        judged_attend = method.make(judged, given)
    measured = compare(judged, given, judged_attend)
    if method.exact and measured.complaint:
        return Point.without(work, method, "seconds", "wrong", measured.complaint)
    call = wrap(work, given, attend)
    call()
    return _Ready(method, call, seconds_of(call, work.timer), measured)


def _timed(work: Work, ready: dict[str, _Ready], budget: Budget) -> Iterator[Point]:
    samples = race(
        {name: each.call for name, each in ready.items()},
        min(budget.round_budget_s, max(budget.left_s, 0.0)),
        budget.rounds,
        work.timer,
        {name: each.seconds for name, each in ready.items()},
    )
    for name, each in ready.items():
        method = each.method
        compared = method.same_dropout or not work.dropout_p
        yield Point.of(
            work,
            name,
            exact=method.exact,
            samples=tuple(samples[name]),
            error=None if method.exact else each.measured.relative,
            note="" if compared else "compared without dropout",
        )
