"""Calls that are never run: problems and operands on the ``meta`` device, as the engine makes them.

They are of training size, so Triton sees the divisible strides of a real call. Their layout is that
of models: [B, S, H, D] in memory. Importing this module imports no Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilelab.cases.case import Case
from tilelab.cases.inputs import build, problem_of
from tilelab.cases.variants import Draw
from tilewise import masks, scores
from tilewise.problem import Grads, Needs, Operands, Problem, output_like
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.values import Mask

_BATCH, _HEADS, _KV_HEADS, _LENGTH = 2, 16, 8, 4096


def call(
    name: str, width: int, dtype: torch.dtype = torch.bfloat16, *, varlen: bool = False, **more: Any
) -> Case:
    """Return a case of training size; float8 comes with scales.

    Args:
        name: of the case.
        width: of queries, keys and values.
        dtype: of all of them.
        varlen: whether the batch is packed sequences.
        more: other fields of the case. Fewer queries than keys are the last ones.
    """
    shape: dict[str, Any] = {
        "batch": _BATCH,
        "heads": _HEADS,
        "kv_heads": _KV_HEADS,
        "queries": _LENGTH,
        "keys": _LENGTH,
        "head_dim": width,
        "value_dim": width,
        "layout": "contiguous" if varlen else "bshd",
        "sequences": ((_LENGTH, _LENGTH),) * _BATCH if varlen else None,
    }
    return Case(name, dtype=dtype, **{**shape, **more})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def operands_of(case: Case) -> tuple[Problem, Operands]:
    """Return the problem, and operands in kernel form."""
    inputs = build(case, device="meta").detached()
    scales = {}
    if case.dtype is FLOAT8:
        heads = {"q_scale": case.heads, "k_scale": case.kv_heads, "v_scale": case.kv_heads}
        scales = {name: meta(case.batch, count) for name, count in heads.items()}
    problem, operands = problem_of(inputs, None, **scales)
    return _in_pages(case, problem, operands) if case.page_size else (problem, operands)


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


def _in_pages(case: Case, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
    """Return the same call with its keys and values in pages, their rows first in memory."""
    size, slots = case.page_size, case.keys // case.page_size
    k, v = (
        meta(case.batch * slots, size, case.kv_heads, width, dtype=case.dtype).transpose(1, 2)
        for width in (case.head_dim, case.value_dim)
    )
    operands = operands._replace(
        k=k,
        v=v,
        cu_seqlens_k=None,
        block_table=meta(case.batch, slots, dtype=torch.int32),
        key_lengths=meta(case.batch, dtype=torch.int32),
    )
    return problem._replace(page_size=size), operands


def few_documents(draw: Draw) -> Mask:
    """Return documents whose queries have ids of their own, not the first ones of the keys."""
    keys, queries = (draw.whole(0, 6, draw.batch, size) for size in (draw.keys, draw.queries))
    return masks.document(keys, queries)


def raw_score(draw: Draw) -> Any:
    """Return a score in Triton."""
    from tilelab.gate.kernels import weigh, weigh_slope

    scores.register_triton("gate_weigh", weigh, weigh_slope)
    return scores.raw("gate_weigh", meta(draw.heads))
