"""Calls that are never run: problems and operands on the ``meta`` device, as the engine makes them.

They are of training size, so Triton sees the divisible strides of a real call. Their layout is that
of models: [B, S, H, D] in memory. Importing this module imports no Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.inspect.calls import lowered
from tilewise.problem import Grads, Needs, Operands, Problem, Statistics, output_like
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask, Score, as_score

__all__ = ["Call", "backward_tensors", "meta", "operands_of"]

BATCH, HEADS, KV_HEADS, QUERIES, KEYS = 2, 16, 8, 4096, 4096
BLOCK = 128  # the sides of a rectangle of a table of tiles


class Call(NamedTuple):
    """The call that a case makes.

    Args:
        width: of queries, keys and values.
        dtype: of all of them; float8 comes with scales.
        mask: "", "causal", "window", "document" (causal too), or "table", which is "document" with
            a table of tiles.
        score: "", "alibi softcap", "bias" (of each pair), "head bias", "raw", "learned": a factor,
            a table by distance and one in which every pair looks up its place, all of which want
            gradients; or "few": the last of them with few places.
        dropout_p, sinks, varlen: as in a call.
        statistics: "", "rows" or "top1".
        queries: of each head; fewer than keys are the last ones.
        page_size: of the pages that keys and values lie in; 0: they do not.
    """

    width: int
    dtype: torch.dtype = torch.bfloat16
    mask: str = ""
    score: str = ""
    dropout_p: float = 0.0
    sinks: bool = False
    varlen: bool = False
    statistics: Statistics = ""
    queries: int = QUERIES
    page_size: int = 0


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def operands_of(call: Call) -> tuple[Problem, Operands]:
    """Return the problem, and operands in kernel form."""
    q = _rows(call, call.queries, HEADS)
    k, v = (_rows(call, KEYS, KV_HEADS) for _ in range(2))
    cu_seqlens = meta(BATCH + 1, dtype=torch.int64)
    problem, operands = lowered(
        q,
        k,
        v,
        *(cu_seqlens, cu_seqlens) * call.varlen,
        mask=_mask(call),
        score=_score(call),
        sinks=meta(HEADS) if call.sinks else None,
        dropout_p=call.dropout_p,
        q_scale=_scales(call, HEADS),
        k_scale=_scales(call, KV_HEADS),
        v_scale=_scales(call, KV_HEADS),
    )
    return _in_pages(call, problem, operands) if call.page_size else (problem, operands)


def backward_tensors(problem: Problem, operands: Operands) -> tuple[Tensor, Needs, Grads]:
    """Return the output's gradient, the wanted gradients (all of them), and memory for them."""
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


def _scales(call: Call, heads: int) -> Tensor | None:
    """Return the scales of float8; None for any other dtype."""
    return meta(BATCH, heads) if call.dtype is FLOAT8 else None


def _in_pages(call: Call, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return the same call with its keys and values in pages, their rows first in memory."""
    size, slots = call.page_size, KEYS // call.page_size
    k, v = (
        meta(BATCH * slots, size, KV_HEADS, call.width, dtype=call.dtype).transpose(1, 2)
        for _ in range(2)
    )
    operands = operands._replace(
        k=k,
        v=v,
        cu_seqlens_k=None,
        block_table=meta(BATCH, slots, dtype=torch.int32),
        key_lengths=meta(BATCH, dtype=torch.int32),
    )
    return problem._replace(keys=KEYS, page_size=size), operands


def _rows(call: Call, length: int, heads: int) -> Tensor:
    if call.varlen:
        return meta(BATCH * length, heads, call.width, dtype=call.dtype)
    return meta(BATCH, length, heads, call.width, dtype=call.dtype).transpose(1, 2)


def _mask(call: Call) -> Mask:
    name, queries = call.mask, call.queries
    if name == "causal":
        return masks.causal()
    if name == "window":
        return masks.window(1023, 0)
    if name == "document":
        of_queries, of_keys = (meta(BATCH, length, dtype=torch.int64) for length in (queries, KEYS))
        return masks.document(of_keys, of_queries) & masks.causal()
    if name == "table":
        plain = _mask(call._replace(mask="document"))
        sides = (BLOCK, BLOCK, 0, 0, queries, KEYS, 0)
        covers = meta(1, 1, -(-queries // BLOCK), KEYS // BLOCK, dtype=torch.uint8)
        table = Instr("tiles", sides, (len(plain.captured),))
        return Mask((*plain.program, table), (*plain.captured, covers))
    if name:
        raise KeyError(name)
    return Mask(())


def _score(call: Call) -> Score:
    if call.score == "alibi softcap":
        return as_score((scores.alibi(meta(HEADS)), scores.softcap(30.0)))
    if call.score == "bias":
        return scores.bias(meta(HEADS, call.queries, KEYS, dtype=call.dtype))
    if call.score == "head bias":
        return scores.bias(meta(HEADS, 1, 1, dtype=call.dtype))
    if call.score == "raw":
        from tilelab.gate.kernels import weigh, weigh_slope

        scores.register_triton("gate_weigh", weigh, weigh_slope)
        return scores.raw("gate_weigh", meta(HEADS))
    if call.score == "learned":
        return as_score(_learned_score())
    if call.score == "few":
        few, places = meta(64), meta(QUERIES, KEYS, dtype=torch.int32)
        return as_score(lambda s, b, h, m, n: s + few[places[m, n]])
    if call.score:
        raise KeyError(call.score)
    return Score(())


def _learned_score() -> Callable[..., Any]:
    factors, table = meta(HEADS), meta(HEADS, QUERIES + KEYS - 1)
    places, of_places = meta(QUERIES, KEYS, dtype=torch.int32), meta(4096, HEADS)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * factors[h] + table[h, m - n + KEYS - 1] + of_places[places[m, n], h]

    return score
