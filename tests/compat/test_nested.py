"""Nested (jagged) tensors: attention over them is the packed call, with nested results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tests.contract import assert_all_same_bits, assert_same_bits
from tilewise import masks
from tilewise.compat import sdpa
from tilewise.errors import InvalidArgument, Unsupported

packed: Any = tilewise.attention_varlen
LENGTHS, KEYS = (5, 0, 70, 33), (40, 3, 70, 1)
H, HK, D, DV = 4, 2, 8, 6


def offsets(lengths: tuple[int, ...]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def build(shared: bool) -> tuple[list[Tensor], list[Any], tuple[Tensor, Tensor]]:
    """Packed leaves [T, H, D], nested views [B, H, j, D] of them, and their offsets."""
    generator = torch.Generator().manual_seed(6)
    of_q = offsets(LENGTHS)
    of_k = of_q if shared else offsets(KEYS)
    leaves, views = [], []
    for of, heads, width in ((of_q, H, D), (of_k, HK, D), (of_k, HK, DV)):
        leaf = torch.randn(int(of[-1]), heads, width, generator=generator).requires_grad_()
        leaves.append(leaf)
        views.append(torch.nested.nested_tensor_from_jagged(leaf, of).transpose(1, 2))
    return leaves, views, (of_q, of_k)


KEYWORDS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask": masks.causal(), "scale": 0.4},
    "score": lambda: {"score": lambda s, b, h, m, n: s - 0.1 * b * abs(m - n), "seed": 3,
                      "dropout_p": 0.2},
    "sinks": lambda: {"sinks": torch.tensor([0.1, -1.0, 2.0, 0.0])},
}  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("name", KEYWORDS)
def test_the_bits_of_the_packed_call(name: str, shared: bool) -> None:
    keywords = KEYWORDS[name]()
    leaves, views, cu = build(shared)
    want = packed(*leaves, *cu, **keywords, return_lse=True, return_stats="top1")
    got = tilewise.attention(*views, **keywords, return_lse=True, return_stats="top1")
    assert got.out.is_nested
    assert got.out.shape[2] == views[0].shape[2]
    assert tuple(got.out.transpose(1, 2).shape)[2:] == (H, DV)
    assert_same_bits(got.out.values().transpose(0, 1), want.out, "out")
    assert_same_bits(got.lse.values(), want.lse, "lse")
    for field in ("max_logit", "entropy", "top1"):
        assert_same_bits(getattr(got.stats, field).values(), getattr(want.stats, field), field)
    weights = torch.randn(want.out.shape, generator=torch.Generator().manual_seed(7))
    expected = torch.autograd.grad(
        (want.out * weights).sum() + want.lse[want.lse.isfinite()].sum(), leaves
    )
    loss = (got.out.values().transpose(0, 1) * weights).sum()
    lse = got.lse.values()
    found = torch.autograd.grad(loss + lse[lse.isfinite()].sum(), leaves)
    assert_all_same_bits(found, expected, "gradient of")


def test_torchs_own_numbers() -> None:
    """The function of torch on nested tensors, by its signature, and through the switch."""
    _, views, _ = build(True)
    q, k, v = (x.detach() for x in views)
    q = torch.nested.nested_tensor_from_jagged(
        q.values()[:HK].transpose(0, 1), q.offsets()
    ).transpose(1, 2)
    for causal in (False, True):
        parts = [
            scaled_dot_product_attention(a, b, c, is_causal=causal)
            for a, b, c in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
        ]
        want = torch.cat(parts, 1)
        got = sdpa.scaled_dot_product_attention(q, k, v, is_causal=causal)
        torch.testing.assert_close(got.values(), want)
        with tilewise.sdpa() as report:
            taken: Any = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        assert report.taken == 1
        torch.testing.assert_close(taken.values(), want)
    with pytest.raises(Unsupported, match="nested tensors with attn_mask"):
        sdpa.scaled_dot_product_attention(q, k, v, torch.zeros(1, 1))
    with pytest.raises(Unsupported, match="different numbers of heads without enable_gqa"):
        sdpa.scaled_dot_product_attention(views[0], k, v)
    with pytest.raises(Unsupported, match="not all jagged"):
        sdpa.scaled_dot_product_attention(q, torch.zeros(4, HK, 5, D), v)


def test_a_layer_over_sequences_of_any_length() -> None:
    """From [B, j, H * D] and back, with gradients of the weights, compiled and not."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(12, 3 * 12)
    parts = [torch.randn(length, 12) for length in (5, 1, 9)]

    def model(x: Any) -> Any:
        q, k, v = (y.unflatten(-1, (3, 4)).transpose(1, 2) for y in layer(x).chunk(3, dim=-1))
        out = tilewise.attention(q, k, v, mask=masks.causal())
        return out.transpose(1, 2).flatten(-2)

    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    out = model(nested)
    want = torch.cat(
        [model(torch.nested.nested_tensor([x], layout=torch.jagged)).values() for x in parts]
    )
    torch.testing.assert_close(out.values(), want)
    expected = torch.autograd.grad(want.square().sum(), layer.weight)
    found = torch.autograd.grad(out.values().square().sum(), layer.weight)
    torch.testing.assert_close(found, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)(nested)
    torch.testing.assert_close(compiled.values(), want)


def test_refused() -> None:
    _, (q, k, v), _ = build(False)
    dense = torch.zeros(4, HK, 5, D)
    with pytest.raises(InvalidArgument, match="q: got a nested tensor beside one that is not"):
        tilewise.attention(q, dense, v)
    with pytest.raises(InvalidArgument, match=r"q: .*ragged in dimension 1.*transpose\(1, 2\)"):
        tilewise.attention(q.transpose(1, 2), k, v)
    with pytest.raises(InvalidArgument, match="v: got sequences of other lengths than k's"):
        tilewise.attention(q, k, build(True)[1][2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them a prototype
        strided = torch.nested.nested_tensor([torch.zeros(H, 3, D)] * 4)
    with pytest.raises(InvalidArgument, match=r"k: .*layout torch.strided.*layout=torch.jagged"):
        tilewise.attention(q, strided, v)
    one = torch.nested.nested_tensor_from_jagged(torch.zeros(3, HK, D), torch.tensor([0, 3]))
    with pytest.raises(InvalidArgument, match="k: got 1 sequences; required: those of q, 4"):
        tilewise.attention(q, one.transpose(1, 2), one.transpose(1, 2))
    holes = torch.nested.nested_tensor_from_jagged(
        torch.zeros(9, HK, D), torch.tensor([0, 3, 5, 7, 9]), torch.tensor([1, 1, 1, 1])
    )
    with pytest.raises(InvalidArgument, match=r"k: got a nested tensor with holes"):
        tilewise.attention(q, holes.transpose(1, 2), v)
    cu = torch.tensor([0, 3])
    with pytest.raises(InvalidArgument, match="Call attention"):
        tilewise.attention_varlen(q, k, v, cu, cu)
