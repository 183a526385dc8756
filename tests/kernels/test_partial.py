"""The backward of a block of keys whose rows see others too: blocks add up to the whole."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact
from tests.kernels.targets import Target
from tilewise.problem import Needs, Operands

NEEDS = Needs(True, True, True, partial=True)


class Sizes(NamedTuple):
    """Of a problem, and where its keys are cut."""

    queries: int
    cuts: Sequence[int]
    head_dim: int = 24
    value_dim: int = 16


def plain(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor) -> tuple[Tensor, ...]:
    """The gradients of q, k and v, written out."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide = [leaves[0], *(x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in leaves[1:])]
    p = torch.softmax(wide[0] @ wide[1].mT * q.shape[-1] ** -0.5, -1)
    return torch.autograd.grad((p @ wide[2] * grad_out).sum(), leaves)


def check_blocks(backend: str, sizes: Sizes, dtype: torch.dtype) -> None:
    """Each block's backward with the result of all keys: dq adds up, dk and dv are the whole's."""
    generator = torch.Generator().manual_seed(2)
    keys = sizes.cuts[-1]
    shapes = ((2, 4, sizes.queries, sizes.head_dim), (2, 2, keys, sizes.head_dim),
              (2, 2, keys, sizes.value_dim), (2, 4, sizes.queries, sizes.value_dim))  # fmt: skip
    q, k, v, grad_out = (torch.randn(each, generator=generator).to(dtype) for each in shapes)
    whole = tilewise.plan(q, k, v, backend=backend)
    result = whole.forward(Operands(q, k, v, for_backward=True), "")
    grad_q, of_k, of_v = torch.zeros(q.shape), [], []
    for start, end in pairwise(sizes.cuts):
        block = k[:, :, start:end], v[:, :, start:end]
        plan = tilewise.plan(q, *block, backend=backend)
        grads = plan.backward(Operands(q, *block), result, grad_out, None, NEEDS, None)
        grad_q += grads.q.float()
        of_k.append(grads.k)
        of_v.append(grads.v)
    found = grad_q.to(dtype), torch.cat(of_k, 2), torch.cat(of_v, 2)
    near = plain(q, k, v, grad_out)
    true = plain(*(x.double() for x in (q, k, v, grad_out)))
    for name, one, two, three in zip("qkv", found, near, true, strict=True):
        assert_exact(one, two, three, f"gradient of {name}")


SIZES = {
    "small": Sizes(33, (0, 1, 8, 40, 57)),
    "a block and more": Sizes(70, (0, 128, 400)),
    "few queries": Sizes(3, (0, 20, 300)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_blocks_add_up(target: Target, name: str, dtype: torch.dtype) -> None:
    check_blocks(target.backend, SIZES[name], dtype)
