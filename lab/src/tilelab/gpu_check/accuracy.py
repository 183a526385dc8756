"""Accuracy: every feature against float64 on the device, by the 2x rule, and the bits repeated.

The step ``long`` holds whole long problems to the rule: one head of 16k by 16k; and operands past
2^31 elements.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

import tilewise
from tilelab.cases.case import Case
from tilelab.cases.dense import dense
from tilelab.cases.inputs import build
from tilelab.cases.table import find, rows
from tilelab.common.exactness import judge
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import (
    PAGE_SIZES,
    Outcome,
    Setting,
    attend,
    attend_pages,
    few_queries,
    quantised,
    refer,
    references,
    sized,
)
from tilewise import masks
from tilewise.inspect.calls import keep_mask, lowered
from tilewise.variants.float8 import Scales

STEP: Literal["accuracy"] = "accuracy"
_EIGHT_BITS_OF = ("full D64", "full D128", "causal D128", "causal D256", "grouped 8:2", "one row")
_LONG: Literal["long"] = "long"
_HUGE = "past 2^31 elements"
_HUGE_HEADS, _HUGE_LENGTH, _HUGE_WIDTH = 16, 128, 128
_SEEDS = (0, 2**32, -1, 0x1234_5678_9ABC_DEF0)


def jobs(setting: Setting) -> list[str]:
    """The half type for all problems, other dtypes for some, and what is no such problem."""
    main = str(setting.dtype).removeprefix("torch.")
    others = [name for name in ("float16", "float32") if name != main]
    cases = rows(STEP)
    found = [f"{main} {case.name}" for case in cases]
    found[8:8] = _OTHER
    return found + [f"{each} {case.name}" for each in others for case in cases if case.every_dtype]


def run(setting: Setting, job: str) -> Iterator[Row]:
    """The rows of a job."""
    case = case_of(setting, job)
    return _OTHER[job](setting, job) if case is None else check(setting, STEP, job, case)


def case_of(setting: Setting, job: str) -> Case | None:
    """Return the problem of a job, "bfloat16 causal D64"; None of what is no problem."""
    if job in _OTHER:
        return None
    dtype, _, name = job.partition(" ")
    return sized(setting, find(STEP, name)).of(getattr(torch, dtype))


NARROW = "narrow"
_SHORT = 64  # rows and keys


def job_of(setting: Setting, row: str) -> str:
    """Return the job of a row: the longest that its name begins with; "" if there is none."""
    every = jobs(setting)
    found = [job for job in every if row == job or row.startswith((f"{job} ", f"{job},"))]
    return max(found, key=len, default="")


def every_narrowed(setting: Setting) -> list[str]:
    """Return all jobs of ``narrow``."""
    return [less for job in jobs(setting) for less in narrowed(setting, job)]


def narrowed(setting: Setting, job: str) -> list[str]:
    """Return a job of ``accuracy`` as jobs with one thing less each, "bfloat16 alibi, no score".

    A call that does not end takes its process with it: what is whole comes first, and alone.
    """
    case = case_of(setting, job)
    return [job] if case is None else [f"{job}, {less}" for less in _less(case)]


def narrow(setting: Setting, name: str) -> Iterator[Row]:
    """Do a job of ``narrowed``: what is it that makes a result wrong?"""
    job, _, less = name.rpartition(", ")
    case = case_of(setting, job) if job else None
    if case is None:
        yield from (replace(row, step=NARROW) for row in run(setting, name))
    else:
        yield from check(setting, NARROW, name, _less(case)[less])


def _less(case: Case) -> dict[str, Case]:
    """Return a case, and as it is with one thing less, by what that is."""
    changes: dict[str, dict[str, Any]] = {
        "all": {},
        "no mask": {"mask": ()},
        "no score": {"score": ()},
        "no dropout": {"dropout_p": 0.0},
        "no sinks": {"sinks": False},
        "a key head for each head": {"kv_heads": case.heads},
        "width 64": {"head_dim": 64, "value_dim": 64},
        "few rows and keys": {"sequences": None, "batch": 1, "queries": _SHORT, "keys": _SHORT},
    }
    found = {name: replace(case, **each) for name, each in changes.items()}
    return {name: less for name, less in found.items() if name == "all" or less != case}


def check(setting: Setting, step: str, name: str, case: Case) -> Iterator[Row]:
    """Hold a sized problem to the rule, done twice: a row of out and lse, one of the gradients."""
    inputs = build(case, device=setting.device)
    plain, oracle = refer(inputs, case.dtype), refer(inputs, torch.float64)
    for backward in (False, True):
        actual, again = (attend(setting, inputs, backward=backward) for _ in range(2))
        what = f"{name}, gradients" if backward else name
        yield judged(step, what, actual, plain, oracle, differing(actual, again))


def judged(
    step: str, name: str, actual: Outcome, plain: Outcome, oracle: Outcome, unequal: str = ""
) -> Row:
    """The row of outputs that are held to the rule, and of bits that were not the same twice."""
    verdicts = {key: judge(values, plain[key], oracle[key]) for key, values in actual.items()}
    wrong = [fault for key, verdict in verdicts.items() if (fault := verdict.fault(key))]
    if unequal:
        wrong.append(f"{unequal} differs when it is done again")
    ratios = {key: verdict.ratio for key, verdict in verdicts.items()}
    errors = {key: verdict.error for key, verdict in verdicts.items()}
    values = {"ratios": ratios, "errors": errors, "same_bits": not unequal}
    return Row(step, name, "wrong" if wrong else "ok", "; ".join(wrong), values)


def differing(first: Outcome, second: Outcome) -> str:
    """The first output whose bits are not the same in both; "" if all are."""
    for name, values in first.items():
        other = second[name]
        if not bool(((values == other) | (values.isnan() & other.isnan())).all()):
            return name
    return ""


def _vocabulary(setting: Setting, job: str) -> Iterator[Row]:
    """Hold ``linear_cross_entropy`` to the rule, with and without options and float32 weights.

    In the self-test the core does it: the call takes tensors of a CPU to nothing else.
    """
    torch.manual_seed(0)
    shrink = setting.sizes.shrink
    with setting.device:
        hidden = torch.randn(-(-4500 // shrink), 256)
        weight = torch.randn(-(-32_773 // shrink), 256) / 4
        targets = torch.randint(len(weight), (len(hidden),))
    targets[::5] = -100
    options: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-4, "softcap": 15.0}

    def outcome(x: Tensor, w: Tensor, given: dict[str, Any], ours: bool) -> Outcome:
        x, w = (each.detach().requires_grad_() for each in (x, w))
        call = tilewise.linear_cross_entropy if ours else _loss_of_logits
        loss = call(x, w, targets, **given)
        of_hidden, of_weight = torch.autograd.grad(loss, (x, w))
        return {"loss": loss.detach(), "grad of hidden": of_hidden, "grad of weight": of_weight}

    for dtype, of_weight, given in (
        (setting.dtype, setting.dtype, {}),
        (setting.dtype, torch.float32, options),
        (torch.float32, torch.float32, options),
    ):
        x, w = hidden.to(dtype), weight.to(dtype)
        plain = outcome(x, w, given, False)
        oracle = outcome(x.double(), w.double(), given, False)
        actual, again = (outcome(x, w.to(of_weight), given, True) for _ in range(2))
        words = [str(each).removeprefix("torch.") for each in (dtype, of_weight)]
        name = f"{job} {' x '.join(words)}{', options' if given else ''}"
        yield judged(STEP, name, actual, plain, oracle, differing(actual, again))


def _loss_of_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float = math.inf,
) -> Tensor:
    """Return the formula of ``linear_cross_entropy`` over all logits, in float32 or float64."""
    logits = functional.linear(hidden, weight)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if softcap < math.inf:
        logits = softcap * torch.tanh(logits / softcap)
    loss = functional.cross_entropy(logits, targets, label_smoothing=label_smoothing)
    return loss + z_loss * logits.logsumexp(1)[targets >= 0].square().mean()


def _dropout_bits(setting: Setting, job: str) -> Iterator[Row]:
    """Check dropped pairs, forward and backward, read off uniform weights, against ``philox.py``.

    Queries and keys of 0 give every pair the same weight. The values and the incoming gradient are
    identity matrices. So out[m, n] and the gradient dv[n, m] are 0 where n is dropped.
    """
    shrink = setting.sizes.shrink
    batch, heads, size, width = 2, 3, -(-250 // shrink), -(-64 // shrink)
    with setting.device:
        q = torch.zeros(batch, heads, size, width, dtype=setting.dtype)
        v = torch.eye(size, dtype=setting.dtype).repeat(batch, heads, 1, 1)
    for backward in (False, True):
        wrong = []
        for seed, p in itertools.product(_SEEDS, (0.1, 0.5)):
            values = v.clone().requires_grad_()
            found = tilewise.attention(
                q, q, values, dropout_p=p, seed=seed, backend=setting.backend
            )
            if backward:
                found = torch.autograd.grad(found, values, v)[0].mT
            ranges = {"batches": batch, "heads": heads, "queries": size, "keys": size}
            kept = keep_mask(seed, p, **{name: range(n) for name, n in ranges.items()})
            unequal = int(((found > 0) != kept.to(setting.device)).sum())
            if unequal:
                wrong.append(f"{unequal} with seed {seed}, p {p}")
        note = f"bits that differ: {'; '.join(wrong)}" if wrong else ""
        name = f"{job}, gradients" if backward else job
        checked = batch * heads * size**2 * 2 * len(_SEEDS)
        yield Row(STEP, name, "wrong" if wrong else "ok", note, {"pairs": checked})


def _statistics(setting: Setting, job: str) -> Iterator[Row]:
    """max_logit, entropy and the top key of each row.

    Where scores are equal but for rounding, another top key is as good: its score counts.
    """
    case = sized(setting, find(STEP, "full D64"))
    inputs = build(case.of(setting.dtype), device=setting.device)
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    stats = tilewise.attention(q, k, v, return_stats="top1", backend=setting.backend).stats

    def plain(dtype: torch.dtype) -> dict[str, Tensor]:
        s = (q.to(dtype) @ k.to(dtype).mT) * case.head_dim**-0.5
        p, top = s.softmax(-1), s.max(-1).values
        entropy = -(p * s.log_softmax(-1)).sum(-1)
        return {"max_logit": top, "entropy": entropy, "score of top1": top}

    scores = (q.double() @ k.double().mT) * case.head_dim**-0.5
    chosen = scores.gather(-1, stats.top1[..., None])[..., 0].to(stats.max_logit.dtype)
    actual = {"max_logit": stats.max_logit, "entropy": stats.entropy, "score of top1": chosen}
    yield judged(STEP, job, actual, plain(setting.dtype), plain(torch.float64))


def _in_pages(setting: Setting, job: str) -> Iterator[Row]:
    """Keys in pages, of packed queries and of few; in another order they must give the bits."""
    for packed, problem in ((True, find(STEP, "varlen")), (False, few_queries())):
        case = sized(setting, problem)
        inputs = build(case.of(setting.dtype), device=setting.device)
        plain, oracle = (refer(inputs, dtype) for dtype in (setting.dtype, torch.float64))
        for size in PAGE_SIZES:
            actual, again = (
                attend_pages(setting, inputs, size, packed=packed, seed=seed) for seed in (1, 5)
            )
            what = f"{job} of {size}, {case.name}"
            yield judged(STEP, what, actual, plain, oracle, differing(actual, again))


def _eight_bits(setting: Setting, job: str) -> Iterator[Row]:
    """Check the forward pass in float8 e4m3 with a scale per head.

    The error of lse is reported but not judged. Matrix units that add float8 with few bits, as
    those of sm_89 and sm_90 do, have no float32 result that the plain implementation could give.
    """
    for name in _EIGHT_BITS_OF:
        case = sized(setting, find(STEP, name))
        inputs = build(case, device=setting.device)
        pairs = [quantised(x) for x in (inputs.q, inputs.k, inputs.v)]
        (q, k, v), scales = (x for x, _ in pairs), Scales(*[scale for _, scale in pairs])
        keywords: dict[str, Any] = {"mask": inputs.mask, "backend": setting.backend}
        keywords |= {"q_scale": scales.q, "k_scale": scales.k, "v_scale": scales.v}
        keywords["return_lse"] = True
        found, again = (tilewise.attention(q, k, v, **keywords) for _ in range(2))
        plain, oracle = references(q, k, v, scales, inputs.mask)
        unequal = differing(*({"out": each.out, "lse": each.lse} for each in (found, again)))
        own, plains, oracles = ({"out": each.out} for each in (found, plain, oracle))
        row = judged(STEP, f"{job} {name}", own, plains, oracles, unequal)
        row.values["errors"]["lse"] = judge(found.lse, plain.lse, oracle.lse).error
        yield row


# The jobs that are no such problem.
_OTHER: dict[str, Callable[[Setting, str], Iterator[Row]]] = {
    "dropout bits": _dropout_bits,
    "statistics": _statistics,
    "fp8": _eight_bits,
    "pages": _in_pages,
    "vocabulary": _vocabulary,
}


def long_jobs(setting: Setting) -> list[str]:
    """Return the names of whole long problems, and of the one of so many elements."""
    found = [case.name for case in rows(_LONG)]
    return [*found[:2], _HUGE, *found[2:]]


def run_long(setting: Setting, job: str) -> Iterator[Row]:
    """One row."""
    if job == _HUGE:
        yield _huge(setting)
    else:
        yield from check(setting, _LONG, job, long_case(setting, job))


def long_case(setting: Setting, name: str) -> Case:
    """Return a whole long problem of one head: the reference has a dozen matrices of 2 GB."""
    length, width = setting.sizes.long, setting.sizes.long_width
    sizes: dict[str, Any] = {"batch": 1, "heads": 1, "kv_heads": 1}
    sizes |= {"queries": length, "keys": length, "head_dim": width, "value_dim": width}
    return replace(find(_LONG, name), dtype=setting.dtype, **sizes)


def _huge(setting: Setting) -> Row:
    """Causal attention over so many batch items that offsets need 64 bits: the first and last."""
    shrink = setting.sizes.shrink
    size = (setting.sizes.huge, _HUGE_HEADS, _HUGE_LENGTH // shrink, _HUGE_WIDTH // shrink)
    generator = torch.Generator(setting.device).manual_seed(3)
    q, k, v, grad = (
        torch.empty(size, dtype=setting.dtype, device=setting.device).normal_(generator=generator)
        for _ in range(4)
    )
    leaves = tuple(x.requires_grad_() for x in (q, k, v))
    out = tilewise.attention(q, k, v, mask=masks.causal(), backend=setting.backend)
    grads = torch.autograd.grad(out, leaves, grad)
    names = ("out", "grad of q", "grad of k", "grad of v")
    actual: Outcome = {}
    both: tuple[Outcome, Outcome] = {}, {}
    for place in (0, size[0] - 1):
        part, keys = slice(place, place + 1), [f"{name}, item {place}" for name in names]
        actual |= {key: x[part].detach() for key, x in zip(keys, (out, *grads), strict=True)}
        for reference, dtype in zip(both, (setting.dtype, torch.float64), strict=True):
            a, b, c = (x[part].detach().to(dtype).requires_grad_() for x in (q, k, v))
            result = dense(*lowered(a, b, c, mask=masks.causal()), dtype=dtype).out
            back = torch.autograd.grad(result, (a, b, c), grad[part].to(dtype))
            reference.update(zip(keys, (result.detach(), *back), strict=True))
    return judged(_LONG, _HUGE, actual, *both)
