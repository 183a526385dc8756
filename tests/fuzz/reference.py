"""What a case should give: the plain formula in any dtype, and in more than float64.

The plain formula (``tests/plain.py``) is evaluated over the trees' own meaning in torch, so that it
shares nothing with the library but the random numbers of dropout. Problems in float64 are judged
by ``tests.extended`` (numpy's long double); the plain formula in float64 then says
whether that one was asked the right question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tests.extended import extended
from tests.fuzz.build import Call, differentiate, keywords, seen
from tests.fuzz.case import Case, Node
from tests.oracle import asked
from tests.plain import attend, attend_packed, joined
from tilewise import masks
from tilewise.variants.values import as_mask, as_score


def _where(condition: Any, x: Any, y: Any) -> Tensor:
    return torch.where(torch.as_tensor(condition), x, y)


def _pair(function: Any) -> Any:
    return lambda x, y: function(torch.as_tensor(x), torch.as_tensor(y))


def _at(tensor: Tensor, *places: Any) -> Tensor:
    """The element of a tensor that broadcasts to all these places."""
    kept = places[len(places) - tensor.dim() :]
    index = [p if n > 1 else p * 0 for p, n in zip(kept, tensor.shape, strict=True)]
    return tensor[tuple(index)] if index else tensor


_MEANING: dict[str, Any] = {
    "torch": torch,
    "where": _where,
    "minimum": _pair(torch.minimum),
    "maximum": _pair(torch.maximum),
    "at": _at,
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Python's floats, and quotients of integers, become this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Tensors(NamedTuple):
    """The tensors of a call in one dtype, its leaves new ones."""

    q: Tensor
    k: Tensor
    v: Tensor
    tables: list[Tensor]
    sinks: Tensor | None
    leaves: dict[str, Tensor]


def converted(call: Call, dtype: torch.dtype) -> Tensors:
    """The floats of a call in another dtype."""
    given = call.operands()
    found = {
        name: tensor.detach().to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in given.items()
    }
    leaves = {name: found[name].clone().requires_grad_() for name in call.leaves}
    found |= leaves
    tables = [found[f"t{i}"] for i in range(len(call.tables))]
    return Tensors(found["q"], found["k"], found["v"], tables, found.get("sinks"), leaves)


def _rows(case: Case, call: Call, tensors: Tensors) -> tuple[Sequence[Tensor], list[Tensor]]:
    """out, lse, max_logit, entropy of the public call, and the scores of each sequence or batch."""

    def meaning(node: Node, s: Any, b: Any, h: Any, m: Any, n: Any) -> Tensor:
        tables = {f"t{i}": table for i, table in enumerate(tensors.tables)}
        places = {"b": b, "h": h, "m": m, "n": n, "M": len(m), "N": len(n), "s": s}
        return torch.as_tensor(eval(node.meaning(), {**_MEANING, **tables, **places}))

    def score(s: Tensor, *places: Any) -> Tensor:
        for node in case.scores:
            s = meaning(node, s, *places).to(s.dtype).expand(s.shape)
        return s

    def mask(b: Any, h: Any, m: Any, n: Any) -> Tensor:
        found = torch.ones((), dtype=torch.bool)
        if case.mask is not None:
            found = meaning(case.mask, None, b, h, m, n)
        return found if call.lists is None else found & seen(case, call.lists)[b, h, m, n]

    q, k, v = tensors.q, tensors.k, tensors.v
    keywords: dict[str, Any] = {
        "scale": case.scale,
        "score": score,
        "mask": None if case.mask is None and call.lists is None else mask,
        "sinks": tensors.sinks,
        "dropout": (case.dropout_p, call.seed),
    }
    if call.starts is None:
        rows = attend(q, k, v, **keywords)
        return rows[:4], [rows.s.detach()]
    parts = attend_packed(q, k, v, call.starts, **keywords)
    return joined(parts, q, v), [part.s.detach() for part in parts]


class Outcome(NamedTuple):
    """Results by name, and the scores of each sequence (or of the batch)."""

    named: dict[str, Any]
    scores: list[Tensor]


def plain(case: Case, call: Call, dtype: torch.dtype) -> Outcome:
    """The plain formula with everything in ``dtype``, differentiated by autograd."""
    with default_dtype(dtype):
        tensors = converted(call, dtype)
        (out, lse, max_logit, entropy), scores = _rows(case, call, tensors)
        found: dict[str, Any] = {"out": out.detach(), "lse": lse.detach()}
        if case.stats:
            found |= {"max_logit": max_logit, "entropy": entropy.detach()}
        pairs = [(out, call.grad_out.to(dtype))]
        if case.lse_grad:
            pairs.append((lse, call.grad_lse.to(dtype)))
        if case.entropy_grad:
            pairs.append((entropy, call.grad_entropy.to(dtype)))
        return Outcome(found | differentiate(case, pairs, tensors.leaves), scores)


def wider(case: Case, call: Call) -> Outcome:
    """A float64 case in long double."""
    leaves = {
        name: leaf.detach().clone().requires_grad_()
        for name, leaf in call.leaves.items()
        if name.startswith("t")
    }
    given = call.operands() | leaves
    tables = [given[f"t{i}"] for i in range(len(call.tables))]
    said = keywords(case, replace(call, tables=tables))
    if call.lists is not None:
        listed = masks.dense(seen(case, call.lists))
        said["mask"] = as_mask(said["mask"]) & listed if "mask" in said else listed
    problem, operands = asked(
        call.q,
        call.k,
        call.v,
        call.starts,
        mask=as_mask(said["mask"]) if "mask" in said else None,
        score=as_score(said["score"]) if "score" in said else None,
        scale=case.scale,
        dropout_p=case.dropout_p,
        sinks=call.sinks,
        seed=call.seed,
    )
    differentiated = case.differentiated
    result = extended(
        problem,
        operands,
        call.grad_out if differentiated else None,
        call.grad_lse if case.lse_grad else None,
        call.grad_entropy if case.entropy_grad else None,
    )
    found: dict[str, Any] = {"out": result.out, "lse": result.lse}
    if case.stats:
        found |= {"max_logit": result.max_logit, "entropy": result.entropy}
    if result.grads is not None:
        for name in "qkv":
            found[f"grad of {name}"] = getattr(result.grads, name)
        found["grad of sinks"] = result.grads.sinks
        _of_tables(found, leaves, operands.score_tensors, result.grads.score_tensors)
    return Outcome(found, [])


def _of_tables(
    found: dict[str, Any], leaves: dict[str, Tensor], lowered: Any, grads: tuple[Any, ...]
) -> None:
    """Through the lowering, which moves numbers and at most adds a few of them."""
    used = [
        (tensor, torch.from_numpy(np.asarray(grad, dtype=np.float64)).reshape(tensor.shape))
        for tensor, grad in zip(lowered, grads, strict=True)
        if tensor.requires_grad
    ]
    names = list(leaves)
    back: Any = [None] * len(names)
    if used and names:
        back = torch.autograd.grad(
            [tensor for tensor, _ in used],
            [leaves[name] for name in names],
            [grad for _, grad in used],
            allow_unused=True,
        )
    for name, grad in zip(names, back, strict=True):
        found[f"grad of {name}"] = torch.zeros_like(leaves[name]) if grad is None else grad
