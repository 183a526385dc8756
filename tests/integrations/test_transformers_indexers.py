"""Keys that an indexer of transformers chose: conventions, memory, and models that are refused.

``test_transformers_models.py`` has the models that hand their choice over.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.integrations.tiny_models import noise
from tests.peak import only_linux, printed
from tilewise import masks
from tilewise.errors import InvalidArgument

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]

BLOCK = 4
LAYER: Any = SimpleNamespace(indexer=SimpleNamespace(block_size=BLOCK))


def seen_by(chosen: Tensor, many: int) -> Tensor:
    """Return what lists [..., K] name, as a mask [..., many]."""
    seen = torch.zeros(*chosen.shape[:-1], many + 1, dtype=torch.bool)
    return seen.scatter(-1, torch.where(chosen < 0, many, chosen), True)[..., :many]


@pytest.mark.parametrize("kind", ["keys", "blocks"])
@pytest.mark.parametrize("cached", [False, True])
def test_what_is_chosen_and_what_the_mask_lets_through(kind: str, cached: bool) -> None:
    """-1, repeats and keys of the future; with a cache that is longer than what is in it."""
    from tilewise.integrations.transformers import attention_forward, make_mask

    queries, keys, capacity = 7, 18, 24 if cached else 18
    q, k, v = noise(2, 4, queries, 8), noise(2, 2, capacity, 8, seed=3), noise(2, 2, capacity, 5)
    mask = make_mask(2, queries, capacity, keys - queries)
    drawn = torch.Generator().manual_seed(4)
    if kind == "keys":
        chosen = torch.randint(-1, capacity, (2, queries, 9), generator=drawn)
        chosen[0, 3] = -1
        chosen[:, 5, 1:3] = chosen[:, 5, :1]
        seen = seen_by(chosen, capacity)[:, None].expand(-1, 4, -1, -1)
        given: dict[str, Any] = {"indices": chosen.int()}
    else:
        chosen = torch.randint(-1, capacity // BLOCK, (2, 2, queries, 3), generator=drawn)
        seen = seen_by(chosen, -(-capacity // BLOCK)).repeat_interleave(BLOCK, -1)
        seen = seen[..., :capacity].repeat_interleave(2, dim=1)
        given = {"block_indices": chosen}
    leaves = tuple(each.requires_grad_() for each in (q, k, v))
    found, weights = attention_forward(LAYER, q, k, v, mask, **given)
    allowed = masks.dense(seen[..., :keys]) & masks.causal()
    expected = tilewise.attention(q, k[:, :, :keys], v[:, :, :keys], mask=allowed).transpose(1, 2)
    assert weights is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    along = noise(*found.shape, seed=5)
    grads = [torch.autograd.grad(out, leaves, along) for out in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_a_choice_beyond_the_keys_is_refused() -> None:
    from tilewise.integrations.transformers import attention_forward

    q, chosen = noise(1, 2, 5, 8), torch.full((1, 5, 1), 5)
    with pytest.raises(InvalidArgument, match="5 in list 0"):
        attention_forward(LAYER, q, q, q, None, indices=chosen)


def test_a_model_that_looks_into_its_mask_is_refused() -> None:
    """But for the two models that are known to do so, which get a tensor."""
    from tilewise.integrations.transformers import make_mask, mask_of_model

    with pytest.raises(AttributeError, match=r"no \.dtype.*attn_implementation='sdpa'"):
        _ = make_mask(2, 9, 9).dtype
    known = SimpleNamespace(model_type="deepseek_v4")
    found = mask_of_model(1, 2, 3, 1, config=known, dtype=torch.bfloat16)
    assert isinstance(found, Tensor)
    least = torch.finfo(torch.bfloat16).min
    assert torch.equal(found, torch.tensor([[[[0, 0, least], [0, 0, 0]]]], dtype=torch.bfloat16))


@only_linux
def test_memory_of_a_layer_follows_the_choice() -> None:
    """A layer of GLM-MoE-DSA that shares a choice: forward and backward without N x N bytes."""
    code = """
import torch
from tests.integrations.tiny_models import both
from tests.peak import Peak
from tilewise.integrations.transformers import make_mask, register
torch.set_num_threads(1)
register()
_, model = both("glm_moe_dsa")
layer = model.model.layers[1].self_attn
assert layer.indexer is None
def measure(n):
    x = torch.randn(1, n, 64, requires_grad=True)
    chosen = (torch.arange(n)[:, None] - torch.arange(8)).clamp(min=-1)[None].int()
    places = model.model.rotary_emb(x, torch.arange(n)[None])
    mask = make_mask(1, n, n)
    grad = torch.randn(1, n, 64)
    peak = Peak()
    out = layer(x, places, mask, prev_topk_indices=chosen)[0]
    out.backward(grad)
    return peak.mib()
measure(256)
print(measure(16384))
"""
    ((most,),) = printed(code)
    assert float(most) < 256 / 2
