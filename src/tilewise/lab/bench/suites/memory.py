"""Suite ``memory``: peaks of passes along the length, the softmax's double peak, and its cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from tilewise.lab.bench.suites.budget import Budget
from tilewise.lab.bench.suites.methods import OURS, Method, exact
from tilewise.lab.bench.suites.nursery import peaks
from tilewise.lab.bench.suites.peak import STEP_BY_STEP, STEPS, Wanted
from tilewise.lab.bench.suites.point import Point
from tilewise.lab.bench.suites.steps import Settings, Step
from tilewise.lab.bench.suites.work import Pass, Work, draw, problem_of
from tilewise.plan.traffic.memory import plain_held, tiled_held

__all__ = ["CURE", "DOUBLE", "predicted", "steps", "weigh"]

SUITE = "memory"
DOUBLE = "plain attention, step by step"
CURE = "plain attention, some rows at a time"
_FIXED = 2048  # the longest of what is shown at one length
_CHUNKS = (1, 16, 256)


def steps(settings: Settings) -> list[Step]:
    """Forward, and forward with backward, along the length; then two looks at one length."""
    methods = exact(settings.device, with_flex=False)
    found = []
    for length in settings.lengths:
        for dtype in settings.dtypes:
            base = Work(
                SUITE,
                "",
                length,
                dtype,
                settings.heads,
                settings.heads,
                batch=settings.batch,
                device=settings.device,
            )
            ways: tuple[tuple[Pass, str], ...] = (("forward", "forward"), ("both", "training"))
            works = [replace(base, passes=passes, case=case) for passes, case in ways]
            name = f"memory, {length}, {dtype}"
            found.append(Step(name, partial(weigh, works, methods)))
    length = max(n for n in settings.lengths if n <= _FIXED or n == settings.lengths[0])
    fixed = Work(
        SUITE,
        DOUBLE,
        length,
        settings.dtypes[0],
        settings.heads,
        settings.heads,
        batch=settings.batch,
        device=settings.device,
    )
    found.append(Step(f"step by step, {length}", partial(_step_by_step, fixed)))
    found.append(Step(f"row by row, {length}", partial(_row_by_row, replace(fixed, case=CURE))))
    return found


def weigh(works: Sequence[Work], methods: Sequence[Method], budget: Budget) -> Iterator[Point]:
    """The peaks of all methods on some works, each in a process of its own.

    Args:
        works: of one length.
        methods: in the order of the record.
        budget: what may be spent.
    """
    asked: list[tuple[Work, Method]] = []
    for work in works:
        for method in methods:
            reason = (
                method.why_not(work)
                or budget.too_long(_key(work, method), work.length)
                or budget.too_large(2 * work.matrix_bytes * method.matrices, work.device)
            )
            if reason:
                yield _without(work, method, reason)
            else:
                asked.append((work, method))
    jobs = [Wanted.of(work, method.name) for work, method in asked]
    found = peaks(jobs, works[0].device)
    with closing(found):
        for (work, method), result in zip(asked, found, strict=True):
            if isinstance(result, str):
                yield _without(work, method, result)
                continue
            (peak,) = result
            budget.took(_key(work, method), work.length, peak.seconds)
            yield _point(
                work,
                method.name,
                peak.extra_bytes,
                exact=method.exact,
                predicted=predicted(work, method.name),
            )


def _key(work: Work, method: Method) -> tuple[str, ...]:
    return work.suite, work.case, work.dtype, method.name, "bytes"


def _without(work: Work, method: Method, note: str) -> Point:
    status: Any = "failed" if method.name == OURS and "left" not in note else "skipped"
    return Point.of(
        work, method.name, quantity="bytes", status=status, note=note, exact=method.exact
    )


def _point(work: Work, method: str, count: int, **more: Any) -> Point:
    return Point.of(work, method, quantity="bytes", samples=(float(count),), **more)


def predicted(work: Work, method: str) -> float | None:
    """What the model says that a method holds beyond its operands; None where it says nothing.

    Operands are q, k and v, and for training the gradient of the output.
    """
    held = {OURS: tiled_held, "plain": plain_held}.get(method)
    if held is None:
        return None
    small = replace(work, length=1, padding=0)
    problem, _ = problem_of(small, draw(small))
    problem = problem._replace(queries=work.length, keys=work.length)
    training = work.passes != "forward"
    size = problem.dtype.itemsize * work.batch * work.length * work.head_dim
    operands = size * (work.heads + 2 * work.kv_heads + (work.heads if training else 0))
    return float(held(problem, training).peak() - operands)


def _step_by_step(work: Work, budget: Budget) -> Iterator[Point]:
    reason = budget.too_large(4 * work.matrix_bytes, work.device)
    if reason:
        yield Point.of(work, "scores", quantity="bytes", status="skipped", note=reason)
        return
    for result in peaks([Wanted.of(work, STEP_BY_STEP)], work.device):
        if isinstance(result, str):
            yield Point.of(work, "scores", quantity="bytes", status="failed", note=result)
            continue
        for (name, matrices), peak in zip(STEPS, result, strict=True):
            yield _point(
                work, name, peak.extra_bytes, predicted=float(matrices * work.matrix_bytes)
            )


def _row_by_row(work: Work, budget: Budget) -> Iterator[Point]:
    """Bytes and seconds of the forward pass by the number of rows that are done at a time."""
    sizes = sorted({min(rows, work.length) for rows in (*_CHUNKS, work.length)})
    jobs = [Wanted.of(work, "plain, chunked", rows) for rows in sizes]
    for rows, result in zip(sizes, peaks(jobs, work.device), strict=True):
        name = f"{rows} rows" if rows > 1 else "1 row"
        if isinstance(result, str):
            yield Point.of(work, name, quantity="bytes", status="failed", note=result)
            continue
        (peak,) = result
        out = work.length * work.head_dim * work.heads * work.batch
        part = 2 * work.matrix_bytes * rows / work.length
        told = part + 2 * out * work.matrix_bytes / (
            work.length**2 * work.heads * work.batch
        )  # its parts of the output, and the whole of it
        yield _point(work, name, peak.extra_bytes, predicted=told)
        yield Point.of(work, name, samples=(peak.seconds,))
