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
from tests.integrations.tiny_models import (
    INDEXED,
    TOKENS,
    assert_equal_to_float32,
    both,
    noise,
    tokens,
)
from tests.peak import only_linux, printed
from tilewise import masks
from tilewise.errors import InvalidArgument, Unsupported

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
    """But for the models that are known to do so, which get a tensor."""
    from tilewise.integrations.transformers import make_mask, mask_of_model

    made = make_mask(2, 9, 9)
    with pytest.raises(AttributeError, match=r"(?s)no \.dtype.*attn_implementation='eager'"):
        _ = made.dtype
    scores: Any = torch.zeros(2, 4, 9, 9)
    with pytest.raises(Unsupported, match=r"(?s)add.* of a mask.*attn_implementation='eager'"):
        scores + made
    with pytest.raises(Unsupported, match="cat of a mask"):
        torch.cat([made, made], -1)  # type: ignore[list-item]
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


# ---- indexers that choose by tiles

BY_TILES = sorted(INDEXED)
IN_TRAINING = ["deepseek_v32", "minimax_m3_vl", "glm5_next", "qwen4_exp", "deepseek_v4"]


@pytest.mark.parametrize("name", BY_TILES)
def test_indexers_by_tiles(name: str) -> None:
    """Padded batches with gradients, a static cache, a prompt in pieces: eager's results."""
    from tilewise.integrations.transformers import tile_indexers, untile_indexers

    eager, ours = both(name)
    tile_indexers(ours)
    ids, real = tokens(3, 17), torch.ones(3, 17, dtype=torch.long)
    real[1, 8] = real[2, 11:] = 0
    if name != "minimax_m3_vl":  # with padding on the left its choice leaves rows without keys
        real[0, :5] = 0
    along = noise(3, 17, TOKENS)[real.bool()]
    found = []
    for model in (eager, ours):
        logits = model(ids, attention_mask=real, use_cache=False).logits[real.bool()]
        (logits * along).sum().backward()
        weights = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        found.append((logits.detach(), weights))
    assert_equal_to_float32(found[1][0], found[0][0], "logits")
    assert found[1][1].keys() == found[0][1].keys()
    largest = max(float(each.abs().max()) for each in found[0][1].values())
    for key, gradient in found[0][1].items():
        assert_equal_to_float32(found[1][1][key], gradient, key, least=largest / 10)

    said: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    said |= {"attention_mask": real[:2]}
    if name != "deepseek_v4":  # transformers has no static cache for compressed keys
        said |= {"cache_implementation": "static"}
    assert torch.equal(*(model.generate(ids[:2], **said) for model in (eager, ours)))
    cache, parts = None, []
    for piece in ids.split([4, 3, 10], 1):
        out = ours(piece, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        parts.append(out.logits)
    assert_equal_to_float32(torch.cat(parts, 1), eager(ids, use_cache=False).logits)
    untile_indexers(ours)
    assert_equal_to_float32(ours(ids, use_cache=False).logits, torch.cat(parts, 1))


def test_a_choice_of_pools_in_other_forms() -> None:
    """Layers that are absorbed read the list; those of eager get the mask that they know."""
    from tilewise.integrations.transformers import absorb, tile_indexers

    eager, ours = both("glm5_next")
    tile_indexers(ours)
    absorb(ours)
    said: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(*(model.generate(tokens(2, 17), **said) for model in (eager, ours)))
    ours.set_attn_implementation("eager")
    found, expected = (model(tokens(3, 17), use_cache=False).logits for model in (ours, eager))
    assert_equal_to_float32(found, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_best_blocks(dtype: torch.dtype) -> None:
    """Each head's own, over several tiles; of equal scores the lowest block; NaN before all."""
    from tilewise.integrations.transformers.unwritten import best_blocks

    rows, keys, block, k = 67, 9001, 4, 6
    drawn = torch.Generator().manual_seed(7)
    q, shared = (
        torch.randint(-2, 3, size, generator=drawn).to(dtype)
        for size in ((2, 8, rows, 4), (2, 1, keys, 4))
    )
    shared[1, 0, 5] = torch.nan
    limits = torch.randint(0, keys + 9, (2, rows), generator=drawn)
    limits[0, 3] = 0
    local = torch.randint(0, keys // block, (2, 8, rows, 1), generator=drawn)
    scores = (q @ shared.mT).masked_fill_(
        torch.arange(keys) >= limits[:, None, :, None], -torch.inf
    )
    scores = torch.nn.functional.pad(scores, (0, -keys % block), value=-torch.inf)
    scores = scores.unflatten(-1, (-1, block)).amax(-1).scatter_(-1, local, torch.inf)
    expected = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(keys)[None]
    found = best_blocks(q, shared, places, limits, block, k, local)
    torch.testing.assert_close(found[0], expected.values[..., :k], equal_nan=True, rtol=0, atol=0)
    assert torch.equal(found[1], expected.indices[..., :k])
    finer = q + 1e-3, shared, places, limits, block, k  # beyond 16 bits
    with torch.autocast("cpu", torch.bfloat16):
        cast = best_blocks(*finer)
    torch.testing.assert_close(cast, best_blocks(*finer), equal_nan=True, rtol=0, atol=0)


def test_blocks_where_none_is_sure_of_its_place() -> None:
    """The key of the query itself counts: without local blocks it decides for its block."""
    from tilewise.integrations.transformers import tile_indexers

    eager, ours = both("minimax_m3_vl")
    tile_indexers(ours)
    for model in (eager, ours):
        for layer in (model.model.layers[0], model.model.layers[2]):
            layer.self_attn.indexer.local_blocks = 0
    found, expected = (model(tokens(3, 17), use_cache=False).logits for model in (ours, eager))
    assert_equal_to_float32(found, expected)


def test_what_indexers_by_tiles_refuse() -> None:
    from tilewise.integrations.transformers import tile_indexers

    _, ours = both("llama")
    with pytest.raises(Unsupported, match="LlamaForCausalLM, which has no indexer"):
        tile_indexers(ours)
    _, ours = both("deepseek_v32")
    tile_indexers(ours)
    ids = tokens(2, 9)
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()
    given = ours(ids, attention_mask=seen, use_cache=False).logits
    assert_equal_to_float32(given, ours(ids, use_cache=False).logits)
    with pytest.raises(Unsupported, match=r"(?s)adding a floating mask.*untile_indexers"):
        ours(ids, attention_mask=torch.zeros(2, 1, 9, 9), use_cache=False)
    with pytest.raises(Exception, match="an indexer by tiles under"):
        torch.compile(ours, backend="eager", fullgraph=True)(ids, use_cache=False)


def test_a_choice_of_tokens_under_other_masks() -> None:
    """A boolean tensor works; what has no common order of tokens, or is added, is refused."""
    from tilewise.integrations.transformers import tile_indexers

    eager, ours = both("qwen4_exp")
    tile_indexers(ours)
    ids, seen = tokens(2, 17), torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    found = ours(ids, attention_mask=seen, use_cache=False).logits
    assert_equal_to_float32(found, eager(ids, use_cache=False).logits)
    with pytest.raises(Unsupported, match=r"(?s)a floating mask.*untile_indexers"):
        ours(ids, attention_mask=torch.zeros(2, 1, 17, 17), use_cache=False)
    packed = torch.cat((torch.arange(8), torch.arange(9)))[None]
    with pytest.raises(Unsupported, match=r"(?s)the first of some order.*untile_indexers"):
        ours(ids[:1], position_ids=packed, use_cache=False)
    with pytest.raises(Unsupported, match="the first of some order"):
        ours(ids, attention_mask=seen & ~seen.tril(-9), use_cache=False)
    with pytest.raises(Exception, match="an indexer by tiles under"):
        torch.compile(ours, backend="eager", fullgraph=True)(ids, use_cache=False)


def test_compressed_keys_and_a_mask_that_is_a_tensor() -> None:
    """It is refused, for it would have to be extended; and nothing of it stays behind."""
    from tilewise.integrations.transformers import tile_indexers, untile_indexers

    eager, ours = both("deepseek_v4")
    tile_indexers(ours)
    ids, seen = tokens(2, 17), torch.ones(2, 1, 17, 17, dtype=torch.bool).tril()
    with pytest.raises(Unsupported, match=r"(?s)a mask that is a tensor.*untile_indexers"):
        ours(ids, attention_mask=seen, use_cache=False)
    ours.set_attn_implementation("eager")
    with pytest.raises(Unsupported, match="a mask that is a tensor"):
        ours(ids, use_cache=False)
    ours.set_attn_implementation("tilewise")
    untile_indexers(ours)
    expected = eager(ids, use_cache=False).logits
    assert_equal_to_float32(ours(ids, use_cache=False).logits, expected)
    tile_indexers(ours)
    assert_equal_to_float32(ours(ids, use_cache=False).logits, expected)
    for layer in ours.model.layers[1:]:
        compressor = torch.compile(layer.self_attn.compressor, backend="eager", fullgraph=True)
        with pytest.raises(Exception, match="an indexer by tiles under"):
            compressor(noise(2, 17, 64), noise(2, 17, 32), torch.arange(17)[None], None, 1)


MEMORY = """
import sys, torch
from tests.integrations.tiny_models import both
from tests.peak import Peak
from tilewise.integrations.transformers import register, tile_indexers
torch.set_num_threads(1)
register()
_, model = both(sys.argv[1])
tile_indexers(model)
model = getattr(model.model, "language_model", model.model)
def measure(n, training):
    ids = torch.arange(n)[None] % 90 + 3
    peak = Peak()
    with torch.set_grad_enabled(training):
        out = model(ids, use_cache=False).last_hidden_state
        if training:
            out.sum().backward()
    return peak.mib()
lengths = [int(each) for each in sys.argv[3:]]
print(*[measure(n, sys.argv[2] == "training") for n in (256, *lengths)][1:])
"""


@only_linux
@pytest.mark.parametrize("name", BY_TILES)
def test_memory_of_a_prompt(name: str) -> None:
    """A model over 8,192 tokens at once: fewer bytes than N x N booleans alone."""
    ((most,),) = printed(MEMORY, name, "prompt", "8192")
    assert float(most) < 64


@only_linux
@pytest.mark.parametrize("name", IN_TRAINING)
def test_memory_of_training(name: str) -> None:
    """Twice the tokens take at most twice the memory, forward and backward.

    N x N booleans would add 32 MiB to that. The six by ``top_keys`` alone share their code.
    DeepSeek-V3.2 is one of them.
    """
    ((half, whole),) = printed(MEMORY, name, "training", "4096", "8192")
    assert float(whole) < 2 * float(half) + 16
