"""The cases: what the passes launch for the calls that matter, in the tiles that ship.

Calls are never run: problems and operands are on the ``meta`` device, as the engine makes them.
They are of training size, so Triton sees the divisible strides of a real call. Their layout is that
of models: [B, S, H, D] in memory. Importing this module imports no Triton; making a case's launches
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilelab.cases.case import Case as Attention
from tilelab.cases.inputs import build, problem_of
from tilelab.cases.variants import Draw
from tilelab.gate.record import Case
from tilewise import masks, scores
from tilewise.inspect import gpu
from tilewise.inspect.gpu import FAMILIES, Launch, Overrides, holds
from tilewise.problem import Grads, Needs, Operands, Problem, output_like
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.values import Mask

_BATCH, _HEADS, _KV_HEADS, _LENGTH = 2, 16, 8, 4096


def call(
    name: str, width: int, dtype: torch.dtype = torch.bfloat16, *, varlen: bool = False, **more: Any
) -> Attention:
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
    return Attention(name, dtype=dtype, **{**shape, **more})


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def operands_of(case: Attention) -> tuple[Problem, Operands]:
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


def _in_pages(case: Attention, problem: Problem, operands: Operands) -> tuple[Problem, Operands]:
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
    from tilelab.gate.compiling import weigh, weigh_slope

    scores.register_triton("gate_weigh", weigh, weigh_slope)
    return scores.raw("gate_weigh", meta(draw.heads))


def forward(case: Attention, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the launches of the forward pass on a family of chips.

    Args:
        case: the call; few queries are decoded.
        family: a name of ``gpu.FAMILIES``.
        overrides: blocks in the place of the family's own.
    """
    problem, operands = operands_of(case)
    result = gpu.empty_result(problem, operands.q, case.statistics)
    return gpu.forward_launches(problem, operands, result, family, overrides)


def backward(case: Attention, family: str, overrides: Overrides = ()) -> Sequence[Launch]:
    """Return the backward pass's launches, with every gradient; arguments as for ``forward``."""
    problem, operands = operands_of(case)
    result = gpu.empty_result(problem, operands.q, case.statistics)
    grad_out, needs, grads = backward_tensors(problem, operands)
    sent = grad_out, None
    return gpu.backward_launches(problem, operands, result, sent, needs, grads, family, overrides)


def captured(case: Attention, family: str) -> Sequence[Launch]:
    """Return the launches of ``backward`` that make gradients of what the score captured."""
    launches = backward(case, family)
    names = [launch.kernel.__name__ for launch in launches]
    return launches[names.index("query_kernel") + 1 :]


_HALF, _SINGLE = torch.float16, torch.float32
_CAUSAL, _DOCUMENTS = ("causal",), ("document_each", "causal", "and")
_CAPPED = ("alibi", "softcap")
_FLOAT8 = (
    call("D64 full fp8", 64, FLOAT8),
    call("D64 causal fp8", 64, FLOAT8, mask=_CAUSAL),
    call("D128 full fp8", 128, FLOAT8),
    call("D128 causal fp8", 128, FLOAT8, mask=_CAUSAL),
    call("D256 full fp8", 256, FLOAT8),
    call("D256 causal fp8", 256, FLOAT8, mask=_CAUSAL),
)
_KEY = ("D128 causal", "D64 causal", "D128 alibi softcap causal")
# Every row of the table of blocks at every width: plain, heavy and scattered, 16 bits and float32.
_CALLS = (
    call("D64 full", 64),
    call("D64 causal", 64, mask=_CAUSAL),
    call("D128 full", 128),
    call("D128 causal", 128, mask=_CAUSAL),
    call("D256 full", 256),
    call("D256 causal", 256, mask=_CAUSAL),
    call("D512 causal", 512, mask=_CAUSAL),
    call("D64 causal fp16", 64, _HALF, mask=_CAUSAL),
    call("D128 causal fp16", 128, _HALF, mask=_CAUSAL),
    call("D64 causal fp32", 64, _SINGLE, mask=_CAUSAL),
    call("D128 causal fp32", 128, _SINGLE, mask=_CAUSAL),
    call("D256 causal fp32", 256, _SINGLE, mask=_CAUSAL),
    call("D512 causal fp32", 512, _SINGLE, mask=_CAUSAL),
    call("D64 alibi softcap causal fp32", 64, _SINGLE, mask=_CAUSAL, score=_CAPPED),
    call("D128 alibi softcap causal fp32", 128, _SINGLE, mask=_CAUSAL, score=_CAPPED),
    call("D80 causal", 80, mask=_CAUSAL),
    call("D128 window", 128, mask=("window_1k",)),
    call("D64 document", 64, mask=_DOCUMENTS),
    call("D128 document", 128, mask=_DOCUMENTS),
    call("D256 document", 256, mask=_DOCUMENTS),
    call("D128 table", 128, mask=(*_DOCUMENTS, "tiles")),
    call("D128 alibi softcap causal", 128, mask=_CAUSAL, score=_CAPPED),
    call("D256 alibi softcap causal", 256, mask=_CAUSAL, score=_CAPPED),
    call("D512 alibi softcap causal", 512, mask=_CAUSAL, score=_CAPPED),
    call("D64 bias", 64, score=("bias_heads",)),
    call("D128 bias", 128, score=("bias_heads",)),
    call("D128 raw causal", 128, mask=_CAUSAL, score=(raw_score,)),
    call("D64 head bias", 64, score=("bias_of_heads",)),
    call("D128 head bias", 128, score=("bias_of_heads",)),
    call("D64 head bias fp32", 64, _SINGLE, score=("bias_of_heads",)),
    call("D128 dropout causal", 128, mask=_CAUSAL, dropout_p=0.1),
    call("D128 varlen causal", 128, mask=_CAUSAL, varlen=True),
    call("D64 sinks statistics", 64, mask=_CAUSAL, sinks=True, statistics="top1"),
    call("D128 sinks statistics", 128, mask=_CAUSAL, sinks=True, statistics="top1"),
)
_DECODED = (
    call("D64 causal", 64, mask=_CAUSAL, queries=1),
    call("D128 causal", 128, mask=_CAUSAL, queries=1),
    call("D256 causal", 256, mask=_CAUSAL, queries=1),
    call("D128 causal fp32", 128, _SINGLE, mask=_CAUSAL, queries=1),
    call("D128 document", 128, mask=(few_documents, "causal", "and"), queries=4),
    call("D128 alibi softcap causal", 128, mask=_CAUSAL, score=_CAPPED, queries=4),
    call("D128 sinks statistics", 128, sinks=True, statistics="top1", queries=1),
    call("D128 causal fp8", 128, FLOAT8, mask=_CAUSAL, queries=1),
    call("D128 causal pages of 16", 128, mask=_CAUSAL, queries=1, page_size=16),
    call("D128 causal pages of 128", 128, mask=_CAUSAL, queries=1, page_size=128),
)
_PAGED = (
    call("D128 causal pages of 16", 128, mask=_CAUSAL, page_size=16),
    call("D128 causal pages of 128", 128, mask=_CAUSAL, page_size=128),
    call("D128 causal pages of 16 fp8", 128, FLOAT8, mask=_CAUSAL, page_size=16),
)
# Kernels that multiply no matrices: they read rows once, or sums that others made.
_PLAIN = frozenset(
    {
        "row_kernel",
        "sink_kernel",
        "fold_kernel",
        "fold_table_kernel",
        "merge_splits",
        "spread_lines_kernel",
        "factor_kernel",
        "number_kernel",
    }
)
_TRANSPOSING = frozenset({"transpose_kernel"})


def _cases() -> list[Case]:
    found = [
        Case(f"forward {each.name}", partial(forward, each), without_products=_TRANSPOSING)
        for each in _FLOAT8
    ]
    for each in _CALLS:
        sixteen, key = each.dtype.itemsize == 2, each.name in _KEY
        where = _families(each)
        launches = partial(forward, each)
        found.append(
            Case(f"forward {each.name}", launches, sixteen, key=key, families=where, described=key)
        )
        if not each.statistics:
            launches = partial(backward, each)
            found.append(Case(f"backward {each.name}", launches, sixteen, _PLAIN, key, where))
    for width in (64, 128, 256):
        for name, score in ((f"D{width}", "learned"), (f"D{width} few", "few_places")):
            each = call(f"{name} causal", width, mask=_CAUSAL, score=(score,))
            launches = partial(captured, each)
            found.append(Case(f"captured {each.name}", launches, without_products=_PLAIN))
    for each in _DECODED:
        sixteen, key = each.dtype.itemsize <= 2, each.name == _KEY[0]
        found.append(Case(f"decode {each.name}", partial(forward, each), sixteen, _PLAIN, key))
    found += [Case(f"forward {each.name}", partial(forward, each)) for each in _PAGED]
    return found


def _families(each: Attention) -> tuple[str, ...]:
    """Return the families that the backend does not decline such widths on."""
    width = each.head_dim
    return tuple(name for name in FAMILIES if holds(name, each.dtype, width, width))


CASES = _cases()
