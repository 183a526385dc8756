"""Runs a case three ways: by the public API, by plain torch in its dtype, and by the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.contract import InexactError, assert_exact, assert_same_bits
from tests.extended import extended
from tilelab.cases.case import Case
from tilelab.cases.dense import dense
from tilelab.cases.inputs import Inputs, Sent, build, call, gradients, listed_mask, send
from tilewise.problem import Operands, Problem
from tilewise.validation import dense_problem, lower_sinks, varlen_problem
from tilewise.variants.lower import Extent, lower_mask, lower_score
from tilewise.variants.values import Mask, Score

__all__ = ["Sent", "call", "gradients", "send"]  # of the lab, as the tests take them


def asked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: tuple[Tensor, Tensor] | None = None,
    *,
    mask: Mask | None = None,
    score: Score | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    sinks: Tensor | None = None,
    seed: int = 0,
) -> tuple[Problem, Operands]:
    """The problem and the operands that a public call makes of its arguments.

    Without the engine's checks, which ``tilewise.inspect.calls.lowered`` makes too: tests give
    kernels scores whose indices lie outside of their tensors. ``starts`` are both cu_seqlens of a
    packed call.
    """
    mask = Mask(()) if mask is None else mask
    score = Score(()) if score is None else score
    keywords: dict[str, Any] = {
        "mask": mask.program,
        "score": score.program,
        "scale": scale,
        "dropout_p": dropout_p,
        "sinks": sinks,
    }
    if starts is None:
        problem = dense_problem(q, k, v, **keywords)
        extent = Extent(problem.batch, problem.heads, problem.queries, problem.keys)
    else:
        problem = varlen_problem(q, k, v, *starts, **keywords)
        rows, keys = (int(cu.diff().max()) if problem.batch else 0 for cu in starts)
        extent = Extent(problem.batch, problem.heads, rows, keys, ragged=True)
    mask_tensors = lower_mask(mask.program, mask.captured, extent, q.device, q.dtype)
    score_tensors = lower_score(score.program, score.captured, extent, q.dtype, q.device)
    cu_q, cu_k = (None, None) if starts is None else (cu.long() for cu in starts)
    sinks = lower_sinks(sinks, q.dtype)
    return problem, Operands(q, k, v, mask_tensors, score_tensors, sinks, cu_q, cu_k, seed)


FACTS = ("out", "lse", "max_logit", "entropy")  # and the top key, which ties leave open


class Outcome(NamedTuple):
    """What a case gives: tensors or extended arrays, the gradients by name; None: not asked for."""

    out: Any
    lse: Any
    grads: dict[str, Any]
    max_logit: Any = None
    entropy: Any = None
    top1: Any = None


class Reference(NamedTuple):
    """The plain implementation's outcome, the oracle's, and the gradients that were sent in."""

    plain: Outcome
    oracle: Outcome
    sent: Sent


def problem_of(inputs: Inputs) -> tuple[Problem, Operands]:
    """The Problem and Operands that a public call would make of inputs; key lists are a mask."""
    named = inputs._replace(mask=listed_mask(inputs))._asdict()
    tensors = [named.pop(name) for name in ("q", "k", "v", "cu_seqlens")]
    del named["keys"]
    return asked(*tensors, **named)


def outcome_of(result: Any, grads: dict[str, Any] | None = None) -> Outcome:
    """The outcome of a public call that returned the log-sum-exp, and statistics or not."""
    out, lse, stats = result
    rows = [] if stats is None else [stats.max_logit, stats.entropy.detach(), stats.top1]
    return Outcome(out.detach(), lse.detach(), grads or {}, *rows)


def attend(
    inputs: Inputs, backend: str | None, sent: Sent | None = None, *, statistics: Any = False
) -> Outcome:
    """The public API's outcome: gradients where some are sent, statistics as ``return_stats``."""
    result = call(inputs, backend, return_lse=True, return_stats=statistics)
    facts = [*result[:2], result.stats.entropy] if statistics else result[:2]
    return outcome_of(result, {} if sent is None else gradients(inputs, facts, sent))


def plain(inputs: Inputs, sent: Sent, dtype: torch.dtype) -> Outcome:
    """The outcome of the plain mathematics with every matrix in ``dtype``."""
    result = dense(*problem_of(inputs), dtype=dtype)
    assert result.entropy is not None
    facts = (result.out, result.lse, result.entropy)
    out, lse, entropy = (fact.detach() for fact in facts)
    return Outcome(out, lse, gradients(inputs, facts, sent), result.max_logit, entropy)


def oracle(inputs: Inputs, sent: Sent) -> Outcome:
    """The outcome in float64, or beyond it for float64 inputs."""
    if inputs.q.dtype != torch.float64:
        return plain(inputs.convert(lambda tensor: tensor.double()), sent, torch.float64)
    problem, operands = problem_of(inputs)
    result = extended(problem, operands, *sent)
    assert result.grads is not None
    grads = {"q": result.grads.q, "k": result.grads.k, "v": result.grads.v}
    leaves = inputs.leaves
    for slot in inputs.slots:
        name = f"captured {slot}"
        grads[name] = result.grads.score_tensors[slot].reshape(tuple(leaves[name].shape))
    if result.grads.sinks is not None:
        grads["sinks"] = result.grads.sinks
    return Outcome(result.out, result.lse, grads, result.max_logit, result.entropy)


def refer(inputs: Inputs, sent: Sent | None = None) -> Reference:
    """Both references of inputs, with random gradients of out and lse if none are given."""
    sent = send(inputs) if sent is None else sent
    return Reference(plain(inputs, sent, inputs.q.dtype), oracle(inputs, sent), sent)


@cache
def refer_cached(case: Case) -> tuple[Inputs, Reference]:
    """The inputs of a case and their references, kept (every instruction set asks for them)."""
    inputs = build(case)
    return inputs, refer(inputs)


def check(actual: Outcome, reference: Reference, name: str) -> None:
    """Assert the contract for every fact and every gradient of an outcome."""
    near, truth = reference.plain, reference.oracle
    for fact in FACTS:
        got = getattr(actual, fact)
        if got is not None:
            assert_exact(got, getattr(near, fact), getattr(truth, fact), f"{name}: {fact}")
    for leaf, grad in actual.grads.items():
        assert_exact(grad, near.grads[leaf], truth.grads[leaf], f"{name}: grad of {leaf}")


def assert_same(actual: Outcome, expected: Outcome, name: str = "") -> None:
    """Assert that two outcomes have the same bits."""
    for fact in (*FACTS, "top1"):
        got = getattr(actual, fact)
        if got is not None:
            assert_same_bits(got, getattr(expected, fact), f"{name}: {fact}")
    for leaf, grad in expected.grads.items():
        assert_same_bits(actual.grads[leaf], grad, f"{name}: grad of {leaf}")


def pool(outcomes: Sequence[Outcome]) -> Outcome:
    """Several outcomes of one shape as one, stacked along a new first dimension."""

    def stack(values: Sequence[Any]) -> Any:
        return torch.stack(list(values)) if isinstance(values[0], Tensor) else np.stack(values)

    facts = {
        name: None if each is None else stack([getattr(o, name) for o in outcomes])
        for name, each in outcomes[0]._asdict().items()
        if name != "grads"
    }
    grads = {name: stack([o.grads[name] for o in outcomes]) for name in outcomes[0].grads}
    return Outcome(grads=grads, **facts)


def check_pooled(case: Case, draws: range, run: Callable[[Inputs, Sent], Outcome]) -> None:
    """Assert the contract for several draws of a case as if they were one problem.

    The largest error of a handful of numbers says little about the one implementation or the
    other; a tiny problem needs more numbers before the two can be compared.
    """
    check_all([build(case, draw) for draw in draws], run, repr(case))


def check_all(
    inputs: Sequence[Inputs],
    run: Callable[[Inputs, Sent], Outcome],
    name: str,
    *,
    entropy: bool = False,
) -> Outcome:
    """Assert the contract for several inputs of one shape as one problem; what ``run`` gave."""
    references = [refer(each, send(each, entropy=entropy)) for each in inputs]
    actual = pool([run(each, its.sent) for each, its in zip(inputs, references, strict=True)])
    pooled = references[0]._replace(
        plain=pool([reference.plain for reference in references]),
        oracle=pool([reference.oracle for reference in references]),
    )
    check(actual, pooled, name)
    return actual


def check_drawn(case: Case, backend: str, most: int = 64) -> None:
    """Assert the contract for any problem, from as many draws as its size needs, up to ``most``."""
    leaves = build(case).leaves
    least = min(leaves[name].numel() for name in "qkv")
    draws = max(4, min(most, 2000 // (1 + least)))

    check_twice(case, draws, lambda inputs, sent: attend(inputs, backend, sent))


def check_twice(case: Case, draws: int, run: Callable[[Inputs, Sent], Outcome]) -> None:
    """Assert the contract for ``draws`` draws, or for four times as many new ones.

    Among thousands of maxima some pair of equally good ones differs by more than 2; plain torch's
    depends on the processor too. Luck does not survive four times as many new numbers, and a wrong
    kernel does not get better.
    """
    try:
        check_pooled(case, range(draws), run)
    except InexactError as inexact:
        if inexact.ratio > 2:
            raise
        check_pooled(case, range(draws, 5 * draws), run)


def check_case(case: Case, backend: str) -> None:
    """Build a case, run it on a backend, and assert the contract."""
    inputs, reference = refer_cached(case)
    check(attend(inputs, backend, reference.sent), reference, str(case))
