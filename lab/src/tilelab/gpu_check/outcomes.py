"""A problem's tensors, and what comes of it: by the public call, by plain torch, and in float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tilewise
from tilelab.gpu_check.problems import Draw, ProblemCase, find
from tilelab.gpu_check.setting import Setting
from tilelab.oracles.dense import dense
from tilewise.inspect.calls import lowered
from tilewise.problem import Operands, Problem, Result
from tilewise.variants.float8 import FLOAT8, Scales
from tilewise.variants.values import Mask, Score, as_mask, as_score

__all__ = [
    "PAGE_SIZES",
    "SEED",
    "Inputs",
    "Outcome",
    "attend",
    "attend_pages",
    "block_table",
    "build",
    "few_queries",
    "in_pages",
    "quantised",
    "refer",
    "references",
    "sized",
]

SEED = 0x1234_5678_9ABC_DEF0


class Inputs(NamedTuple):
    """The tensors of a problem; what can be differentiated requires a gradient.

    Args:
        cu_seqlens: where sequences of queries and of keys begin and end, int32; None if dense.
        grad_out, grad_lse: the gradients that are sent in.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask | None
    score: Score | None
    sinks: Tensor | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    grad_out: Tensor
    grad_lse: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Return the tensors that can be differentiated, by name."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        captured = () if self.score is None else self.score.captured
        found |= {f"captured {i}": t for i, t in enumerate(captured) if t.requires_grad}
        return found if self.sinks is None else {**found, "sinks": self.sinks}


Outcome = dict[str, Tensor]  # "out", "lse", and "grad of NAME" for each leaf


def sized(setting: Setting, case: ProblemCase) -> ProblemCase:
    """Return the problem as large as the setting says."""
    sizes, shrink = setting.sizes, setting.sizes.shrink
    narrow = math.isqrt(shrink)
    rows = sizes.long if case.queries < 0 else -(-case.queries // shrink)
    width = sizes.long_width if case.head_dim < 0 else -(-case.head_dim // narrow)
    keys = sizes.decode_keys + 1 if case.keys < 0 else -(-case.keys // shrink) or rows
    return replace(
        case,
        queries=rows,
        keys=keys,
        head_dim=width,
        value_dim=-(-case.value_dim // narrow) or width,
        lengths=tuple((-(-m // shrink), -(-n // shrink)) for m, n in case.lengths),
    )


def build(setting: Setting, case: ProblemCase, dtype: torch.dtype) -> Inputs:
    """Return the tensors of a sized problem: the same at every call."""
    device = setting.device
    generator = torch.Generator(device).manual_seed(7)
    ends = [torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            for lengths in zip(*case.lengths, strict=True)]  # fmt: skip
    cu = (ends[0].to(device), ends[1].to(device)) if ends else None
    queries, keys = (int(each[-1]) for each in ends) if ends else (case.queries, case.keys)

    def tensor(heads: int, rows: int, width: int) -> Tensor:
        size = (rows, heads, width) if cu else (case.batch, heads, rows, width)
        drawn = torch.randn(size, generator=generator, device=device).to(dtype)
        return _laid_out(drawn, case.layout).requires_grad_()

    q = tensor(case.heads, queries, case.head_dim)
    k = tensor(case.kv_heads, keys, case.head_dim)
    v = tensor(case.kv_heads, keys, case.value_dim)
    draw = Draw(
        len(case.lengths) or case.batch,
        case.heads,
        max((m for m, _ in case.lengths), default=queries),
        max((n for _, n in case.lengths), default=keys),
        device,
        generator,
    )
    lse_size = (case.heads, queries) if cu else q.shape[:-1]
    return Inputs(
        q,
        k,
        v,
        None if case.mask is None else as_mask(case.mask(draw)),
        None if case.score is None else as_score(case.score(draw)),
        draw.normal(case.heads) if case.sinks else None,
        cu,
        torch.randn((*q.shape[:-1], case.value_dim), generator=generator, device=device).to(dtype),
        torch.randn(lse_size, generator=generator, device=device),
    )


def _laid_out(values: Tensor, layout: str) -> Tensor:
    """Return the same values in another order of memory; gaps hold NaN."""
    if layout == "bshd":
        return values.transpose(-3, -2).contiguous().transpose(-3, -2)
    if layout == "strided":
        gaps = values.new_full((*values.shape, 2), math.nan)
        gaps[..., 0] = values
        return gaps[..., 0]
    return values


def attend(setting: Setting, case: ProblemCase, inputs: Inputs, *, gradients: bool) -> Outcome:
    """Return the result of the public call: out and lse, or the gradients."""
    keywords: dict[str, Any] = {
        "mask": inputs.mask,
        "score": inputs.score,
        "sinks": inputs.sinks,
        "scale": case.scale,
        "dropout_p": case.dropout_p,
        "seed": SEED if case.dropout_p else None,
        "return_lse": True,
        "backend": setting.backend,
    }
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.cu_seqlens is None:
        out, lse, _ = tilewise.attention(q, k, v, **keywords)
    else:
        out, lse, _ = tilewise.attention_varlen(q, k, v, *inputs.cu_seqlens, **keywords)
    return _gradients(inputs, out, lse) if gradients else _forward(out, lse)


def _forward(out: Tensor, lse: Tensor) -> Outcome:
    return {"out": out.detach(), "lse": lse.detach()}


def _gradients(inputs: Inputs, out: Tensor, lse: Tensor) -> Outcome:
    leaves = inputs.leaves
    sent = [inputs.grad_out.to(out.dtype), inputs.grad_lse.to(lse.dtype)]
    grads = torch.autograd.grad([out, lse], list(leaves.values()), sent, allow_unused=True)
    return {
        f"grad of {name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), grads, strict=True)
    }


def refer(case: ProblemCase, inputs: Inputs, dtype: torch.dtype) -> Outcome:
    """Return the plain mathematics with every matrix in ``dtype``; in float64 it is the oracle."""
    if dtype == torch.float64:
        inputs = _widened(inputs)
    problem, operands = _problem(case, inputs)
    with inputs.q.device:  # the reference makes what it needs on the default device
        result = dense(problem, operands, dtype=dtype)
        forward = _forward(result.out, result.lse)
        return forward | _gradients(inputs, result.out, result.lse)


def _widened(inputs: Inputs) -> Inputs:
    """Return the same numbers in float64, as new leaves."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().double().requires_grad_()

    score = inputs.score
    if score is not None:
        captured = [leaf(t) if t.requires_grad else t for t in score.captured]
        score = Score(score.program, tuple(captured))
    q, k, v = (leaf(x) for x in (inputs.q, inputs.k, inputs.v))
    sinks = None if inputs.sinks is None else leaf(inputs.sinks)
    return inputs._replace(q=q, k=k, v=v, score=score, sinks=sinks)


def _problem(case: ProblemCase, inputs: Inputs) -> tuple[Problem, Operands]:
    """Return the Problem and Operands that a public call makes of the inputs."""
    return lowered(
        inputs.q,
        inputs.k,
        inputs.v,
        *(inputs.cu_seqlens or ()),
        mask=inputs.mask,
        score=inputs.score,
        scale=case.scale,
        sinks=inputs.sinks,
        dropout_p=case.dropout_p,
        seed=SEED if case.dropout_p else None,
        backend="tiled",  # whatever it reads on the processor lies there
    )


PAGE_SIZES = (16, 48, 128)  # parts of a kernel's block of keys, no divisor of it, and all of it
_FEW = 3


def few_queries() -> ProblemCase:
    """Return the sequences of "varlen" with as many queries each, and so few that they decode."""
    case = find("varlen")
    lengths = tuple((_FEW, keys) for _, keys in case.lengths)
    return replace(case, name="few rows", lengths=lengths)


def attend_pages(
    setting: Setting, inputs: Inputs, page_size: int, *, packed: bool, seed: int
) -> Outcome:
    """Return the packed result of the public call: out and lse.

    Args:
        setting: whose backend does it.
        inputs: of a variable-length problem.
        page_size: rows of a page.
        packed: whether queries are; else each sequence has as many.
        seed: of the order of the pages, and how many more there are than it takes.
    """
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    table = block_table(cu_k, page_size, seed)
    k, v = (in_pages(each.detach(), cu_k, table, page_size) for each in (inputs.k, inputs.v))
    q = inputs.q.detach()
    if not packed:
        q = q.reshape(table.shape[0], -1, *q.shape[1:]).transpose(1, 2)
    with torch.no_grad():
        out, lse, _ = tilewise.attention_paged(
            q,
            k,
            v,
            table,
            cu_k.diff(),
            cu_q if packed else None,
            mask=inputs.mask,
            return_lse=True,
            backend=setting.backend,
        )
    if not packed:
        out, lse = out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)
    return {"out": out, "lse": lse}


def block_table(cu_seqlens: Tensor, page_size: int, seed: int) -> Tensor:
    """Every sequence's pages, any order; -1 where it has none. There are ``seed`` pages more."""
    counts = [-(-length // page_size) for length in cu_seqlens.diff().tolist()]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(sum(counts) + seed, generator=generator).tolist()
    table = torch.full((len(counts), max(counts) + seed), -1, dtype=torch.int32)
    for b, count in enumerate(counts):
        for slot in range(count):
            table[b, slot] = order.pop()
    return table.to(cu_seqlens.device)


def in_pages(rows: Tensor, cu_seqlens: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Pages [pages, Hk, page_size, width] of packed rows [Tk, Hk, width], as caches hold them."""
    held = int(table.max()) + 1
    pool = rows.new_full((held, page_size, *rows.shape[1:]), math.nan)
    starts = cu_seqlens.tolist()
    for b, own in enumerate(table.tolist()):
        for slot, first in enumerate(range(starts[b], starts[b + 1], page_size)):
            piece = rows[first : min(first + page_size, starts[b + 1])]
            pool[own[slot], : piece.shape[0]] = piece
    return pool.transpose(1, 2)


def quantised(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """[B, H, S, D] as float8, and scales [H] by which the largest number of each head is 448."""
    largest = numbers.detach().float().abs().amax((0, 2, 3)).clamp(min=1e-12)
    scale = largest / torch.finfo(FLOAT8).max
    return (numbers.detach().float() / scale[:, None, None]).to(FLOAT8), scale


def references(
    q: Tensor, k: Tensor, v: Tensor, scales: Scales, mask: Mask | None = None
) -> tuple[Result, Result]:
    """Return the results of the plain implementation in float8 and of float64."""
    of_q, of_k, of_v = scales
    problem, operands = lowered(q, k, v, mask=mask, q_scale=of_q, k_scale=of_k, v_scale=of_v)
    return dense(problem, operands, dtype=FLOAT8), dense(problem, operands)
