"""tilewise.merge: equal to attention over the union of the keys, gradients and sinks included."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_exact
from tilewise import AttentionResult, masks
from tilewise.errors import InvalidArgument, InvalidType

B, H, HK, M, N, D, DV = 2, 4, 2, 13, 57, 8, 5
CUTS = (0, 7, 7, 30, 31, N)


def _tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((B, H, M, D), (B, HK, N, D), (B, HK, N, DV))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def _partial(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> AttentionResult:
    return tilewise.attention(q, k, v, **keywords, return_lse=True, backend="tiled")


def _pieces(q: Tensor, k: Tensor, v: Tensor) -> list[AttentionResult]:
    """The attention over each part of the keys; one of them has none."""
    return [_partial(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(CUTS)]


def _gradients(result: AttentionResult, leaves: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    assert result.lse is not None
    generator = torch.Generator().manual_seed(4)
    loss = torch.zeros((), dtype=result.lse.dtype)
    for tensor in (result.out, result.lse):
        weights = torch.randn(tensor.shape, generator=generator, dtype=result.lse.dtype)
        loss = loss + (tensor * weights).sum()
    return torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("with_sinks", [False, True])
def test_parts_of_the_keys_are_the_whole(with_sinks: bool) -> None:
    """Out, lse and every gradient; sinks count once, however many parts there are."""
    leaves: tuple[Tensor, ...] = _tensors()
    q, k, v = leaves
    sinks = torch.tensor([0.5, -2.0, 3.0, -math.inf], dtype=q.dtype, requires_grad=True)
    given = {"sinks": sinks} if with_sinks else {}
    merged = tilewise.merge(*_pieces(q, k, v), **given)
    whole = _partial(q, k, v, **given)
    assert merged.stats is None
    leaves = (*leaves, sinks) if with_sinks else leaves
    torch.testing.assert_close(merged[:2], whole[:2])
    torch.testing.assert_close(_gradients(merged, leaves), _gradients(whole, leaves))


def test_packed_sequences() -> None:
    """A shared prefix, and then each sequence's own keys."""
    generator = torch.Generator().manual_seed(5)
    q = torch.randn(9, H, D, generator=generator, dtype=torch.float64)
    k, prefix = (torch.randn(n, H, D, generator=generator, dtype=torch.float64) for n in (9, 6))
    cu = torch.tensor([0, 5, 9])
    sinks = torch.randn(H, generator=generator, dtype=torch.float64)

    def packed(keys: Tensor, ends: Tensor, mask: Any = None) -> AttentionResult:
        return tilewise.attention_varlen(
            q, keys, keys, cu, ends, mask=mask, return_lse=True, backend="tiled"
        )

    shared = packed(torch.cat([prefix, prefix]), torch.tensor([0, 6, 12]))
    own = packed(k, cu, masks.causal())
    together = torch.cat([prefix, k[:5], prefix, k[5:]])
    whole: AttentionResult = tilewise.attention_varlen(
        q,
        together,
        together,
        cu,
        torch.tensor([0, 11, 21]),
        mask=masks.causal(),
        sinks=sinks,
        return_lse=True,
        backend="tiled",
    )
    merged = tilewise.merge(shared, own, sinks=sinks)
    torch.testing.assert_close(merged.out, whole.out)
    torch.testing.assert_close(merged.lse, whole.lse)


def test_rows_that_see_nothing() -> None:
    """A part that hides every key of a row changes nothing; a row of none has 0, -inf and 0."""
    q, k, v = _tensors()
    hidden = torch.ones(M, N, dtype=torch.bool)
    hidden[3] = False
    hidden[5, :30] = False
    parts = [
        _partial(q, k[:, :, a:b], v[:, :, a:b], mask=hidden[:, a:b]) for a, b in ((0, 30), (30, N))
    ]
    poisoned = parts[0].out.detach().clone()
    poisoned[:, :, [3, 5]] = math.nan
    whole = _partial(q, k, v, mask=hidden)
    for some in ((parts[0]._replace(out=poisoned), parts[1]), parts):
        merged = tilewise.merge(*some)
        torch.testing.assert_close(merged[:2], whole[:2])
    grads = []
    for x in (merged, whole):
        assert x.lse is not None
        grads.append(torch.autograd.grad(x.out.sum() + x.lse.exp().sum(), (q, k, v)))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_2x_rule(dtype: torch.dtype) -> None:
    """Of what is rounded in parts, by the plain implementation's error."""
    q, k, v = (x.detach().to(dtype) for x in _tensors())
    keys, values = (x.repeat_interleave(H // HK, 1) for x in (k, v))

    def plain(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        s = q.to(kind) @ keys.to(kind).mT * D**-0.5
        return s.softmax(-1) @ values.to(kind), s.logsumexp(-1)

    merged = tilewise.merge(*_pieces(q, k, v))
    assert merged.out.dtype == dtype
    assert merged.lse is not None
    own, oracle = plain(dtype), plain(torch.float64)
    assert_exact(merged.out, own[0], oracle[0], "out")
    assert_exact(merged.lse, own[1], oracle[1], "lse")


def test_one_result_is_itself() -> None:
    """And rows need not be there at all."""
    q, k, v = _tensors(torch.float32)
    one = _partial(q, k, v)
    merged = tilewise.merge(one)
    torch.testing.assert_close(merged.out, one.out)
    torch.testing.assert_close(merged.lse, one.lse)
    none = _partial(q[:, :, :0], k, v)
    assert tilewise.merge(none, none).out.shape == (B, H, 0, DV)


def test_under_compile() -> None:
    """It is plain torch: it traces whole."""
    pieces = _pieces(*(x.detach() for x in _tensors()))
    compiled = torch.compile(tilewise.merge, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(*pieces).out, tilewise.merge(*pieces).out)


def test_what_it_refuses() -> None:
    """Each by its name, with what would do."""
    q, k, v = _tensors(torch.float32)
    one = _partial(q, k, v)
    with pytest.raises(InvalidArgument, match="at least one AttentionResult"):
        tilewise.merge()
    bare: Any = one.out
    with pytest.raises(InvalidType, match=r"results\[1\].*return_lse=True"):
        tilewise.merge(one, bare)
    with pytest.raises(InvalidArgument, match=r"results\[0\].*without lse.*return_lse=True"):
        tilewise.merge(one._replace(lse=None))
    with pytest.raises(InvalidArgument, match=r"results\[1\].*shapes of the first"):
        tilewise.merge(one, _partial(q[:, :, 1:], k, v))
    with pytest.raises(InvalidArgument, match=r"results\[1\].*dtype torch.float64"):
        tilewise.merge(one, _partial(*_tensors()))
    with pytest.raises(InvalidArgument, match=r"results\[0\].*or packed \[T, Hq?, Dv\]"):
        tilewise.merge(one._replace(out=one.out[0]))
    with pytest.raises(InvalidArgument, match=r"sinks.*\[Hq\] with Hq = 4"):
        tilewise.merge(one, sinks=torch.zeros(3))
