"""Attention by a score and a mask in Python, in plain torch: what expressions are compared with."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import InexactError, assert_all_same_bits, assert_exact
from tests.plain import attend, attend_packed, joined
from tests.variants.drawn import program_of
from tilewise.variants.lower import statistics_dtype
from tilewise.variants.trace import trace_mask, trace_score
from tilewise.variants.values import Mask, Score

Function = Callable[..., Any]
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler here")


class Variant(NamedTuple):
    """A score and a mask, made anew for captured tensors of another dtype.

    Args:
        name: of the test.
        score: from the captured floats to the function of (s, b, h, m, n); None for none.
        mask: the function of (b, h, m, n); None for none.
        shapes: of the captured floats.
    """

    name: str
    score: Callable[..., Function] | None = None
    mask: Function | None = None
    shapes: tuple[tuple[int, ...], ...] = ()

    def __str__(self) -> str:
        return self.name


class Sizes(NamedTuple):
    """Of a problem; ``sequences`` are the (queries, keys) of a packed one."""

    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 70
    keys: int = 150
    head_dim: int = 16
    value_dim: int = 9
    dropout_p: float = 0.0
    sequences: tuple[tuple[int, int], ...] = ()


class Inputs(NamedTuple):
    """The operands and what the score captures, all of them leaves."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: tuple[Tensor, ...]
    grads: tuple[Tensor, Tensor]
    sizes: Sizes

    def leaves(self) -> list[Tensor]:
        return [self.q, self.k, self.v, *self.captured]


def inputs(variant: Variant, sizes: Sizes, dtype: torch.dtype, seed: int = 1) -> Inputs:
    """Random operands; captured floats of the dtype that kernels read."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, wide: bool = False) -> Tensor:
        to = statistics_dtype(dtype) if wide else dtype
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(to)

    heads, kv = sizes.heads, sizes.kv_heads
    shapes: list[tuple[int, ...]]
    if sizes.sequences:
        rows, keys = (sum(pair[side] for pair in sizes.sequences) for side in (0, 1))
        shapes = [(rows, heads, sizes.head_dim), (keys, kv, sizes.head_dim)]
        shapes += [(keys, kv, sizes.value_dim), (rows, heads, sizes.value_dim), (heads, rows)]
    else:
        b, m, n = sizes.batch, sizes.queries, sizes.keys
        shapes = [(b, heads, m, sizes.head_dim), (b, kv, n, sizes.head_dim)]
        shapes += [(b, kv, n, sizes.value_dim), (b, heads, m, sizes.value_dim), (b, heads, m)]
    q, k, v, grad_out = (draw(*shape) for shape in shapes[:4])
    captured = tuple(draw(*shape, wide=True).requires_grad_() for shape in variant.shapes)
    for operand in (q, k, v):
        operand.requires_grad_()
    return Inputs(q, k, v, captured, (grad_out, draw(*shapes[4], wide=True)), sizes)


def as_score(function: Function) -> Score:
    """The score of a function as an expression, whatever kernels may know it by."""
    expr, tensors = trace_score(function)
    return Score(program_of(expr), tensors)


def as_mask(function: Function) -> Mask:
    """The same of a mask."""
    expr, tensors = trace_mask(function)
    return Mask(program_of(expr), tensors)


def run(variant: Variant, x: Inputs) -> list[Tensor]:
    """out, lse and the gradients of all leaves, by the core."""
    keywords: dict[str, Any] = {"backend": "cpu", "return_lse": True}
    if variant.score is not None:
        keywords["score"] = as_score(variant.score(*x.captured))
    if variant.mask is not None:
        keywords["mask"] = as_mask(variant.mask)
    if x.sizes.dropout_p:
        keywords |= {"dropout_p": x.sizes.dropout_p, "seed": 11}
    if x.sizes.sequences:
        bounds = [cumulative(x.sizes, side) for side in (0, 1)]
        found = tilewise.attention_varlen(x.q, x.k, x.v, *bounds, **keywords)
    else:
        found = tilewise.attention(x.q, x.k, x.v, **keywords)
    results = list(found[:2])
    return results + list(torch.autograd.grad(results, x.leaves(), x.grads))


def cumulative(sizes: Sizes, side: int) -> Tensor:
    lengths = [pair[side] for pair in sizes.sequences]
    return torch.tensor([0, *lengths]).cumsum(0)


def plain(variant: Variant, x: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The same with every matrix in ``dtype``."""
    leaves = [leaf.detach().to(dtype).requires_grad_() for leaf in x.leaves()]
    q, k, v, *captured = leaves
    keywords: dict[str, Any] = {
        "score": None if variant.score is None else variant.score(*captured),
        "mask": variant.mask,
        "dropout": (x.sizes.dropout_p, 11),
    }
    if x.sizes.sequences:
        bounds = [cumulative(x.sizes, side) for side in (0, 1)]
        results = joined(attend_packed(q, k, v, bounds, **keywords), q, v)[:2]
    else:
        results = attend(q, k, v, **keywords)[:2]
    sent = [grad.to(dtype) for grad in x.grads]
    grads = torch.autograd.grad(results, leaves, sent, materialize_grads=True)
    return list(results) + list(grads)


def check(variant: Variant, sizes: Sizes, dtype: torch.dtype) -> None:
    """The contract for out, lse and every gradient.

    An excess must show again on four fresh draws taken together. Few pairs have most of the error
    of a score that bends, and a maximum of few says little: of 25 draws of "gated" in float32 one
    in five has an excess, while the errors are 1.24 times those of plain torch.
    """
    try:
        _check(variant, sizes, dtype, [1])
    except InexactError as error:
        if error.ratio > 2:
            raise
        _check(variant, sizes, dtype, [2, 3, 4, 5])


def _check(variant: Variant, sizes: Sizes, dtype: torch.dtype, seeds: Sequence[int]) -> None:
    draws = [inputs(variant, sizes, dtype, seed) for seed in seeds]
    got = [run(variant, x) for x in draws]
    truth = [plain(variant, x, torch.float64) for x in draws]
    names = ["out", "lse", "q", "k", "v"]
    names += [f"captured {i}" for i in range(len(draws[0].captured))]
    if dtype is torch.float64:
        torch.testing.assert_close(got[0], truth[0], rtol=1e-11, atol=1e-12)
        return
    near = [plain(variant, x, dtype) for x in draws]
    for i, name in enumerate(names):
        ours, own, right = (torch.stack([x[i].detach() for x in y]) for y in (got, near, truth))
        assert_exact(ours, own, right, f"{variant}: {name}")


def check_bits(variant: Variant, x: Inputs, threads: Sequence[int]) -> None:
    """The same bits on any number of threads."""
    torch.set_num_threads(1)
    expected = run(variant, x)
    for count in threads:
        torch.set_num_threads(count)
        assert_all_same_bits(run(variant, x), expected, f"{variant}, {count} threads")
