"""An explanation by shape alone, for this machine or for a chip that is not here."""

from __future__ import annotations

from typing import NamedTuple

import torch

import tilewise
from tilewise.chips import Chip
from tilewise.engine import dispatch
from tilewise.engine.explanation import described
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.kernels.gpu.config import LARGEST_WIDTH, WIDEST_KEYS
from tilewise.plan import Tiles
from tilewise.plan.traffic import Account, account
from tilewise.plan.traffic.report import lines
from tilewise.problem import Problem
from tilewise.validation import dense_problem
from tilewise.variants import masks, scores
from tilewise.variants.program import encode


class Question(NamedTuple):
    """The call to explain.

    Args:
        queries: B, Hq, M, D.
        keys: B, Hk, N, D.
        value_dim: Dv.
        mask, score: of the call.
        layers: of the model; 1 where none is named.
        notes: what is to be said of it, as (name, text) pairs.
    """

    queries: tuple[int, int, int, int]
    keys: tuple[int, int, int, int]
    value_dim: int
    dtype: torch.dtype
    mask: masks.Mask | None
    score: scores.Score | None
    layers: int
    notes: tuple[tuple[str, str], ...]


class Answer(NamedTuple):
    """What there is to say.

    Args:
        text: for people.
        problem: what was computed; None where nothing can do it.
        account: what it moves; None where nothing can do it.
        chip: whose ceilings count; None where they are not known.
    """

    text: str
    problem: Problem | None
    account: Account | None
    chip: Chip | None


def answer(question: Question, chip: Chip | None, dropout_p: float, backend: str | None) -> Answer:
    """Return the explanation of what is asked.

    Args:
        question: the problem.
        chip: a row; None for this machine.
        dropout_p: the probability of dropping.
        backend: asked for by name; None chooses.

    Raises:
        InvalidArgument: something of it makes no sense.
        Unsupported: the chip's kernels cannot do it.
    """
    if chip is not None and chip.kind == "gpu":
        return _elsewhere(question, chip, dropout_p, backend)
    # Nobody touches these, so the system gives them no memory, however large they are.
    q, k, v = _tensors(question, "cpu")
    found = tilewise.explain(
        q, k, v, mask=question.mask, score=question.score, dropout_p=dropout_p, backend=backend
    )
    if chip is not None:
        found = found._replace(chip=chip)
    problem = None if found.plan is None else found.plan.problem
    return Answer(str(found), problem, found.account, found.chip)


def _tensors(question: Question, device: str) -> list[torch.Tensor]:
    shapes = (question.queries, question.keys, (*question.keys[:3], question.value_dim))
    return [torch.empty(shape, dtype=question.dtype, device=device) for shape in shapes]


def _elsewhere(question: Question, chip: Chip, dropout_p: float, backend: str | None) -> Answer:
    """Return the GPU backend's tiles for the family of a GPU that need not be here."""
    if backend not in (None, "gpu"):
        raise InvalidArgument("backend", repr(backend), f"'gpu', or none, on {chip.name}")
    made = dense_problem(
        *_tensors(question, "meta"),
        mask=() if question.mask is None else question.mask.program,
        score=() if question.score is None else question.score.program,
        scale=None,
        dropout_p=dropout_p,
        sinks=None,
    )
    problem = made._replace(device="cuda")
    chosen = dispatch.load("gpu")
    _check(problem)
    loops = chosen.loops(problem, chip.family)
    found = account(problem, loops)
    texts = encode(problem.mask), encode(problem.score)
    splits = -(-problem.keys // loops.split_keys) if loops.split_keys else 1
    text = described(problem, "gpu", Tiles(*loops.forward, max(1, splits)), *texts)
    text += [f"{name:9} {line}" for name, line in lines(found, chip)]
    for name in dispatch.BACKEND_NAMES:
        if name != "gpu":
            reasons = dispatch.load(name).why_not(problem)
            reasons = reasons or ["it could, but 'gpu' comes first"]
            text += [f"not {name}:", *(f"  {reason}" for reason in reasons)]
    return Answer("\n".join(text), problem, found, chip)


def _check(problem: Problem) -> None:
    """The limits of the GPU backend that hold on every chip."""
    reasons = []
    if problem.dtype == torch.float64:
        reasons.append("it computes float32, bfloat16, float16; not torch.float64")
    for what, size, limit in (
        ("D", problem.head_dim, WIDEST_KEYS),
        ("Dv", problem.value_dim, LARGEST_WIDTH),
    ):
        if size > limit:
            reasons.append(f"{what} = {size} is over its limit of {limit}")
    if reasons:
        raise Unsupported("the kernels of this chip cannot do this attention", {"gpu": reasons})
