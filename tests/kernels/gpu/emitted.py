"""Emitted functions run in Triton's interpreter, over all pairs of a small problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.variants.drawn import Extents, own_slots, program_of, run
from tilewise.kernels.gpu.expressions import Variant, captures, variant_of
from tilewise.problem import Problem
from tilewise.variants.expr import Expr, kinds
from tilewise.variants.program import Program

BLOCK = 64


def problem(extents: Extents, mask: Program = (), score: Program = ()) -> Problem:
    """With these programs."""
    sizes = (extents.batch, extents.heads, 1, extents.queries, extents.keys, 8, 8)
    dtype = torch.float32
    return Problem(*sizes, dtype, "cpu", "dense", mask, score, 1.0, 0.0, False)


def emitted(
    problem: Problem, mask_tensors: Sequence[Tensor] = (), score_tensors: Sequence[Tensor] = ()
) -> Variant:
    """The functions of a problem."""
    ranks = [tuple([each.dim() for each in given]) for given in (mask_tensors, score_tensors)]
    return variant_of(problem, ranks[0], ranks[1])


def reference(
    expr: Expr,
    extents: Extents,
    loads: Sequence[Tensor],
    s: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """The results of an expression for all pairs."""
    s = torch.zeros((), dtype=dtype) if s is None else s.to(dtype)
    return run(expr, [each.detach() for each in loads], extents=extents, s=s, dtype=dtype)


def instruction(expr: Expr, loads: Sequence[Tensor]) -> tuple[Program, list[Tensor]]:
    """The program of an expression, and those of the tensors that are left after folding."""
    expr, slots = own_slots(expr)
    return program_of(expr), [loads[slot] for slot in slots]


def value(expr: Expr, extents: Extents, loads: Sequence[Tensor], s: Tensor | None = None) -> Tensor:
    """What the emitted function of a boolean or float expression gives for all pairs."""
    program, used = instruction(expr, loads)
    if kinds(expr)[expr.outputs[0]] == "bool":
        return seen(emitted(problem(extents, program), used).seen, extents, used)
    function = emitted(problem(extents, (), program), (), used).score
    return scored(function, extents, used, torch.zeros(()) if s is None else s)


@triton.jit
def _mask_pairs(out, H, M, N, tensors, shapes, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(2) * BN + tl.arange(0, BN))[None, :]
    found = F(b, h, m, n, M, N, tensors, shapes)
    at = out + (tl.program_id(0) * M + m).to(tl.int64) * N + n
    tl.store(at, found.to(tl.int8), mask=(m < M) & (n < N))


@triton.jit
def _score_pairs(
    out, s, H, M, N, tensors, shapes, F: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    m = (tl.program_id(1) * BM + tl.arange(0, BM))[:, None]
    n = (tl.program_id(2) * BN + tl.arange(0, BN))[None, :]
    at = (tl.program_id(0) * M + m).to(tl.int64) * N + n
    stays = (m < M) & (n < N)
    before = tl.load(s + at, mask=stays, other=0.0)
    found = F(before, b, h, m, n, M, N, tensors, shapes)
    tl.store(out + at, found, mask=stays)


@triton.jit
def _ranges(out, B, M, N, tensors, shapes, F: tl.constexpr, SIZE: tl.constexpr):
    b = tl.program_id(0)
    first = tl.program_id(1)
    end = first + 1 + tl.program_id(2)
    low, full_low, full_high, high = F(b, first, tl.minimum(end, SIZE), M, N, tensors, shapes)
    at = out + ((b * SIZE + first) * tl.num_programs(2) + tl.program_id(2)) * 4
    tl.store(at, low)
    tl.store(at + 1, full_low)
    tl.store(at + 2, full_high)
    tl.store(at + 3, high)


def seen(function: Any, extents: Extents, tensors: Sequence[Tensor]) -> Tensor:
    """What a mask's function says of all pairs, bool [B, H, M, N]."""
    B, H, M, N = extents
    out = torch.full((B, H, M, N), 7, dtype=torch.int8)
    grid = (B * H, triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    given, shapes = captures(tensors)
    _mask_pairs[grid](out, H, M, N, given, shapes, F=function, BM=BLOCK, BN=BLOCK)
    assert ((out == 0) | (out == 1)).all()
    return out.bool()


def scored(
    function: Any,
    extents: Extents,
    tensors: Sequence[Tensor],
    s: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What a score's function gives for all pairs, [B, H, M, N] of ``dtype``."""
    B, H, M, N = extents
    out = torch.full((B, H, M, N), 77, dtype=dtype)
    grid = (B * H, triton.cdiv(M, BLOCK), triton.cdiv(N, BLOCK))
    given, shapes = captures(tensors)
    before = s.float().expand(B, H, M, N).contiguous()
    _score_pairs[grid](out, before, H, M, N, given, shapes, F=function, BM=BLOCK, BN=BLOCK)
    return out


def ranges(
    function: Any, extents: Extents, tensors: Sequence[Tensor], size: int, longest: int
) -> Tensor:
    """int32 [B, size, longest, 4]: the range of positions p..p+i for every p and i < longest."""
    out = torch.full((extents.batch, size, longest, 4), -7, dtype=torch.int32)
    given, shapes = captures(tensors)
    _ranges[out.shape[:3]](
        out, extents.batch, extents.queries, extents.keys, given, shapes, F=function, SIZE=size
    )
    return out
