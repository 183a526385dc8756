"""Speed: ours and the others in turn, forward and backward, each with its operations per second.

A case whose sampled rows are not exact is not timed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilelab.common.exactness import Verdict, judge
from tilelab.gpu_check import timed
from tilelab.gpu_check.clock import Call, interleave, once
from tilelab.gpu_check.derived import OURS
from tilelab.gpu_check.eight import references
from tilelab.gpu_check.goals import FLEX
from tilelab.gpu_check.peers import peers
from tilelab.gpu_check.row import Row, Status
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.timed import Attend, Given, Timed
from tilelab.gpu_check.worker import in_short
from tilewise.errors import Unsupported
from tilewise.variants.float8 import Scales

__all__ = ["attempt", "jobs", "marker", "measure", "run"]

STEP = "speed"
_BUDGET_S = 0.5  # of the rounds of one pass of one case
_ROWS = 48


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
    return measure(setting, STEP, job)


def measure(setting: Setting, step: str, job: str) -> Iterator[Row]:
    """The rows of a case, for a step."""
    case = timed.find(setting.sizes, job)
    things = timed.given(setting, case)
    ways = {**timed.ours(setting, case, things), **peers(setting, case, things)}
    absent: dict[str, str] = {}
    ready = setting.self_test or not setting.scratch or marker(setting, case).exists()
    if not ready and ways.pop(FLEX, None) is not None:
        absent[FLEX] = "its compilation did not end in time"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others, about themselves
        yield _pass(setting, step, case, things, ways, absent, backward=False)
        ways.pop(timed.POINTERS, None)  # of the forward pass alone
        if case.has_backward:
            yield _pass(setting, step, case, things, ways, absent, backward=True)


def marker(setting: Setting, case: Timed) -> Path:
    """The file that says that FlexAttention is compiled for a case."""
    return Path(setting.scratch) / f"flex {case.name}"


def _pass(
    setting: Setting,
    step: str,
    case: Timed,
    things: Given,
    ways: dict[str, Attend],
    absent: dict[str, str],
    *,
    backward: bool,
) -> Row:
    tried = attempt(setting, things, ways, backward=backward)
    direction = "backward" if backward else "forward"
    values: dict[str, Any] = {
        "direction": direction,
        "kind": case.kind,
        "head_dim": case.head_dim,
        "length": case.length,
        "unit": "TB/s" if case.kind == "decode" else "TFLOP/s",
        "amount": timed.amount(case, things, backward),
        "absent": {**absent, **tried.declined, **tried.failed},
        "samples_s": {},
    }
    status, note = _verdict(case, things, tried, backward)
    timed_calls = {
        name: call for name, call in tried.calls.items() if status == "ok" or name not in OURS
    }
    values["samples_s"] = interleave(setting, timed_calls, _BUDGET_S)
    return Row(step, f"{direction} {case.name}", status, note, values)


def _verdict(case: Timed, things: Given, tried: Tried, backward: bool) -> tuple[Status, str]:
    """Return whether ours ran at all, and was exact."""
    for name in OURS:
        if name in tried.failed:
            return "error", f"{name}: {tried.failed[name]}"
    for name in OURS:
        complaint = name in tried.calls and _complaint(case, things, tried.outs[name], backward)
        if complaint:
            return "wrong", f"{name}: {complaint}"
    if "ours" in tried.declined:
        return "unsupported", tried.declined["ours"]
    return "ok", ""


def attempt(setting: Setting, things: Given, ways: dict[str, Attend], *, backward: bool) -> Tried:
    """Call everybody once, forward or backward."""
    found = Tried({}, {}, {}, {}, {})
    for name, attend in ways.items():
        try:
            first = partial(_first, things, attend, name, backward, found)
            seconds = once(setting, first)
        except Unsupported as error:
            found.declined[name] = in_short(error)
        except Exception as error:
            found.failed[name] = in_short(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()
        else:
            found.first_s[name] = seconds
    return found


def _first(things: Given, attend: Attend, name: str, backward: bool, found: Tried) -> None:
    """Make the call that will be timed, and call it once."""
    q, k, v, grad = things.q, things.k, things.v, things.grad
    if not backward:
        found.outs[name] = attend(q, k, v)
        found.calls[name] = lambda: attend(q, k, v)
        return
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    out = attend(*leaves)
    call = partial(torch.autograd.grad, out, leaves, grad, retain_graph=True)
    found.outs[name] = call()
    found.calls[name] = call


def _complaint(case: Timed, things: Given, result: Any, backward: bool) -> str:
    """Return what is wrong with sampled rows of the output or the gradient of q; "" if nothing."""
    q, k, v, grad = things.q, things.k, things.v, things.grad
    found: Tensor = result[0] if backward else result
    if case.kind == "varlen":
        q, k, v, grad, found = (x.transpose(0, 1)[None] for x in (q, k, v, grad, found))
    rows = torch.linspace(0, q.shape[2] - 1, min(_ROWS, q.shape[2]), device=q.device).long()
    # One batch item and the last group of heads: rows of a query need nothing else.
    group = q.shape[1] // k.shape[1]
    q, grad, found = (x[-1:, -group:][:, :, rows] for x in (q, grad, found))
    k, v = (x[-1:, -1:] for x in (k, v))
    if case.kind == "fp8":
        lasts = zip(things.scales, (group, 1, 1), strict=True)
        scales = Scales(*[None if x is None else x[-last:] for x, last in lasts])
        plain, oracle = references(q, k, v, scales)
        return _words("output", judge(found, plain.out, oracle.out))
    part = things._replace(slopes=things.slopes[-group:])
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
