"""A score in Triton, as a user registers one. This module imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh(s, b, h, m, n, M, N, tensors, shapes):
    """The score times a weight of each head."""
    return s * tl.load(tensors[0] + h * shapes[1])


@triton.jit
def weigh_slope(s, b, h, m, n, M, N, tensors, shapes):
    """The weight."""
    return tl.load(tensors[0] + h * shapes[1])
