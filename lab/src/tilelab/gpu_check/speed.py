"""Steps of the timed cases: speed, shorter lengths, compiling before it, and the bits repeated.

Ours and the others are timed in turn, forward and backward, each with its operations per second. A
case whose sampled rows are not exact is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tilelab.cases.case import Case
from tilelab.common.clock import Call, seconds_of
from tilelab.common.exactness import judge
from tilelab.common.memory import too_large
from tilelab.gpu_check import timed
from tilelab.gpu_check.outcomes import quantised, references
from tilelab.gpu_check.record import FLEX, OURS, Row, Status, in_short
from tilelab.gpu_check.setting import Setting
from tilelab.peers.methods import Method
from tilelab.peers.plain import compare, cut, sampled
from tilelab.peers.work import Attend, Given, Work, call_of, draw
from tilewise.errors import Unsupported
from tilewise.variants.float8 import Scales

_BUDGET_S = 0.5  # of the rounds of one pass of one case
_OF_A_SELF_TEST = 2  # cases that are prepared: nothing is compiled
_TIMES = 8  # of a call whose bits are compared


class _Tried(NamedTuple):
    """What came of calling every method once: which can be timed, and why the others cannot."""

    attends: dict[str, Attend]
    calls: dict[str, Call]
    first_s: dict[str, float]
    declined: dict[str, str]
    failed: dict[str, str]


def to_prepare(setting: Setting) -> list[str]:
    """Return a job for each timed case."""
    names = [case.name for case in timed.cases(setting.sizes)]
    return names[:_OF_A_SELF_TEST] if setting.self_test else names


def prepare(setting: Setting, job: str) -> Iterator[Row]:
    """Call ours and FlexAttention once; what does not work says so when it is timed."""
    case = timed.find(setting.sizes, job)
    first_s: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        for ways in (timed.ours(case), timed.flex(setting, case)):
            for direction in timed.directions(case):
                work = setting.work(case, passes=direction)
                found = _attempt(setting, work, draw(work), ways)
                first_s.setdefault(direction, {}).update(found.first_s)
            if setting.scratch and FLEX in ways:
                _marker(setting, case).touch()
    yield Row("prepare", job, values={"first_call_s": first_s})


def to_repeat(setting: Setting) -> list[str]:
    """Return the widest lengths of each kind that has gradients."""
    chosen = [case for case in timed.cases(setting.sizes) if case.passes == "both"]
    return [case.name for case in chosen if case.keys == setting.sizes.lengths[0]]


def repeat(setting: Setting, job: str) -> Iterator[Row]:
    """Output and gradients, every time with the bits of the first."""
    case = timed.find(setting.sizes, job)
    work = setting.work(case)
    given = draw(work)
    attend, leaves = timed.ours(case)["ours"].make(work, given), given.leaves
    first: tuple[torch.Tensor, ...] = ()
    unequal = 0
    for number in range(2 if setting.self_test else _TIMES):
        if number % 2 and not setting.self_test:
            _other_work(setting)
        out = attend(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, given.grad))
        first = first or found
        unequal += not all(bool((a == b).all()) for a, b in zip(first, found, strict=True))
    setting.synchronize()
    note = f"{unequal} of {_TIMES} times other bits" if unequal else ""
    yield Row("repeat", case.name, "wrong" if unequal else "ok", note, {"times": _TIMES})


def _other_work(setting: Setting) -> None:
    """A matrix product on another stream, so that blocks are given out in another order."""
    size = setting.sizes.matrix // 2
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        a = torch.randn(size, size, device=setting.device, dtype=setting.dtype)
        for _ in range(4):
            a = a @ a


DTYPES = "dtypes"
_OTHER_DTYPES = ("float16", "float32")


def in_other_dtypes(setting: Setting) -> list[str]:
    """Return jobs of the causal case of each width, in the dtypes that other steps do not time."""
    chosen = [case for case in timed.with_goals(setting.sizes) if case.kind == "causal"]
    longest = [case.name for case in chosen if case.keys == setting.sizes.lengths[0]]
    return [f"{dtype} {name}" for dtype in _OTHER_DTYPES for name in longest]


def measure_dtype(setting: Setting, job: str) -> Iterator[Row]:
    """Time a case in a dtype of its own: "float16 D128 causal 16384"."""
    dtype, _, name = job.partition(" ")
    for row in measure(DTYPES, setting, name, getattr(torch, dtype)):
        yield replace(row, name=f"{row.name} {dtype}", values={**row.values, "dtype": dtype})


def measure(
    step: str, setting: Setting, job: str, dtype: torch.dtype | None = None
) -> Iterator[Row]:
    """The forward pass of a case, and where it has one the backward pass, for a step."""
    case = timed.find(setting.sizes, job)
    own, others = timed.ours(case), timed.peers(setting, case)
    absent: dict[str, str] = {}
    ready = setting.self_test or not setting.scratch or _marker(setting, case).exists()
    if not ready and others.pop(FLEX, None) is not None:
        absent[FLEX] = "its compilation did not end in time"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        for direction in timed.directions(case):
            work = setting.work(case, passes=direction, dtype=dtype or setting.dtype)
            yield Row(step, f"{direction} {job}", *_pass(setting, work, own, others, absent))


def _marker(setting: Setting, case: Case) -> Path:
    """The file that says that FlexAttention is compiled for a case."""
    return Path(setting.scratch) / f"flex {case.name}"


def _pass(
    setting: Setting,
    work: Work,
    own: dict[str, Method],
    others: dict[str, Method],
    absent: dict[str, str],
) -> tuple[Status, str, dict[str, Any]]:
    """Return the status, the note and the values of a row."""
    given = draw(work)
    tried = _attempt(setting, work, given, own)
    status, note = _verdict(work, given, tried)  # before matrices of others take the memory
    beside = _attempt(setting, work, given, others)
    calls = {name: call for name, call in tried.calls.items() if status == "ok" or name not in OURS}
    return (
        status,
        note,
        {
            "direction": work.passes,
            "kind": work.kind,
            "head_dim": work.head_dim,
            "length": work.keys,
            "unit": "TB/s" if work.kind == "decode" else "TFLOP/s",
            "amount": timed.amount(work),
            "absent": absent | (tried.declined | beside.declined) | (tried.failed | beside.failed),
            "samples_s": setting.race(calls | beside.calls, _BUDGET_S),
        },
    )


def _verdict(work: Work, given: Given, tried: _Tried) -> tuple[Status, str]:
    """Return whether ours ran at all, and was exact."""
    for name in OURS:
        if name in tried.failed:
            return "error", f"{name}: {tried.failed[name]}"
    for name in OURS:
        if name in tried.attends:
            attend = tried.attends[name]
            if work.kind == "fp8":
                complaint = _in_float8(given, attend)
            else:
                complaint = compare(work, given, attend).complaint
            if complaint:
                return "wrong", f"{name}: {complaint}"
    if "ours" in tried.declined:
        return "unsupported", tried.declined["ours"]
    return "ok", ""


def _in_float8(given: Given, attend: Attend) -> str:
    """Return what is wrong with sampled rows of the last head in float8; "" if nothing."""
    found, rows = attend(given.q, given.k, given.v), sampled(given.q.shape[2])
    pairs = [quantised(x) for x in given.leaves]
    (q, k, v), scales = (x[-1:, -1:] for x, _ in pairs), [scale[-1:] for _, scale in pairs]
    plain, oracle = references(cut(q, rows), k, v, Scales(*scales))
    return judge(cut(found[-1:, -1:], rows), plain.out, oracle.out).fault("out")


def _attempt(setting: Setting, work: Work, given: Given, ways: dict[str, Method]) -> _Tried:
    """Call everybody once."""
    found = _Tried({}, {}, {}, {}, {})

    def first(name: str, method: Method) -> None:
        attend = method.make(work, given)
        call = call_of(work, given, attend)
        call()
        found.attends[name], found.calls[name] = attend, call

    for name, method in ways.items():
        if why := method.why_not(work) or too_large(method.bytes(work), work.device):
            found.failed[name] = why
            continue
        try:
            found.first_s[name] = seconds_of(lambda: first(name, method), setting.timer)  # noqa: B023
        except Unsupported as error:
            found.declined[name] = in_short(error)
        except Exception as error:
            found.failed[name] = in_short(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
    return found
