"""The backward of a block of keys whose rows see others too: blocks add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import FLOATS, Case, build
from tests.contract import assert_all_exact, assert_exact, assert_same_bits
from tests.kernels.targets import Target
from tests.oracle import Sent, attend
from tilewise import masks
from tilewise.plan import Plan
from tilewise.problem import Needs, Operands
from tilewise.variants.values import Mask, as_mask

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
    assert_all_exact(found, near, true, "qkv", "gradient of ")


SIZES = {
    "small": Sizes(33, (0, 1, 8, 40, 57)),
    "a block and more": Sizes(70, (0, 128, 400)),
    "few queries": Sizes(3, (0, 20, 300)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_blocks_add_up(target: Target, name: str, dtype: torch.dtype) -> None:
    check_blocks(target.backend, SIZES[name], dtype)


def scaled(q: Tensor, k: Tensor, v: Tensor, gain: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """The gradient of a factor on the scores of each head, written out; out and lse: incoming."""
    gain = gain.detach().requires_grad_()
    scores = q @ k.mT * q.shape[-1] ** -0.5 * gain[:, None, None]
    total = (torch.softmax(scores, -1) @ v * out).sum() + (scores.logsumexp(-1) * lse).sum()
    return torch.autograd.grad(total, gain)[0]


def check_what_a_score_reads(backend: str) -> None:
    """The gradients of its tensors add up too, also those that come by lse."""
    keys, cuts = 57, (0, 8, 40, 57)
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad_out = (
        torch.randn(2, 4, n, 16, generator=generator) for n in (33, keys, keys, 33)
    )
    gain, grad_lse = (torch.randn(n, generator=generator) for n in ((4,), (2, 4, 33)))

    def factor(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * gain[h]

    def of(start: int, end: int) -> tuple[Plan, Operands]:
        block = q, k[:, :, start:end], v[:, :, start:end]
        plan = tilewise.plan(*block, score=factor, backend=backend)
        return plan, Operands(*block, score_tensors=(gain,), for_backward=True)

    whole, operands = of(0, keys)
    result = whole.forward(operands, "")
    needs = NEEDS._replace(score_tensors=(True,))
    total = torch.zeros(4)
    for start, end in pairwise(cuts):
        plan, operands = of(start, end)
        grads = plan.backward(operands, result, grad_out, grad_lse, needs, None)
        total += grads.score_tensors[0]
    given = q, k, v, gain, grad_out, grad_lse
    assert_exact(total, scaled(*given), scaled(*(x.double() for x in given)), "gain")


def test_what_a_score_reads(target: Target) -> None:
    check_what_a_score_reads(target.backend)


# ---- Tiles that no pair of is visible are never computed: what they hold reaches nobody.


N, CUT = 512, 256
IDS = torch.arange(N) // CUT


def _blocks(batch: int = 1, heads: int = 1) -> Tensor:
    """[batch, heads, N, N]: the rows of a half see the keys of their own half."""
    return (IDS[:, None] == IDS).expand(batch, heads, N, N).clone()


def _second(per_batch: bool) -> Mask:
    """The second half as a document of its own, the ids the same or other ones per batch."""
    ids = torch.stack([IDS, IDS * 7 - 3]) if per_batch else IDS
    return masks.document(ids)


# Each says which rows see which keys: those before CUT see those before CUT, the rest the rest.
MASKS: dict[str, Callable[[], Mask]] = {
    "document": lambda: _second(False),
    "document-each": lambda: _second(True),
    "dense": lambda: as_mask(_blocks()),
    "dense-each": lambda: as_mask(_blocks(2, 2)),
    "dense-strided": lambda: as_mask(_blocks().mT),
    "document-and-causal": lambda: _second(False) & masks.causal(),
    "dense-and-window": lambda: as_mask(_blocks()) & masks.window(100, 100),
    "document-or-dense": lambda: _second(True) | _blocks(),
    "not-other": lambda: ~masks.document(IDS, 1 - IDS),
    "not-dense": lambda: ~as_mask(~_blocks()),
    "nested": lambda: ~(~_second(False) | ~as_mask(_blocks(1, 2))) & masks.window(None, 300),
}


@pytest.mark.parametrize("name", MASKS)
def test_nan_in_empty_tiles(target: Target, name: str) -> None:
    """Half of the keys, values and queries are NaN; the other half's bits do not change."""
    dtype = FLOATS[(list(MASKS).index(name) + target.rank) % 4]
    case = Case(f"empty-{name}", queries=N, keys=N, head_dim=16, value_dim=16, dtype=dtype)
    inputs = build(case)._replace(mask=MASKS[name]())
    rows = inputs.q.shape[:-1]
    grad_lse = torch.ones(rows, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    sent = Sent(torch.ones(*rows, 16, dtype=dtype), grad_lse)
    clean = attend(inputs, target.backend, sent)
    for poisoned in (inputs.k[:, :, CUT:], inputs.v[:, :, CUT:], inputs.q[:, :, CUT:]):
        with torch.no_grad():
            poisoned.fill_(float("nan"))
        got = attend(inputs, target.backend, sent)
        assert bool(got.out[:, :, CUT:].isnan().all())
        assert_same_bits(got.out[:, :, :CUT], clean.out[:, :, :CUT], "out")
        assert_same_bits(got.lse[:, :, :CUT], clean.lse[:, :, :CUT], "lse")
        for leaf, grad in clean.grads.items():
            assert_same_bits(got.grads[leaf][:, :, :CUT], grad[:, :, :CUT], f"grad of {leaf}")
