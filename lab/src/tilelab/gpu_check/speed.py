"""Steps of the timed cases: speed, shorter lengths, compiling before it, and the bits repeated.

Ours and the others are timed in turn, forward and backward, each with its operations per second. A
case whose sampled rows are not exact is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.common.clock import Call, seconds_of
from tilelab.common.exactness import Verdict, judge
from tilelab.gpu_check import timed
from tilelab.gpu_check.outcomes import references
from tilelab.gpu_check.record import FLEX, OURS, Row, Status, in_short
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.timed import Attend, Tensors, Timed, flex, peers
from tilewise.errors import Unsupported
from tilewise.variants.float8 import Scales

__all__ = [
    "jobs",
    "jobs_of_lengths",
    "jobs_of_prepare",
    "jobs_of_repeat",
    "run",
    "run_lengths",
    "run_prepare",
    "run_repeat",
]

STEP = "speed"
_BUDGET_S = 0.5  # of the rounds of one pass of one case
_ROWS = 48
_OF_A_SELF_TEST = 2  # cases that are prepared: nothing is compiled
_TIMES = 8  # of a call whose bits are compared


class Tried(NamedTuple):
    """The outcome of calling every method once: which can be timed, and why the others cannot."""

    calls: dict[str, Call]
    outs: dict[str, Any]
    declined: dict[str, str]
    failed: dict[str, str]
    first_s: dict[str, float]


def jobs(setting: Setting) -> list[str]:
    """A job for each case with a goal."""
    return [case.name for case in timed.with_goals(setting.sizes)]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """The forward pass of a case, and where it has one the backward pass."""
    return _measure(setting, STEP, job)


def jobs_of_lengths(setting: Setting) -> list[str]:
    """Return a job for each case."""
    return [case.name for case in timed.other_lengths(setting.sizes)]


def run_lengths(setting: Setting, job: str) -> Iterator[Row]:
    """Measure the forward pass of a case, and the backward pass."""
    return _measure(setting, "lengths", job)


def jobs_of_prepare(setting: Setting) -> list[str]:
    """Return a job for each timed case."""
    names = [case.name for case in timed.cases(setting.sizes)]
    return names[:_OF_A_SELF_TEST] if setting.self_test else names


def run_prepare(setting: Setting, job: str) -> Iterator[Row]:
    """Call ours and FlexAttention once; what does not work says so when it is timed."""
    case = timed.find(setting.sizes, job)
    tensors = timed.given(setting, case)
    first_s: dict[str, dict[str, float]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        theirs = {} if case.kind == "fp8" else {FLEX: flex(setting, case, tensors)}
        for ways in (timed.ours(setting, case, tensors), theirs):
            for backward in (False, True)[: 1 + case.has_backward]:
                direction = "backward" if backward else "forward"
                found = _attempt(setting, tensors, ways, backward=backward)
                first_s.setdefault(direction, {}).update(found.first_s)
            if setting.scratch and FLEX in ways:
                _marker(setting, case).touch()
    yield Row("prepare", job, values={"first_call_s": first_s})


def jobs_of_repeat(setting: Setting) -> list[str]:
    """Rerepeat the widest lengths of each kind that has gradients."""
    length = setting.sizes.variant_length
    chosen = [case for case in timed.cases(setting.sizes) if case.has_backward]
    return [case.name for case in chosen if case.length == length]


def run_repeat(setting: Setting, job: str) -> Iterator[Row]:
    """Output and gradients, every time with the bits of the first."""
    case = timed.find(setting.sizes, job)
    tensors = timed.given(setting, case)
    attend = timed.ours(setting, case, tensors)["ours"]
    leaves = tuple(x.requires_grad_() for x in (tensors.q, tensors.k, tensors.v))
    first: tuple[torch.Tensor, ...] = ()
    unequal = 0
    for repeat in range(2 if setting.self_test else _TIMES):
        if repeat % 2:
            _other_work(setting)
        out = attend(*leaves)
        found = (out.detach(), *torch.autograd.grad(out, leaves, tensors.grad))
        first = first or found
        same = [bool((a == b).all()) for a, b in zip(first, found, strict=True)]
        unequal += not all(same)
    setting.synchronize()
    note = f"{unequal} of {_TIMES} times other bits" if unequal else ""
    yield Row("repeat", case.name, "wrong" if unequal else "ok", note, {"times": _TIMES})


def _other_work(setting: Setting) -> None:
    """A matrix product on another stream, so that blocks are given out in another order."""
    if setting.self_test:
        return
    size = setting.sizes.matrix // 2
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        a = torch.randn(size, size, device=setting.device, dtype=setting.dtype)
        for _ in range(4):
            a = a @ a
    del a


def _measure(setting: Setting, step: str, job: str) -> Iterator[Row]:
    """The rows of a case, for a step."""
    case = timed.find(setting.sizes, job)
    tensors = timed.given(setting, case)
    ways = {**timed.ours(setting, case, tensors), **peers(setting, case, tensors)}
    absent: dict[str, str] = {}
    ready = setting.self_test or not setting.scratch or _marker(setting, case).exists()
    if not ready and ways.pop(FLEX, None) is not None:
        absent[FLEX] = "its compilation did not end in time"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        yield _pass(setting, step, case, tensors, ways, absent, backward=False)
        ways.pop(timed.POINTERS, None)  # of the forward pass alone
        if case.has_backward:
            yield _pass(setting, step, case, tensors, ways, absent, backward=True)


def _marker(setting: Setting, case: Timed) -> Path:
    """The file that says that FlexAttention is compiled for a case."""
    return Path(setting.scratch) / f"flex {case.name}"


def _pass(
    setting: Setting,
    step: str,
    case: Timed,
    tensors: Tensors,
    ways: dict[str, Attend],
    absent: dict[str, str],
    *,
    backward: bool,
) -> Row:
    tried = _attempt(setting, tensors, ways, backward=backward)
    direction = "backward" if backward else "forward"
    values: dict[str, Any] = {
        "direction": direction,
        "kind": case.kind,
        "head_dim": case.head_dim,
        "length": case.length,
        "unit": "TB/s" if case.kind == "decode" else "TFLOP/s",
        "amount": timed.amount(case, tensors, backward),
        "absent": {**absent, **tried.declined, **tried.failed},
        "samples_s": {},
    }
    status, note = _verdict(case, tensors, tried, backward)
    timed_calls = {
        name: call for name, call in tried.calls.items() if status == "ok" or name not in OURS
    }
    values["samples_s"] = setting.race(timed_calls, _BUDGET_S)
    return Row(step, f"{direction} {case.name}", status, note, values)


def _verdict(case: Timed, tensors: Tensors, tried: Tried, backward: bool) -> tuple[Status, str]:
    """Return whether ours ran at all, and was exact."""
    for name in OURS:
        if name in tried.failed:
            return "error", f"{name}: {tried.failed[name]}"
    for name in OURS:
        complaint = name in tried.calls and _complaint(case, tensors, tried.outs[name], backward)
        if complaint:
            return "wrong", f"{name}: {complaint}"
    if "ours" in tried.declined:
        return "unsupported", tried.declined["ours"]
    return "ok", ""


def _attempt(
    setting: Setting, tensors: Tensors, ways: dict[str, Attend], *, backward: bool
) -> Tried:
    """Call everybody once, forward or backward."""
    found = Tried({}, {}, {}, {}, {})
    for name, attend in ways.items():
        try:
            first = partial(_first, tensors, attend, name, backward, found)
            seconds = seconds_of(first, setting.timer)
        except Unsupported as error:
            found.declined[name] = in_short(error)
        except Exception as error:
            found.failed[name] = in_short(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        else:
            found.first_s[name] = seconds
    return found


def _first(tensors: Tensors, attend: Attend, name: str, backward: bool, found: Tried) -> None:
    """Make the call that will be timed, and call it once."""
    q, k, v, grad = tensors.q, tensors.k, tensors.v, tensors.grad
    if not backward:
        found.outs[name] = attend(q, k, v)
        found.calls[name] = lambda: attend(q, k, v)
        return
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    out = attend(*leaves)
    call = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
    found.outs[name] = call()
    found.calls[name] = call


def _complaint(case: Timed, tensors: Tensors, result: Any, backward: bool) -> str:
    """Return what is wrong with sampled rows of the output or the gradient of q; "" if nothing."""
    q, k, v, grad = tensors.q, tensors.k, tensors.v, tensors.grad
    found: Tensor = result[0] if backward else result
    if case.kind == "varlen":
        q, k, v, grad, found = (x.transpose(0, 1)[None] for x in (q, k, v, grad, found))
    rows = torch.linspace(0, q.shape[2] - 1, min(_ROWS, q.shape[2]), device=q.device).long()
    # One batch item and the last group of heads: rows of a query need nothing else.
    group = q.shape[1] // k.shape[1]
    q, grad, found = (x[-1:, -group:][:, :, rows] for x in (q, grad, found))
    k, v = (x[-1:, -1:] for x in (k, v))
    if case.kind == "fp8":
        lasts = zip(tensors.scales, (group, 1, 1), strict=True)
        scales = Scales(*[None if x is None else x[-last:] for x, last in lasts])
        plain, oracle = references(q, k, v, scales)
        return _words("output", judge(found, plain.out, oracle.out))
    part = tensors._replace(slopes=tensors.slopes[-group:])
    attend = timed.plain(case, part, rows)

    def compute(dtype: torch.dtype) -> Tensor:
        own, keys, values = (x.detach().to(dtype) for x in (q, k, v))
        out = attend(own.requires_grad_(backward), keys, values)
        return torch.autograd.grad(out, own, grad.to(dtype))[0] if backward else out

    what = "gradient of q" if backward else "output"
    return _words(what, judge(found, compute(q.dtype), compute(torch.float64)))


def _words(what: str, verdict: Verdict) -> str:
    """Return the complaint of a verdict; "" if it passes."""
    if verdict.passes:
        return ""
    return f"{what}: {verdict.complaint or f'error {verdict.ratio:.2f} times what is allowed'}"
