"""Kernels of the gate itself: a score for its cases, and the probe of a chip that is left out.

The probe is a product of two small matrices: does Triton make matrix instructions for a chip at
all? This module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilelab.gate.record import Case
from tilewise.inspect.gpu import Launch


@triton.jit
def weigh(s, b, h, m, n, M, N, tensors, shapes):
    """The score times a weight of each head."""
    return s * tl.load(tensors[0] + h * shapes[1])


@triton.jit
def weigh_slope(s, b, h, m, n, M, N, tensors, shapes):
    """The weight."""
    return tl.load(tensors[0] + h * shapes[1])


@triton.jit
def product(a, b, out, SIZE: tl.constexpr):
    """The product a b, all of them [SIZE, SIZE] and contiguous."""
    row = tl.arange(0, SIZE)[:, None] * SIZE
    column = tl.arange(0, SIZE)[None, :]
    value = tl.dot(tl.load(a + row + column), tl.load(b + row + column))
    tl.store(out + row + column, value.to(out.dtype.element_ty))


def _launches(family: str) -> list[Launch]:
    half = torch.empty(32, 32, dtype=torch.float16, device="meta")
    return [Launch(product, (1,), {"a": half, "b": half, "out": half}, {"SIZE": 32})]


CASES = (Case("probe", _launches),)
