"""The sweeps over lengths and models, as lists of steps; ``page.ABOUT`` says what each is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tilelab.bench.children import STEP_BY_STEP, STEPS, job_of, peaks
from tilelab.bench.goals import CaseResult, cases, key_of, measure
from tilelab.bench.steps import (
    Budget,
    Point,
    Settings,
    Status,
    Step,
    attempted,
    method_key,
    timed,
    why_skipped,
)
from tilelab.cases.case import Case, Pass
from tilelab.cases.table import rows
from tilelab.cases.variants import listed, softcap, window
from tilelab.common.memory import too_large
from tilelab.peers.methods import (
    OURS,
    Method,
    by_door,
    by_drawn_lists,
    by_lists,
    exact,
    flex,
    masked_by_lists,
    over_all_keys,
    rivals,
    sdpa,
    written_out,
)
from tilelab.peers.work import Attend, Given, Work, compare, draw, problem_of, work_of
from tilewise.inspect.known_models import KnownModel, known_model
from tilewise.inspect.peaks import absence
from tilewise.plan.traffic.memory import plain_held, tiled_held

_PASSES: tuple[Pass, ...] = ("forward", "backward")
WAYS: tuple[tuple[Pass, str], ...] = (("forward", "forward"), ("both", "training"))
_SHORT = 2048  # of the sweep ``speed``: the cases with goals come before longer ones


def speed(settings: Settings) -> list[Step]:
    """Return the sweep's steps; on a CPU ``bench cpu``'s cases come before the longest lengths."""
    short = [length for length in settings.lengths if length <= _SHORT]
    long = [length for length in settings.lengths if length > _SHORT]
    return [*_sweep(settings, short), *_with_goals(settings), *_sweep(settings, long)]


def _sweep(settings: Settings, lengths: Sequence[int]) -> list[Step]:
    works = [
        settings.work("speed", row, length, dtype, name=f"{way}, {row.name}", passes=way)
        for length, dtype, way, row in product(lengths, settings.dtypes, _PASSES, rows("sweep"))
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex))


def _with_goals(settings: Settings) -> list[Step]:
    if settings.device != "cpu" or absence():
        return []
    longest = max(settings.lengths)

    def points(case: Case, budget: Budget) -> list[Point]:
        return points_of(measure(case, 0.8, (3, 9), 1))

    return [
        Step(key_of(case), partial(points, case))
        for case in cases()
        if case.type_name in settings.dtypes
        and (case.quick or not settings.quick)
        and max(case.queries, case.keys) <= longest
    ]


def points_of(result: CaseResult) -> list[Point]:
    """Return a result of ``bench cpu`` as points."""
    shape = {key: result.shape[key] for key in ("batch", "heads", "kv_heads", "head_dim")}
    about = ("speed", f"goals: {result.name}", result.shape["keys"], result.dtype)
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


# The two looks of the suite ``memory`` at one length.
DOUBLE = "plain attention, step by step"
CURE = "plain attention, some rows at a time"
_FIXED = 2048  # the longest of what is shown at one length
_CHUNKS = (1, 16, 256)


def memory(settings: Settings) -> list[Step]:
    """Two looks at one length; then forward, and forward with backward, along the length."""
    length = max(n for n in settings.lengths if n <= _FIXED or n == settings.lengths[0])
    fixed = settings.work("memory", Case(DOUBLE), length, settings.dtypes[0])
    along = _along_length(settings, "memory", "memory", exact(settings.device, with_flex=False))
    return [Step(f"step by step, {length}", partial(_at_one_length, fixed)), *along]


def _along_length(
    settings: Settings, suite: str, words: str, methods: Sequence[Method], **sizes: int
) -> list[Step]:
    """Return steps that weigh a forward pass and training, at each length in each dtype."""
    found = []
    for length, dtype in product(settings.lengths, settings.dtypes):
        both = [Case(name, passes=way) for way, name in WAYS]
        works = [settings.work(suite, case, length, dtype, **sizes) for case in both]
        found.append(Step(f"{words}, {length}, {dtype}", partial(weigh, works, methods)))
    return found


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
            budget.took(method_key(work, method), work.keys, peak.seconds)
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
    output = work.batch * work.heads * work.keys * work.head_dim * work.dtype.itemsize
    whole = [(name, float(matrices * work.matrix_bytes)) for name, matrices in STEPS]
    looks = [(work, job_of(work, STEP_BY_STEP), whole)]
    for count in sorted({min(each, work.keys) for each in (*_CHUNKS, work.keys)}):
        name = f"{count} rows" if count > 1 else "1 row"
        held = 2 * work.matrix_bytes * count / work.keys + output
        looks.append((cure, job_of(cure, "plain, chunked", count), [(name, held)]))
    with closing(peaks([job for _, job, _ in looks], work.device)) as found:
        for (each, _, steps), result in zip(looks, found, strict=True):
            if isinstance(result, str):
                yield Point.of(each, steps[0][0], quantity="bytes", status="failed", note=result)
                continue
            for (name, said), peak in zip(steps, result, strict=True):
                yield _point(each, name, peak.extra_bytes, predicted=said)
                if each is cure:
                    yield Point.of(cure, name, samples=(peak.seconds,))


# Scores of a standard deviation of 1, and of 8: a softmax that is nearly one key.
_LARGE = 8.0
_FACTORS = (("usual scores", 1.0), ("large scores", _LARGE))
# Few queries: a long inner product under a large score. (M, D), keys, and heads: enough rows that
# the largest error of one method can be compared with another's.
FEW = ((1, 64), (1, 128), (2, 320), (8, 128), (8, 256), (8, 512))
_FEW_KEYS, _FEW_HEADS = 600, 32


def accuracy(settings: Settings) -> list[Step]:
    """Return steps for every length, dtype and pass, usual and large scores; then few queries."""
    methods = exact(settings.device, with_flex=False)
    works: list[tuple[Work, float]] = []
    for length, dtype, passes in product(settings.lengths, settings.dtypes, _PASSES):
        for words, factor in _FACTORS:
            case = Case(f"{passes}, {words}", mask=("causal",), passes=passes)
            works.append((settings.work("accuracy", case, length, dtype), factor))
    for (queries, width), dtype, passes in product(FEW, settings.dtypes, _PASSES):
        case = Case(f"{passes}, {queries} queries of {width}, large scores", passes=passes)
        more = {"head_dim": width, "queries": queries, "batch": 1, "heads": _FEW_HEADS}
        works.append((settings.work("accuracy", case, _FEW_KEYS, dtype, **more), _LARGE))
    return [Step(work.title, partial(_errors, work, factor, methods)) for work, factor in works]


def _errors(
    work: Work, factor: float, methods: Sequence[Method], budget: Budget
) -> Iterator[Point]:
    given = draw(work, factor)

    def measured(method: Method) -> Point:
        found = compare(work, given, method.make(work, given))
        return Point.of(
            work,
            method.name,
            quantity="error",
            status="wrong" if found.complaint else "ok",
            note=found.complaint,
            samples=(found.largest,),
            allowed=found.allowed,
        )

    for method in methods:
        if budget.left_s < 0:
            yield Point.without(work, method, "error", "skipped", "no time is left")
        else:
            yield attempted(work, method, budget, partial(measured, method), "error")


def paper(settings: Settings) -> list[Step]:
    """Times with and without dropout and padding along the length, and memory of both passes.

    Source: Dao, Fu, Ermon, Rudra and Re, "FlashAttention", NeurIPS 2022, section 4.3 (figure 3) and
    appendix E.6.
    """
    methods = [*exact(settings.device, with_flex=False), *rivals()]
    passes: list[tuple[Pass, str]] = [("both", "forward and backward")]
    if not settings.quick:
        passes += [(each, each) for each in _PASSES]
    found, dtype = [], settings.dtypes[0]
    for length in settings.lengths:
        for (way, words), row in product(passes, rows("paper")):
            if settings.quick and not row.quick:
                continue
            name = words if row.name == "full" else f"{words}, {row.name}"
            work = settings.work("paper", row, length, dtype, name=name, passes=way)
            found += timed([work], methods)
        case = Case("memory, forward and backward", passes="both")
        both = settings.work("paper", case, length, dtype)
        found.append(Step(f"memory, {length}", partial(weigh, [both], methods)))
    return found


_SHORT_MODEL = 1024  # every model is measured up to here, before any at its own length


def models(settings: Settings) -> list[Step]:
    """Return every model at a short length, then those whose own length is within the sweep."""
    longest, known = max(settings.lengths), {name: known_model(name) for name in settings.models}
    sizes = [(name, min(each.length, _SHORT_MODEL, longest)) for name, each in known.items()]
    sizes += [(name, each.length) for name, each in known.items() if each.length <= longest]
    works = [
        _of_model(known[name], f"{name}, {words}", length, dtype, way, settings.device)
        for (name, length), dtype, (way, words) in product(
            dict.fromkeys(sizes), settings.dtypes, WAYS
        )
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex), layer)


def _of_model(
    model: KnownModel, name: str, length: int, dtype: str, passes: Pass, device: str
) -> Work:
    mask: Any = ("causal",) if model.causal else ()
    if model.window is not None:
        mask = (window(model.window, 0),)
    score = () if model.softcap is None else (softcap(model.softcap),)
    sizes = (1, model.heads, model.kv_heads, length, length, model.head_dim, model.head_dim)
    case = Case(name, *sizes, getattr(torch, dtype), mask, score, passes=passes)
    return work_of(case, "models", device)


def layer(work: Work, given: Given, attend: Attend) -> Callable[[], Any]:
    """The call of a layer that attends in this way; for training, gradients of input and weights.

    Projections to queries, keys and values, attention, and the output projection; without norms,
    rotations and the feed-forward part. The layer's width is heads x head_dim, as in most models.
    """
    generator = torch.Generator().manual_seed(1)
    width = work.heads * work.head_dim
    rows = (work.heads + 2 * work.kv_heads) * work.head_dim
    dtype, training = given.q.dtype, work.passes != "forward"

    def drawn(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, generator=generator) * scale
        return made.to(dtype).to(work.device).requires_grad_(training)

    x = drawn(work.batch, work.keys, width)
    inwards, outwards = (drawn(out, width, scale=width**-0.5) for out in (rows, width))
    grad = torch.ones_like(x)

    def forward() -> Tensor:
        made = torch.nn.functional.linear(x, inwards)
        made = made.view(work.batch, work.keys, -1, work.head_dim)
        sizes = [work.heads, work.kv_heads, work.kv_heads]
        q, k, v = (part.transpose(1, 2) for part in torch.split(made, sizes, dim=2))
        return torch.nn.functional.linear(attend(q, k, v).transpose(1, 2).flatten(2), outwards)

    if not training:
        return forward
    return lambda: torch.autograd.grad(forward(), (x, inwards, outwards), grad)


_LENGTHS = {"cpu": 1024, "cuda": 4096}  # the longest
_HEADS = 4


def _longest(settings: Settings) -> int:
    """Return the one length of suites that have many cases."""
    longest = _LENGTHS[settings.device]
    return max([n for n in settings.lengths if n <= longest], default=min(settings.lengths))


def variants(settings: Settings) -> list[Step]:
    """Return every variant, forward and backward, at one length."""
    length = _longest(settings)
    works = [
        replace(each, name=f"{each.name}, {direction}", passes=direction)
        for dtype in (settings.dtypes[:1] if settings.quick else settings.dtypes)
        for direction in _PASSES
        for each in catalogue(length, settings.device, dtype)
    ]
    return timed(works, exact(settings.device, with_flex=settings.flex))


def widths(settings: Settings) -> list[Step]:
    """Return every row of widths at one length, forward and backward; latents forward alone."""
    length = _longest(settings)
    works = []
    for dtype, direction, row in product(settings.dtypes, _PASSES, rows("head widths")):
        if row.passes in ("both", direction):
            names = ("batch", "heads", "kv_heads", "head_dim", "value_dim")
            sizes = {name: getattr(row, name) for name in names}
            sizes["queries"] = row.queries if row.keys == -1 else length
            name = f"{row.name}, {direction}"
            more = {"name": name, "passes": direction, **sizes}
            works.append(settings.work("widths", row, length, dtype, **more))
    return timed(works, exact(settings.device, with_flex=settings.flex))


_DOOR_LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
_DOOR_KEYS = (16, 64, 256, 1024, 4096, 16384)  # of one query
_DOOR_HEADS = ((8, 8, 64), (32, 8, 128))  # and heads of keys, and their width


def doors(settings: Settings) -> list[Step]:
    """Return calls of ``tilewise.sdpa``, on which ``tilewise.preference`` decides.

    They are as other code makes them: one query, and as many as keys.
    """
    longest = max(settings.lengths)
    sizes = [(1, keys) for keys in _DOOR_KEYS] + [(each, each) for each in _DOOR_LENGTHS]
    works = []
    for dtype, (heads, kv_heads, width) in product(settings.dtypes, _DOOR_HEADS):
        for (way, words), (queries, keys) in product(WAYS, sizes):
            if keys > longest or (way == "both" and queries == 1):
                continue
            case = Case(f"{words}, {queries} queries, {heads}:{kv_heads} heads", passes=way)
            more = {"heads": heads, "kv_heads": kv_heads, "queries": queries, "head_dim": width}
            works.append(settings.work("doors", case, keys, dtype, **more))
    return timed(works, [by_door(), sdpa()])


LIST_ROWS = 16  # of queries, in records that do not say how many
LIST_HEADS, LIST_WIDTH = 64, 128
_LIST_LENGTHS = (4096, 32768, 131072)
_SHARES = (4, 16, 64)


def _list_rows(length: int) -> int:
    """Return query rows: as many as torch with a mask has memory and time for.

    A backward pass makes and writes the gradients of all keys, which few rows pay for alone.
    """
    return min(64, max(LIST_ROWS, 2**21 // length))


def lists(settings: Settings) -> list[Step]:
    """Return steps for shares of the keys and lengths: 64 heads of 128 that share a key head."""
    longest = max(settings.lengths)
    lengths = [length for length in _LIST_LENGTHS if length <= 2 * longest] or [longest]
    sizes = {"batch": 1, "heads": LIST_HEADS, "kv_heads": 1, "head_dim": LIST_WIDTH}
    works = []
    for length, dtype, way, share in product(lengths, settings.dtypes, _PASSES, _SHARES):
        case = Case(f"{way}, 1 of {share} keys", mask=(listed(share),), passes=way)
        more = {"queries": _list_rows(length), **sizes}
        works.append(settings.work("lists", case, length, dtype, **more))
    methods = [by_lists(), over_all_keys(), sdpa(), written_out()]
    return timed(works, [*methods, *([flex()] if settings.flex else [])])


LISTED = 512  # keys of a row's list: fewer than there are from here on
LIST_MEMORY_HEADS = 4  # that share a key head and lists


def list_memory(settings: Settings) -> list[Step]:
    """Return steps that weigh key lists of one width, along the length: four heads of width 64."""
    methods = [by_drawn_lists(), over_all_keys(), masked_by_lists()]
    sizes = {"heads": LIST_MEMORY_HEADS, "kv_heads": 1, "listed": LISTED}
    return _along_length(settings, "list-memory", "lists' memory", methods, **sizes)


def catalogue(length: int, device: str, dtype: str = "float32") -> list[Work]:
    """Return a work for each variant, none first."""
    work = partial(Settings(device).work, "variants", batch=1, heads=_HEADS)
    return [work(row, length, dtype) for row in rows("variants")]
