"""Suite ``memory``: peaks of passes along the length, the softmax's double peak, and its cure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from tilelab.bench.children import STEP_BY_STEP, STEPS, Peak, job_of, peaks
from tilelab.bench.points import Point, Status
from tilelab.bench.steps import Budget, Settings, Step, key_of, why_skipped
from tilelab.cases.case import Case, Pass
from tilelab.common.memory import too_large
from tilelab.peers.methods import OURS, Method, exact
from tilelab.peers.work import Work, draw, problem_of
from tilewise.plan.traffic.memory import plain_held, tiled_held

DOUBLE = "plain attention, step by step"
CURE = "plain attention, some rows at a time"
WAYS: tuple[tuple[Pass, str], ...] = (("forward", "forward"), ("both", "training"))
_FIXED = 2048  # the longest of what is shown at one length
_CHUNKS = (1, 16, 256)


def steps(settings: Settings) -> list[Step]:
    """Two looks at one length; then forward, and forward with backward, along the length."""
    methods = exact(settings.device, with_flex=False)
    found = []
    for length in settings.lengths:
        for dtype in settings.dtypes:
            base = settings.work("memory", Case(""), length, dtype)
            works = [replace(base, passes=passes, name=name) for passes, name in WAYS]
            found.append(Step(f"memory, {length}, {dtype}", partial(weigh, works, methods)))
    length = max(n for n in settings.lengths if n <= _FIXED or n == settings.lengths[0])
    fixed = settings.work("memory", Case(DOUBLE), length, settings.dtypes[0])
    return [Step(f"step by step, {length}", partial(_at_one_length, fixed)), *found]


def weigh(works: Sequence[Work], methods: Sequence[Method], budget: Budget) -> Iterator[Point]:
    """Yield the peaks of all methods on some works, each in a process of its own."""
    tried: list[tuple[Work, Method]] = []
    for work in works:
        for method in methods:
            reason = why_skipped(work, method, budget)
            if reason:
                yield Point.without(work, method, "bytes", "skipped", reason)
            else:
                tried.append((work, method))
    jobs = [job_of(work, method.name) for work, method in tried]
    with closing(peaks(jobs, works[0].device)) as found:
        for (work, method), result in zip(tried, found, strict=True):
            if isinstance(result, str):
                status: Status = "failed" if method.name == OURS else "skipped"
                yield Point.without(work, method, "bytes", status, result)
                continue
            (peak,) = result
            budget.took(key_of(work, method), work.keys, peak.seconds)
            said = predicted(work, method.name)
            yield _point(work, method.name, peak.extra_bytes, exact=method.exact, predicted=said)


def _point(work: Work, method: str, count: int, **more: Any) -> Point:
    return Point.of(work, method, quantity="bytes", samples=(float(count),), **more)


def predicted(work: Work, method: str) -> float | None:
    """Predict the bytes that a method holds beyond its operands; None without a prediction.

    Operands are q, k and v, and for training the gradient of the output.
    """
    held = {OURS: tiled_held, "plain": plain_held}.get(method)
    if held is None:
        return None
    small = replace(work, queries=1, keys=1)
    problem, _ = problem_of(small, draw(small))
    problem = problem._replace(queries=work.queries, keys=work.keys)
    training = work.passes != "forward"
    size = problem.dtype.itemsize * work.batch * work.keys * work.head_dim
    operands = size * (work.heads + 2 * work.kv_heads + (work.heads if training else 0))
    return float(held(problem, training).peak() - operands)


def _at_one_length(work: Work, budget: Budget) -> Iterator[Point]:
    """The steps of plain attention, and its forward pass by the rows that are done at a time."""
    reason = too_large(4 * work.matrix_bytes, work.device)
    if reason:
        yield Point.of(work, STEPS[0][0], quantity="bytes", status="skipped", note=reason)
        return
    cure = replace(work, name=CURE)
    sizes = sorted({min(rows, work.keys) for rows in (*_CHUNKS, work.keys)})
    jobs = [job_of(work, STEP_BY_STEP)]
    jobs += [job_of(cure, "plain, chunked", rows) for rows in sizes]
    with closing(peaks(jobs, work.device)) as found:
        yield from _stepwise(work, next(found))
        for rows in sizes:
            yield from _cured(cure, rows, next(found))


def _stepwise(work: Work, result: list[Peak] | str) -> Iterator[Point]:
    if isinstance(result, str):
        yield Point.of(work, STEPS[0][0], quantity="bytes", status="failed", note=result)
        return
    for (name, matrices), peak in zip(STEPS, result, strict=True):
        yield _point(work, name, peak.extra_bytes, predicted=float(matrices * work.matrix_bytes))


def _cured(work: Work, rows: int, result: list[Peak] | str) -> Iterator[Point]:
    """Yield bytes and seconds of so many rows at a time."""
    name = f"{rows} rows" if rows > 1 else "1 row"
    if isinstance(result, str):
        yield Point.of(work, name, quantity="bytes", status="failed", note=result)
        return
    (peak,) = result
    output = work.batch * work.heads * work.keys * work.head_dim * work.dtype.itemsize
    part = 2 * work.matrix_bytes * rows / work.keys
    yield _point(work, name, peak.extra_bytes, predicted=part + output)
    yield Point.of(work, name, samples=(peak.seconds,))
