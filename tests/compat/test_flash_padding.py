"""bert_padding and layers.rotary of tilewise.compat.flash_attn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compat.flash_reference import rotate
from tests.contract import assert_exact, assert_same_bits
from tilewise.compat.flash_attn import bert_padding
from tilewise.compat.flash_attn.layers import rotary
from tilewise.errors import InvalidArgument, InvalidType

padding: Any = bert_padding
turning: Any = rotary
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]])


def numbered(*sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).view(sizes).requires_grad_()


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tail", [(), (5,), (2, 3)])
def test_unpad_and_pad(tail: tuple[int, ...], kind: torch.dtype) -> None:
    x = numbered(3, 4, *tail, 2)
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, MASK.to(kind))
    assert rows.shape == (7, *tail, 2)
    assert indices.tolist() == [0, 1, 3, 8, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 3, 3, 7]
    assert (cu_seqlens.dtype, used.dtype) == (torch.int32, torch.int32)
    assert used.tolist() == [3, 0, 4]
    assert longest == 4
    assert isinstance(longest, int)
    back = padding.pad_input(rows, indices, 3, 4)
    kept = MASK.view(3, 4, *[1] * (len(tail) + 1))
    assert_same_bits(back, x * kept, "padded")
    (grad,) = torch.autograd.grad((back * x.detach()).sum(), x)
    assert_same_bits(grad, x.detach() * kept, "gradient")


def test_rows_that_are_kept_and_not_counted() -> None:
    x, unused = numbered(3, 4, 2), torch.zeros_like(MASK)
    unused[1, 2] = unused[0, 2] = 1
    rows, indices, cu_seqlens, longest, used = padding.unpad_input(x, MASK, unused)
    assert indices.tolist() == [0, 1, 2, 3, 6, 8, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 4, 5, 9]
    assert used.tolist() == [3, 0, 4]
    assert longest == 4
    assert_same_bits(rows, x.flatten(0, 1)[indices], "rows")


def test_several_sequences_in_a_row() -> None:
    x = numbered(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, *range(12, 18)]
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert_same_bits(rows, x.flatten(0, 1)[indices], "rows")


def test_rows_by_index() -> None:
    x, indices = numbered(6, 2, 3), torch.tensor([4, 0, 4], dtype=torch.int32)
    rows, same = padding.index_first_axis_residual(x, indices)
    assert_same_bits(rows, x[indices.long()], "rows")
    (grad,) = torch.autograd.grad(rows.sum() + same.sum(), x)
    assert grad[:, 0, 0].tolist() == [2, 1, 1, 1, 3, 1]
    whole = padding.index_put_first_axis(rows[:2], indices[:2], 5)
    assert whole.shape == (5, 2, 3)
    assert_same_bits(whole[4], x[4], "a row")


def test_mistakes_of_padding() -> None:
    x = numbered(3, 4, 2)
    with pytest.raises(InvalidArgument, match="attention_mask: got shape"):
        padding.unpad_input(x, MASK[:2])
    with pytest.raises(InvalidArgument, match="attention_mask: got a tensor of"):
        padding.unpad_input(x, MASK.float())
    with pytest.raises(InvalidArgument, match="indices: got"):
        padding.pad_input(x, MASK, 3, 4)
    with pytest.raises(InvalidType, match="indices: got"):
        padding.index_first_axis(x, [1])


ANGLES = torch.rand(30, 6, generator=torch.Generator().manual_seed(5)) * 6


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("offsets", [0, 4, torch.tensor([3, 0], dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_rotary(
    dtype: torch.dtype, offsets: int | Tensor, inplace: bool, interleaved: bool
) -> None:
    leaf = torch.randn(2, 7, 3, 17, generator=torch.Generator().manual_seed(1)).to(dtype)
    leaf.requires_grad_()
    cos, sin = ANGLES.cos().to(dtype), ANGLES.sin().to(dtype)
    x = leaf * 1  # in place, a leaf cannot be written
    out = turning.apply_rotary_emb(x, cos, sin, interleaved, inplace, offsets)
    assert (out is x) == inplace
    shift = offsets[:, None] if isinstance(offsets, Tensor) else offsets
    places = (torch.arange(7) + shift).expand(2, 7)
    wide = rotate(leaf, cos[places], sin[places], interleaved)
    assert_exact(out, wide.to(dtype), wide, "out")
    assert_same_bits(out[..., 12:], leaf[..., 12:], "the channels that are not rotated")
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    (grad,) = torch.autograd.grad((out * weights).sum(), leaf, retain_graph=True)
    (true,) = torch.autograd.grad((wide * weights).sum(), leaf)
    back = rotate(weights, cos[places], -sin[places], interleaved)
    assert_exact(grad, true, back, "gradient")
    if not inplace:
        undone = turning.apply_rotary(
            weights, cos, sin, offsets, interleaved=interleaved, conjugate=True
        )
        assert_exact(undone, back.to(dtype), back, "conjugate")


@pytest.mark.parametrize("offsets", [2, torch.tensor([3, 0, 5, 1])], ids=str)
def test_rotary_of_packed_rows(offsets: int | Tensor) -> None:
    x, cu = torch.randn(11, 2, 12), torch.tensor([0, 4, 4, 10, 11], dtype=torch.int32)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    out = turning.apply_rotary_emb(x, cos, sin, seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=6)
    shift = offsets.tolist() if isinstance(offsets, Tensor) else [offsets] * 4
    for b, (start, end) in enumerate([(0, 4), (4, 4), (4, 10), (10, 11)]):
        one = turning.apply_rotary_emb(x[None, start:end], cos, sin, seqlen_offsets=shift[b])
        assert_same_bits(out[start:end], one[0], f"sequence {b}")
    wide = rotate(x[None, :4], cos[shift[0] :][:4], sin[shift[0] :][:4], False)
    assert_exact(out[None, :4], wide.float(), wide, "the first sequence")
    padded = torch.cat([x, torch.randn(40, 2, 12)]).requires_grad_()  # tables have 30 positions
    found = turning.apply_rotary_emb(padded * 1, cos, sin, False, True, offsets, cu, 6)
    assert_same_bits(found, torch.cat([out, padded[11:]]), "rows behind the last sequence")
    (grad,) = torch.autograd.grad(found[11:].sum(), padded)
    assert_same_bits(grad[11:], torch.ones_like(padded[11:]), "their gradient")


def test_rotary_in_torch() -> None:
    x, cos, sin = torch.randn(2, 5, 3, 12), ANGLES.cos(), ANGLES.sin()
    for interleaved in (False, True):
        expected = turning.apply_rotary_emb(x, cos, sin, interleaved)
        found = turning.apply_rotary_emb_torch(x, cos[:5], sin[:5], interleaved)
        assert_same_bits(found, expected, "out")


def packed(kind: str) -> tuple[Tensor, int | None]:
    """[B, S, 3, H, D], or grouped [B, S, Hq + 2 Hk, D] with Hq."""
    shape = (2, 7, 3, 4, 14) if kind == "packed" else (2, 7, 8, 14)
    return torch.randn(shape, generator=torch.Generator().manual_seed(8)), (
        None if kind == "packed" else 4
    )


@pytest.mark.parametrize("scale_base", [None, 512.0])
@pytest.mark.parametrize("kind", ["packed", "grouped", "apart"])
def test_the_module_rotates_queries_and_keys(kind: str, scale_base: float | None) -> None:
    module = turning.RotaryEmbedding(12, base=100.0, scale_base=scale_base)
    pairs = torch.arange(6, dtype=torch.float64)
    angles = torch.outer(torch.arange(2, 9), 100.0 ** (-pairs / 6))
    scale = torch.ones(7, 6, dtype=torch.float64)
    if scale_base:
        base = (2 * pairs + 0.4 * 12) / (1.4 * 12)
        scale = base ** ((torch.arange(2, 9) - 9 // 2) / scale_base)[:, None]
    if kind == "apart":
        q, kv = packed("packed")[0][:, :, 0], packed("packed")[0][:, :, 1:]
        given = [q.clone(), kv[:, :, 0].clone(), kv[:, :, 1].clone()]
        out = module(q, kv, seqlen_offset=2)
        assert out[0] is q
        assert out[1] is kv
        found = [q, kv[:, :, 0], kv[:, :, 1]]
    else:
        qkv, heads = packed(kind)
        dim, sizes = (2, (4, 2, 2)) if heads else (2, (1, 1, 1))
        given = [x.clone().flatten(2, -2) for x in qkv.split(sizes, dim)]
        assert module(qkv, seqlen_offset=2, num_heads_q=heads) is qkv
        found = [x.flatten(2, -2) for x in qkv.split(sizes, dim)]
    for name, one, before, by in zip(
        ("q", "k"), found[:2], given[:2], (scale, 1 / scale), strict=True
    ):
        true = rotate(before, angles.cos() * by, angles.sin() * by, False)
        near = rotate(before, (angles.cos() * by).float(), (angles.sin() * by).float(), False)
        assert_exact(one, near.float(), true, name)
    assert_same_bits(found[2], given[2], "v")


def test_the_tables_of_the_module() -> None:
    module = turning.RotaryEmbedding(8).train()
    with torch.inference_mode():
        module(torch.zeros(1, 4, 3, 2, 8))
    assert module._cos_cached.is_inference()
    x = torch.zeros(1, 3, 3, 2, 8, requires_grad=True)
    assert module(x * 1).requires_grad
    assert not module._cos_cached.is_inference()
    held = module._cos_cached
    module(torch.zeros(1, 2, 3, 2, 8))
    assert module._cos_cached is held
    module(torch.zeros(1, 2, 3, 2, 8), seqlen_offset=torch.tensor([5]), max_seqlen=9)
    assert module._cos_cached.shape == (9, 4)
    module.to(torch.bfloat16)(torch.zeros(1, 20, 3, 2, 8, dtype=torch.bfloat16))
    assert module._cos_cached.dtype == torch.bfloat16
    exact = torch.outer(torch.arange(20), 10000.0 ** (-torch.arange(4) / 4)).cos()
    assert_same_bits(module._cos_cached, exact.bfloat16(), "tables of a module in bfloat16")
    assert not module.state_dict()
    with pytest.raises(InvalidArgument, match="max_seqlen: got None"):
        turning.RotaryEmbedding(8)(x.detach(), seqlen_offset=torch.tensor([1]))
    with pytest.raises(InvalidArgument, match="dim: got 7"):
        turning.RotaryEmbedding(7)
    with pytest.raises(InvalidArgument, match="num_heads_q: got None"):
        module(torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgument, match="kv: got shape"):
        turning.apply_rotary_emb_kv_(x.detach(), ANGLES[:, :4], ANGLES[:, :4])


def test_mistakes_of_rotary() -> None:
    x, cos = torch.randn(2, 5, 3, 12), ANGLES
    with pytest.raises(InvalidArgument, match="cos: got 4 rows"):
        turning.apply_rotary_emb(x, cos[:4], cos[:4])
    with pytest.raises(InvalidArgument, match="cos: got 30 rows"):
        turning.apply_rotary_emb(x, cos, cos, seqlen_offsets=torch.tensor([0, 26]))
    with pytest.raises(InvalidArgument, match="sin: got shape"):
        turning.apply_rotary_emb(x, cos, cos[:, :2])
    with pytest.raises(InvalidArgument, match="cos: got shape"):
        turning.apply_rotary_emb(x[..., :10], cos, cos)
    with pytest.raises(InvalidType, match="seqlen_offsets: got"):
        turning.apply_rotary_emb(x, cos, cos, seqlen_offsets=1.5)
    with pytest.raises(InvalidArgument, match="seqlen_offsets: got"):
        turning.apply_rotary_emb(x, cos, cos, seqlen_offsets=torch.tensor([1]))
    with pytest.raises(InvalidArgument, match=r"x: got a tensor of torch.int64; required: a float"):
        turning.apply_rotary_emb(x.long(), cos, cos)
    for starts, complaint in (
        (torch.tensor([0.0, 2.0, 5.0]), "a tensor of torch.float32"),
        (torch.tensor([0, 4, 3, 5]), "4 followed by 3"),
        (torch.tensor([0, 6]), "6 as its last entry, past"),
        (torch.tensor([1, 5]), "1 as its first entry"),
        (torch.tensor([], dtype=torch.int32), "no entry"),
    ):
        with pytest.raises(InvalidArgument, match=f"cu_seqlens: got {complaint}"):
            turning.apply_rotary_emb(x[0], cos, cos, cu_seqlens=starts)


def test_a_mistake_of_rotary_writes_nothing() -> None:
    module = turning.RotaryEmbedding(12)
    qkv, q, kv = torch.ones(1, 5, 3, 1, 12), torch.ones(1, 5, 1, 12), torch.ones(1, 9, 2, 1, 12)
    with pytest.raises(InvalidArgument, match="cos: got 4 rows"):
        turning.apply_rotary_emb_qkv_(qkv, ANGLES, ANGLES, ANGLES[:4], ANGLES[:4])
    for wrong in (kv, kv[:, :5, :1]):
        with pytest.raises(InvalidArgument, match=r"(cos|kv): got"):
            module(q, wrong)
    for untouched in (qkv, q, kv):
        assert bool((untouched == 1).all())
