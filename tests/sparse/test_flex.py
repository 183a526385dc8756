"""FlexAttention's BlockMask read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from tests.sparse.pairs import SIZES, Sizes, catalogue, shown, table_of
from tilewise import BlockMask, masks
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.variants.values import as_mask

DOCUMENTS = torch.arange(500) // 70
MODS: dict[str, tuple[Callable[..., Any], int | None, int | None]] = {
    "causal": (lambda b, h, m, n: m >= n, None, None),
    "documents": (lambda b, h, m, n: (DOCUMENTS[m] == DOCUMENTS[n]) & (m >= n), None, None),
    "heads": (lambda b, h, m, n: m - n > 100 * h, None, 3),
    "batch": (lambda b, h, m, n: m + n * b < 400, 2, 1),
    "both": (lambda b, h, m, n: (m + b) // 128 == n // (128 + h), 2, 2),
}


@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("block", [128, (64, 32)])
def test_there_and_back(name: str, block: int | tuple[int, int]) -> None:
    mod, batch, heads = MODS[name]
    flex = create_block_mask(mod, batch, heads, 450, 500, device="cpu", BLOCK_SIZE=block)
    found = BlockMask.from_flex(flex)
    sizes = Sizes(batch or 1, heads or 1, 450, 500)
    assert torch.equal(shown(found, sizes), create_mask(mod, *sizes, device="cpu"))
    expected = table_of(shown(mod, sizes), found.block)
    assert torch.equal(found.covers.expand_as(expected), expected)
    back = found.to_flex()
    assert torch.equal(back.to_dense(), flex.to_dense())
    assert back.shape == flex.shape
    assert back.BLOCK_SIZE == flex.BLOCK_SIZE
    for name_ in ("kv_num_blocks", "full_kv_num_blocks"):
        assert torch.equal(getattr(back, name_), getattr(flex, name_))
    assert torch.equal(create_mask(back.mask_mod, *sizes, device="cpu"), shown(mod, sizes))
    assert BlockMask.from_flex(back) == found


@pytest.mark.parametrize("name", catalogue())
def test_every_mask_as_a_mask_mod(name: str) -> None:
    mask = as_mask(catalogue()[name])
    found = BlockMask.of(mask, *SIZES[2:], batch=SIZES.batch, heads=SIZES.heads, block=(128, 128))
    flex = found.to_flex()
    assert torch.equal(create_mask(flex.mask_mod, *SIZES, device="cpu"), shown(mask))


def test_fewer_keys_than_a_mask_was_made_for() -> None:
    flex = create_block_mask(MODS["causal"][0], None, None, 96, 160, device="cpu", BLOCK_SIZE=32)
    found = BlockMask.from_flex(flex, 70, 150)
    assert (found.queries, found.keys) == (70, 150)
    assert torch.equal(
        shown(found, Sizes(1, 1, 70, 150)), shown(MODS["causal"][0], Sizes(1, 1, 70, 150))
    )
    with pytest.raises(InvalidArgument, match="no more than the 160"):
        BlockMask.from_flex(flex, keys=161)


CROPPED = {
    "causal": masks.causal(),
    "top left": masks.causal("top_left"),
    "window": masks.window(20, 3),
    "left": masks.window(9, None),
    "right": masks.window(None, 4),
    "of both": masks.causal() & ~masks.window(3, 3),
    "prefix": masks.prefix(torch.tensor([9])),
    "function": masks.function(lambda b, h, m, n: n - n.length <= m - m.length),
}


@pytest.mark.parametrize("sizes", [(31, 100), (70, 97), (1, 150), (70, 150)])
@pytest.mark.parametrize("name", CROPPED)
def test_a_cropped_mask_of_ours_sees_the_same_pairs(name: str, sizes: tuple[int, int]) -> None:
    """Also where it counts from the last key: from that which it was made for, as in torch."""
    whole = BlockMask.of(CROPPED[name], 70, 150, batch=1, heads=1, block=(32, 32)).to_flex()
    found = BlockMask.from_flex(whole._adjust(*sizes), *sizes)
    expected = shown(CROPPED[name], Sizes(1, 1, 70, 150))[..., : sizes[0], : sizes[1]]
    assert torch.equal(shown(found, Sizes(1, 1, *sizes)), expected)


def test_lists_that_say_something_else() -> None:
    """Blocks that a list leaves out stay out, and those that it calls full are."""
    lists: dict[str, Any] = {
        "kv_num_blocks": torch.tensor([[[1, 2]]], dtype=torch.int32),
        "kv_indices": torch.tensor([[[[1, 0, 0], [2, 0, 1]]]], dtype=torch.int32),
        "full_kv_num_blocks": torch.tensor([[[1, 0]]], dtype=torch.int32),
        "full_kv_indices": torch.tensor([[[[2, 0, 1], [0, 1, 2]]]], dtype=torch.int32),
    }
    causal: Callable[..., Any] = lambda b, h, m, n: m >= n  # noqa: E731
    flex = FlexMask.from_kv_blocks(
        **lists, BLOCK_SIZE=(8, 8), mask_mod=causal, seq_lengths=(16, 24)
    )
    found = BlockMask.from_flex(flex)
    expected = torch.zeros(16, 24, dtype=torch.bool)
    expected[:8, 16:] = True  # called full, though the mask_mod hides it
    expected[8:, :8] = True  # named, and visible; what follows is named and hidden, or not named
    assert torch.equal(shown(found, Sizes(1, 1, 16, 24))[0, 0], expected)
    assert found.covers.tolist() == [[[[0, 0, 2], [2, 0, 0]]]]


def test_without_a_mask_mod() -> None:
    flex = FlexMask.from_kv_blocks(
        torch.tensor([[[1, 2]]], dtype=torch.int32),
        torch.tensor([[[[1, 0], [1, 0]]]], dtype=torch.int32),
        BLOCK_SIZE=(4, 4),
    )
    found = BlockMask.from_flex(flex)
    assert found.covers.tolist() == [[[[0, 2], [2, 2]]]]


def test_a_layout_becomes_whole_blocks() -> None:
    found = BlockMask.from_layout(torch.tensor([[True, False], [True, True]]), (128, 128)).to_flex()
    assert found.shape == (1, 1, 256, 256)
    assert found.to_dense().tolist() == [[[[1, 0], [1, 1]]]]


def test_refused() -> None:
    with pytest.raises(InvalidType, match="block_mask: got a str"):
        BlockMask.from_flex("mask")
    cu = torch.tensor([0, 5, 9])
    packed = BlockMask.of(masks.causal(), cu_seqlens_q=cu, cu_seqlens_k=cu)
    with pytest.raises(Unsupported, match="variable-length"):
        packed.to_flex()
