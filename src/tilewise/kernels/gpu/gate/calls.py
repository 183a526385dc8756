"""Calls that are never run: problems and operands on the ``meta`` device, as the engine makes them.

They are of training size, so that Triton sees the divisible strides of a real call, and laid out
as models have them: [B, S, H, D] in memory. Importing this module imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.problem import (
    Grads,
    Needs,
    Operands,
    Problem,
    Result,
    dense_problem,
    lower_sinks,
    output_like,
    varlen_problem,
)
from tilewise.variants import masks, scores
from tilewise.variants.extent import Extent
from tilewise.variants.lower import lower_mask, lower_score
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, Score, as_score

__all__ = ["Asked", "backward_tensors", "meta", "operands_of", "result_of"]

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 16, 8, 4096, 4096
BLOCK = 128  # the sides of a rectangle of a table of tiles


class Asked(NamedTuple):
    """What a case asks for.

    Args:
        width: of queries, keys and values.
        dtype: of all of them.
        mask: "", "causal", "window", "document" (causal too), or "table", which is "document" with
            a table of tiles.
        score: "", "alibi softcap", "bias", or "learned": a factor, a table by distance and a table
            in which every pair looks up its place, all of which want gradients.
        dropout_p, sinks, varlen: as in a call.
        statistics: "", "all" or "top1".
    """

    width: int
    dtype: torch.dtype = torch.bfloat16
    mask: str = ""
    score: str = ""
    dropout_p: float = 0.0
    sinks: bool = False
    varlen: bool = False
    statistics: str = ""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def operands_of(asked: Asked) -> tuple[Problem, Operands]:
    """The problem, and operands in kernel form."""
    mask, score = _mask(asked.mask), _score(asked.score, asked.dtype)
    sinks = meta(HEADS) if asked.sinks else None
    q, k, v = (_rows(asked, heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    cu_seqlens = meta(BATCH + 1, dtype=torch.int64)
    said: dict[str, Any] = {"scale": None, "dropout_p": asked.dropout_p, "sinks": sinks}
    said |= {"mask": mask.program, "score": score.program}
    if asked.varlen:
        problem = varlen_problem(q, k, v, cu_seqlens, cu_seqlens, **said)
    else:
        problem = dense_problem(q, k, v, **said)
    extent = Extent(BATCH, HEADS, QUERIES, KEYS, ragged=asked.varlen, check_values=False)
    operands = Operands(
        q,
        k,
        v,
        lower_mask(problem.mask, mask.captured, extent, q.device, q.dtype),
        lower_score(problem.score, score.captured, extent, q.dtype, q.device),
        lower_sinks(sinks, q.dtype),
        cu_seqlens if asked.varlen else None,
        cu_seqlens if asked.varlen else None,
        2**63 + 1 if asked.dropout_p else 0,
    )
    return problem, operands


def result_of(asked: Asked, problem: Problem, operands: Operands) -> Result:
    """Memory for what the forward pass gives."""
    rows = (HEADS, problem.queries) if asked.varlen else (BATCH, HEADS, problem.queries)
    more = bool(asked.statistics)
    return Result(
        output_like(operands.q, problem.value_dim),
        meta(*rows),
        meta(2 + more, *rows),
        meta(*rows) if more else None,
        meta(*rows) if more else None,
        meta(*rows, dtype=torch.int64) if asked.statistics == "top1" else None,
    )


def backward_tensors(problem: Problem, operands: Operands) -> tuple[Tensor, Needs, Grads]:
    """The gradient of the output, and all gradients of tensors wanted with memory for them."""
    fixed = any(instr.op == "alibi" for instr in problem.score)  # slopes have no gradient
    learned = tuple(
        tensor.dtype.is_floating_point and not fixed for tensor in operands.score_tensors
    )
    needs = Needs(True, True, True, learned, problem.sinks)
    grads = Grads(
        torch.empty_like(operands.q),
        torch.empty_like(operands.k),
        torch.empty_like(operands.v),
        tuple(
            torch.empty_like(tensor) if wanted else None
            for tensor, wanted in zip(operands.score_tensors, learned, strict=True)
        ),
        None if operands.sinks is None else torch.empty_like(operands.sinks),
    )
    return output_like(operands.q, problem.value_dim), needs, grads


def _rows(asked: Asked, heads: int) -> Tensor:
    if asked.varlen:
        return meta(BATCH * KEYS, heads, asked.width, dtype=asked.dtype)
    return meta(BATCH, KEYS, heads, asked.width, dtype=asked.dtype).transpose(1, 2)


def _mask(name: str) -> Mask:
    if name == "causal":
        return masks.causal()
    if name == "window":
        return masks.window(1023, 0)
    if name == "document":
        return masks.document(meta(BATCH, KEYS, dtype=torch.int64)) & masks.causal()
    if name == "table":
        plain = _mask("document")
        sides = (BLOCK, BLOCK, 0, 0, QUERIES, KEYS, 0)
        covers = meta(1, 1, QUERIES // BLOCK, KEYS // BLOCK, dtype=torch.uint8)
        table = Instr("tiles", sides, (len(plain.captured),))
        return Mask((*plain.program, table), (*plain.captured, covers))
    if name:
        raise KeyError(name)
    return Mask(())


def _score(name: str, dtype: torch.dtype) -> Score:
    if name == "alibi softcap":
        return as_score((scores.alibi(meta(HEADS)), scores.softcap(30.0)))
    if name == "bias":
        return scores.bias(meta(HEADS, QUERIES, KEYS, dtype=dtype))
    if name == "learned":
        return as_score(_learned_score())
    if name:
        raise KeyError(name)
    return Score(())


def _learned_score() -> Callable[..., Any]:
    factors, table = meta(HEADS), meta(HEADS, QUERIES + KEYS - 1)
    places, of_places = meta(QUERIES, KEYS, dtype=torch.int32), meta(4096, HEADS)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * factors[h] + table[h, m - n + KEYS - 1] + of_places[places[m, n], h]

    return score
