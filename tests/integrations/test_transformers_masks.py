"""The masks of transformers as expressions: the pairs that its own mask function writes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, 1, -1, -1, 2, 2, 2, -1]]).expand(2, -1)


def functions() -> dict[str, Any]:
    from transformers import masking_utils as hf

    def every_other(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return (q - kv) % 2 == 0

    return {
        "causal": hf.causal_mask_function,
        "window": hf.sliding_window_causal_mask_function(4),
        "everything": hf.bidirectional_mask_function,
        "window to both sides": hf.sliding_window_bidirectional_mask_function(3),
        "chunks": hf.chunked_causal_mask_function(3, torch.tensor([0, 2])),
        "blocks": hf.or_masks(hf.causal_mask_function, hf.blockwise_overlay(BLOCKS)),
        "a user's": hf.and_masks(hf.causal_mask_function, every_other),
    }


# (queries, keys, the first query's position, the first key's)
PLACES: dict[str, tuple[int, int, Any, int]] = {
    "prefill": (9, 9, 0, 0),
    "a step": (1, 9, 8, 0),
    "a piece": (3, 9, 6, 0),
    "prefill of a static cache": (5, 16, 0, 0),
    "a step in a static cache": (1, 16, torch.tensor(8), 0),
    "a piece in a static cache": (3, 16, torch.tensor(6), 0),
    "a step in a sliding cache": (1, 4, 9, 6),
    "a piece in a sliding cache": (3, 6, 9, 6),
}
NAMES = ("causal", "window", "everything", "window to both sides", "chunks", "blocks", "a user's")


def padded(kind: str, positions: int) -> Tensor | None:
    """A padding mask of the positions that there are."""
    if kind == "none":
        return None
    mask = torch.ones(2, positions, dtype=torch.bool)
    if kind == "left":
        mask[1, : positions // 2] = False
    elif kind == "right":
        mask[1, positions // 2 :] = False
    return mask


@pytest.mark.parametrize("padding", ["none", "nothing padded", "left", "right"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_the_pairs_of_transformers_own_mask(name: str, place: str, padding: str) -> None:
    from transformers.masking_utils import sdpa_mask

    from tilewise.integrations.transformers import make_mask

    queries, keys, q_offset, kv_offset = PLACES[place]
    sizes: dict[str, Any] = {
        "batch_size": 2,
        "q_length": queries,
        "kv_length": keys,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": functions()[name],
        "attention_mask": padded(padding, int(q_offset) + queries),
    }
    expected = sdpa_mask(**sizes, allow_is_causal_skip=False).expand(2, 1, queries, keys)
    found = make_mask(**sizes)
    assert found.shape == (2, 1, queries, keys)
    assert torch.equal(found[:, 0], expected[:, 0]), "as an indexer asks for them"
    assert torch.equal(found[:, 0, :, :], expected[:, 0])
    assert found[:, 0].shape == (2, queries, keys)


def text(*sizes: Any, **more: Any) -> str:
    from tilewise.integrations.transformers import make_mask

    mask = make_mask(2, *sizes, **more).mask
    return "" if mask is None else mask.text


def test_masks_are_what_kernels_know() -> None:
    of = functions()
    assert text(9, 9, mask_function=of["causal"]) == "band(-1,0,0)"
    assert text(9, 9, mask_function=of["window"]) == "band(3,0,0)"
    assert text(9, 9, mask_function=of["everything"]) == ""
    assert text(9, 9, mask_function=of["window to both sides"]) == "band(3,3,0)"
    steps = [text(1, 9 + step, 8 + step, mask_function=of["window"]) for step in range(3)]
    assert steps == ["band(3,0,1)"] * 3, "one program for all steps"
    steps = [text(1, 4, 9 + i, 6 + i, mask_function=of["window"]) for i in range(3)]
    assert steps == ["band(3,0,1)"] * 3
    static = [text(1, 16, torch.tensor(i), mask_function=of["causal"]) for i in (4, 5)]
    assert static == ["band(-1,0,1)"] * 2


def test_padding_is_lengths_or_a_boolean_per_key() -> None:
    expected_of = {"nothing padded": "", "right": "below()[0]", "left": "dense()[0]"}
    for kind, expected in expected_of.items():
        mask = padded(kind, 9)
        assert text(9, 9, mask_function=functions()["everything"], attention_mask=mask) == expected


def test_packed_sequences_are_documents() -> None:
    from transformers import masking_utils as hf

    from tilewise.integrations.transformers import make_mask

    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2]])
    packed = hf.find_packed_sequence_indices(positions)
    function = hf.packed_sequence_compatibility_function(
        hf.sliding_window_causal_mask_function(2), positions, packed
    )
    found = make_mask(1, 9, 9, mask_function=function)
    assert found.mask is not None
    assert "same_document" in found.mask.text
    expected = hf.sdpa_mask(1, 9, 9, mask_function=function, allow_is_causal_skip=False)
    assert torch.equal(tilewise.visible_pairs(found.mask, 9, 9), expected)


def test_a_mask_made_before_is_given_back() -> None:
    """generate makes masks for static caches, and the forward asks for them again."""
    from tilewise.integrations.transformers import make_mask

    made = make_mask(2, 3, 16, 6)
    assert make_mask(2, 3, 16, 6, attention_mask=made.contiguous()) is made
    assert (made.ndim, made.shape, made.keys) == (4, (2, 1, 3, 16), 9)


def test_what_is_refused() -> None:
    from tilewise.integrations.transformers import make_mask

    def decided(batch: Any, head: Any, q: Any, kv: Any) -> Any:
        return kv <= q if kv > 2 else kv == q

    said = r"(?s)test_transformers_masks.*decided.*language of tilewise.*'sdpa'"
    with pytest.raises(Unsupported, match=said):
        make_mask(2, 3, 3, mask_function=decided)
    with pytest.raises(InvalidArgument, match=r"attention_mask: got shape \(2, 1, 3, 3\)"):
        make_mask(2, 3, 3, attention_mask=torch.ones(2, 1, 3, 3))
    made = make_mask(2, 3, 3)
    with pytest.raises(AttributeError, match=r"no tensor: it has no \.dtype"):
        made.dtype  # noqa: B018
    with pytest.raises(Unsupported, match="looks into its mask"):
        made[..., :2]
    with pytest.raises(Unsupported, match="the index 0 of a mask"):
        made[0]
