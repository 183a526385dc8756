"""A product of two small matrices: does Triton make matrix instructions for a chip at all?"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilelab.gate.case import Case
from tilewise.inspect.gpu import Launch

__all__ = ["CASES"]


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
