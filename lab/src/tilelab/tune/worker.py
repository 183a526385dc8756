"""Tuning jobs, and the worker process that does them: it tries ("check") and times ("measure").

A job is a pass for a dtype, a width and a kind of call. Rows of the table stand for a kind of call:
small ones for exactness, large ones for time. Doing a job imports Triton; naming one does not.

``python -m tilelab.tune.worker SETTING`` speaks as the worker of the GPU check does. A job is
the words of a ``Job`` and the blocks that are asked about, the table's first where they are timed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.cases.case import Case, Use
from tilelab.cases.inputs import build, problem_of, send
from tilelab.cases.table import rows
from tilelab.common.exactness import judge
from tilelab.gate.cases import kind_of
from tilelab.gate.search import blocks_of, ladder
from tilelab.gpu_check.record import Row, in_short
from tilelab.gpu_check.setting import Outcome, Setting, block_table, in_pages, refer, references
from tilelab.gpu_check.worker import main
from tilewise.inspect import gpu
from tilewise.inspect.gpu import (
    FAMILIES,
    KERNELS,
    MEASURED,
    PASSES,
    UNPROVEN,
    Launch,
    Overrides,
    Pass,
    family_of,
    run,
)
from tilewise.plan.tuned import Blocks, Place
from tilewise.problem import Grads, Needs, Result
from tilewise.variants.float8 import FLOAT8, Scales


class Job(NamedTuple):
    """One entry of the table of blocks that is questioned."""

    pass_name: Pass
    dtype: str  # "bfloat16" and so on
    width: int  # the class of D and Dv
    kind: str  # "plain", "+" or "*", as in the table

    @property
    def type(self) -> torch.dtype:
        """The dtype itself."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def place(self) -> Place:
        """The place of its blocks in a file."""
        return Place(self.pass_name, self.type, self.width, self.kind)

    def __str__(self) -> str:
        return f"{self.pass_name} {self.dtype} {self.width} {self.kind}"


def table_blocks(family: str, job: Job) -> Blocks:
    """Return the table's blocks for a job."""
    return gpu.table_blocks(family, job.place)


def is_known(family: str, job: Job) -> bool:
    """Return whether a family has kernels for a job: few calls have those of ``UNPROVEN``."""
    there = (job.pass_name, family, job.width) in UNPROVEN
    if job.pass_name in PASSES:
        return job.type is not FLOAT8 or job.pass_name == "forward"
    wanted = 1 if job.pass_name == "grouped8" else 2
    return there and job.kind == "plain" and job.type.itemsize == wanted


def candidates(family: str, job: Job, most: int) -> list[Blocks]:
    """Return other blocks worth a try: the nearest to the table's that fit the chip.

    The distance counts doublings of sides and of warps, and stages. It adds one for blocks that
    give a thread more pairs than the table's do: the table has the most that did not spill. Among
    equally near blocks the larger come first.
    """
    if job.pass_name not in PASSES:
        return [UNPROVEN[job.pass_name, family, job.width]]
    table = table_blocks(family, job)
    fitting = ladder(FAMILIES[family], job.pass_name, job.width, job.type.itemsize)
    others = [blocks for blocks in fitting if blocks != table]
    return sorted(others, key=lambda blocks: _distance(blocks, table))[:most]


def _distance(one: Blocks, other: Blocks) -> float:
    doublings = sum(abs(math.log2(a / b)) for a, b in zip(one[:3], other[:3], strict=True))
    return doublings + abs(one.stages - other.stages) + (_pairs(one) > _pairs(other))


def _pairs(blocks: Blocks) -> int:
    """Return the pairs of a warp."""
    return blocks.queries * blocks.keys // blocks.warps


def read_job(words: str) -> tuple[Job, list[Blocks]]:
    """Parse "dq bfloat16 64 + 64x32/4/2 64x64/8/1": a job and blocks as ``str`` has them."""
    name, dtype, width, kind, *texts = words.split()
    job = Job(next(each for each in MEASURED if each == name), dtype, int(width), kind)
    return job, [blocks_of(text) for text in texts]


_HIDDEN, _BATCH, _LENGTH = 2048, 4, 4096
_CACHED, _KEYS, _GROUP = 1024, 16384, 4  # of decoding: the width of the heads that share keys
_SHRINK, _TINY_WIDTH, _LARGEST_TINY = 8, 16, 40


def _rows(use: Use, job: Job) -> list[Case]:
    return [case for case in rows(use) if kind_of(case) == job.kind]


def small_cases(job: Job, tiny: bool) -> list[Case]:
    """Problems whose results are compared with the reference's; lengths that no block divides."""
    cases = _rows("tune small", job)
    if job.pass_name == "decode":
        dense = [case for case in cases if case.sequences is None]
        cases = [replace(case, queries=3, keys=1200, kv_heads=2) for case in dense]
    elif job.pass_name != "forward":  # the others know no pages
        cases = [case for case in cases if not case.page_size]
    if job.pass_name not in PASSES:  # they serve a causal mask of as many keys as queries
        cases = [replace(case, keys=case.queries) for case in cases]
    return [_sized(case, job, tiny) for case in cases]


def large_cases(job: Job, tiny: bool) -> list[Case]:
    """Problems that are timed; tiny ones measure nothing.

    They have 16k tokens; those of decoding have eight sequences of one query and 16k keys.
    """
    few, cases = job.pass_name == "decode", _rows("tune large", job)
    if few:  # of one query, causal is full
        ones = [case for case in cases if case.sequences is None and case.name != "causal"]
        cases = [replace(case, queries=1, keys=_KEYS, kv_heads=2) for case in ones]
    heads = max(1, (_CACHED if few else _HIDDEN) // job.width)
    shape: dict[str, Any] = {"batch": _BATCH, "heads": heads, "kv_heads": heads}
    if few:
        shape |= {"batch": 2 * _BATCH, "heads": _GROUP * heads}
    else:
        shape |= {"queries": _LENGTH, "keys": _LENGTH}
    wide = cases if tiny else [replace(case, **shape) for case in cases]
    return [_sized(case, job, tiny) for case in wide]


def _sized(case: Case, job: Job, tiny: bool) -> Case:
    """Return the problem in the job's dtype and width, or tiny."""
    if not tiny:
        return replace(case, dtype=job.type, head_dim=job.width, value_dim=job.width)
    sequences = case.sequences
    if sequences is not None:
        sequences = tuple((min(m, _LARGEST_TINY), min(n, _LARGEST_TINY)) for m, n in sequences[:2])
    return replace(
        case,
        batch=1,
        heads=2,
        kv_heads=1 if case.kv_heads < case.heads else 2,
        queries=_shrunk(case.queries),
        keys=_shrunk(case.keys),
        head_dim=_TINY_WIDTH,
        value_dim=_TINY_WIDTH,
        dtype=job.type,
        sequences=sequences,
    )


def _shrunk(length: int) -> int:
    """Return a length that takes the interpreter no long time; one that is tiny already stays."""
    return length if length <= _LARGEST_TINY else min(length // _SHRINK, 4 * _LARGEST_TINY)


_BUDGET_S = 1.0  # of the rounds in which blocks are timed in turn


class Work:
    """A problem with its tensors and with the result of its forward pass, in the table's blocks.

    Attributes:
        inputs: the tensors as a user has them; the reference takes them.
    """

    def __init__(self, setting: Setting, case: Case, family: str) -> None:
        self.inputs = inputs = build(case, device=setting.device)
        self._sent = send(inputs)
        q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
        pages: dict[str, Tensor] = {}
        if case.page_size:
            k, v, pages = _in_pages(k, v, case.page_size)
        self._problem, operands = problem_of(
            inputs._replace(q=q, k=k, v=v), setting.backend, **pages
        )
        self._learned = tuple(x.requires_grad for x in operands.score_tensors)
        score_tensors = tuple(x.detach() for x in operands.score_tensors)
        self._operands = operands._replace(score_tensors=score_tensors)
        self._family = family
        self._result, self._other = (gpu.empty_result(self._problem, q, "") for _ in range(2))
        self._rooms: Outcome = {}
        gpu.run(self._forward(self._result))

    def launches(self, pass_name: Pass, blocks: Blocks) -> tuple[Sequence[Launch], Outcome]:
        """Return what a pass launches in these blocks, and where its results will be.

        All blocks share this memory, which now holds NaN: no blocks get another's results.
        """
        overrides = [(pass_name, blocks)]
        if pass_name not in PASSES:
            own = UNPROVEN[pass_name, self._family, self._problem.head_dim]
            if blocks != own:
                overrides = []  # what it is compared with
        if pass_name in ("forward", "grouped", "grouped8", "decode"):
            outcome = {"out": self._other.out}
            if self._problem.dtype is not FLOAT8:  # whose matrix units give lse few bits
                outcome["lse"] = self._other.lse
            launches = self._forward(self._other, overrides)
        else:
            launches, outcome = self._backward(pass_name, overrides)
        for room in outcome.values():
            room.fill_(math.nan)
        return launches, outcome

    def own(self, pass_name: Pass, launches: Sequence[Launch]) -> list[Launch]:
        """Return the launches that walk over the pairs: only these are timed.

        Of ``UNPROVEN``, and of the kernels in their place, all are. So are those of float8, whose
        values are transposed before.
        """
        if pass_name not in PASSES or self._problem.dtype is FLOAT8:
            return list(launches)
        return [launch for launch in launches if launch.kernel.__name__ == KERNELS[pass_name]]

    def _forward(self, result: Result, overrides: Overrides = ()) -> Sequence[Launch]:
        return gpu.forward_launches(self._problem, self._operands, result, self._family, overrides)

    def _backward(self, pass_name: Pass, overrides: Overrides) -> tuple[Sequence[Launch], Outcome]:
        """Gradients of keys and values, or of queries and of what the score captured, or all."""
        operands, by_keys = self._operands, pass_name in ("dkdv", "fused")
        by_queries = pass_name != "dkdv"
        learned = tuple(each and by_queries for each in self._learned)
        needs = Needs(by_queries, by_keys, by_keys, learned, False)
        wanted: Outcome = {}

        def room(name: str, tensor: Tensor, need: bool) -> Tensor | None:
            if not need:
                return None
            key = f"grad of {name}"
            wanted[key] = self._rooms.setdefault(key, torch.empty_like(tensor))
            return wanted[key]

        captured = zip(operands.score_tensors, learned, strict=True)
        grads = Grads(
            room("q", operands.q, by_queries),
            room("k", operands.k, by_keys),
            room("v", operands.v, by_keys),
            tuple(room(f"captured {i}", x, need) for i, (x, need) in enumerate(captured)),
            None,
        )
        sent = self._sent.out, self._sent.lse
        launches = gpu.backward_launches(
            self._problem, operands, self._result, sent, needs, grads, self._family, overrides
        )
        return launches, wanted


def _in_pages(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return keys and values [B, Hk, N, D] in pages, in no order, and how the pages are found."""
    batch, keys = k.shape[0], k.shape[2]
    ends = torch.arange(0, (batch + 1) * keys, keys, dtype=torch.int32, device=k.device)
    table = block_table(ends, size, seed=3)
    k, v = (in_pages(x.transpose(1, 2).flatten(0, 1), ends, table, size) for x in (k, v))
    return k, v, {"block_table": table, "key_lengths": ends.diff()}


def spills_in(launches: Sequence[Launch]) -> int:
    """Run launches and count the registers that their kernels spill; 0 in the interpreter."""
    count = 0
    for kernel, grid, arguments, constants, warps, stages in launches:
        if all(grid):
            compiled = kernel[grid](**arguments, **constants, num_warps=warps, num_stages=stages)
            count += getattr(compiled, "n_spills", None) or 0
    return count


def perform(setting: Setting, step: str, words: str) -> Iterator[Row]:
    """The row of a "check" or "measure" of words like "forward bfloat16 128 plain 128x64/8/2"."""
    job, blocks = read_job(words)
    yield _check(setting, job, blocks[0]) if step == "check" else _measure(setting, job, blocks)


def _check(setting: Setting, job: Job, blocks: Blocks) -> Row:
    """Return whether a pass in these blocks is exact on every small problem, and what it spills."""
    ratios: dict[str, float] = {}
    spills = 0
    for case in small_cases(job, setting.self_test):
        work, references = _small(setting, case)
        launches, outcome = work.launches(job.pass_name, blocks)
        spills += spills_in(launches)
        for key, actual in outcome.items():
            verdict = judge(actual, *(reference[key] for reference in references))
            ratios[f"{case.name}, {key}"] = verdict.ratio
            if fault := verdict.fault(key):
                note, values = f"{case.name}: {fault}", {"ratios": ratios, "spills": spills}
                return Row("check", str(job), "wrong", note, values)
    return Row("check", str(job), values={"ratios": ratios, "spills": spills})


@lru_cache(maxsize=8)
def _small(setting: Setting, case: Case) -> tuple[Work, tuple[Outcome, Outcome]]:
    """A small problem, and its results by plain torch in its dtype and in float64."""
    work = Work(setting, case, _family(setting))
    if case.dtype is FLOAT8:
        given = work.inputs.detached()
        plain, oracle = references(given.q, given.k, given.v, Scales(), given.mask)
        return work, ({"out": plain.out}, {"out": oracle.out})
    return work, (refer(work.inputs, case.dtype), refer(work.inputs, torch.float64))


def _measure(setting: Setting, job: Job, blocks: list[Blocks]) -> Row:
    """Seconds of a pass on the large problems in each of these blocks, in turn.

    Others than the table's may fail where there is more to do; the row says so.
    """
    works = _large(setting, job)
    calls, failed = {}, {}
    for number, each in enumerate(blocks):
        try:
            calls[str(each)] = partial(run, _timed(works, job, each))
            setting.synchronize()
        except Exception as error:
            if number == 0:
                raise
            calls.pop(str(each), None)
            failed[str(each)] = in_short(error)
    samples = setting.race(calls, _BUDGET_S)
    return Row("measure", str(job), values={"samples_s": samples, "failed": failed})


def _timed(works: list[Work], job: Job, blocks: Blocks) -> list[Launch]:
    """The launches that are timed; whatever they read is there, and they are compiled."""
    own: list[Launch] = []
    for work in works:
        launches, _ = work.launches(job.pass_name, blocks)
        run(launches)
        own += work.own(job.pass_name, launches)
    return own


@lru_cache(maxsize=1)
def _large(setting: Setting, job: Job) -> list[Work]:
    cases = large_cases(job, setting.self_test)
    return [Work(setting, case, _family(setting)) for case in cases]


def _family(setting: Setting) -> str:
    family = family_of(setting.device)
    assert family is not None, "the parent asks for chips only that have one"
    return family


if __name__ == "__main__":
    main(perform)
