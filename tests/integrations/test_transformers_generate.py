"""Greedy generate with every kind of cache: token for token what eager gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import (
    DECODERS,
    assert_equal_to_float32,
    both,
    inputs,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", [*DECODERS, "t5"])
def test_generate(name: str, cache: str) -> None:
    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    if name == "t5":
        mask[0, 5:] = 0
    else:
        mask[0, :4] = mask[1, :1] = 0
    ids = ids * mask
    said: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    said |= {"cache_implementation": cache, "attention_mask": mask}
    found = [model.generate(ids, **said) for model in both(name)]
    assert found[0].shape[1] == (13 if name == "t5" else 21)
    assert torch.equal(*found)
    assert len(set(found[0][:, -12:].flatten().tolist())) > 1, "the test would see nothing"


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "whisper"])
def test_a_cache_filled_in_pieces(name: str) -> None:
    """Chunked prefill: later queries, more than one, see what is in the cache."""
    given = inputs(name)
    key = "decoder_input_ids" if name == "whisper" else "input_ids"
    ids = given.pop(key)
    eager, ours = both(name)
    cache, parts = None, []
    for piece in ids.split([4, 3, ids.shape[1] - 7], 1):
        out = ours(**given, **{key: piece}, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    expected = eager(**given, **{key: ids}, use_cache=False).logits
    assert_equal_to_float32(torch.cat(parts, 1), expected)
