"""The absorbed form of MLA in models of transformers: equal to the naive one, of the same cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tests.contract import assert_exact
from tests.integrations.tiny_models import INDEXED, LATENT, assert_equal_to_float32, both, tokens
from tilewise.errors import InvalidArgument, Unsupported

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]
NAMES = sorted({*LATENT, *INDEXED} - {"minimax_m3_vl", "qwen4_exp", "deepseek_v4"})


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of an absorbed layer took the absorbed form."""
    from tilewise.integrations.transformers import forward, latent

    taken: list[bool] = []

    def noted(*given: Any) -> Any:
        found = latent.operands(*given)
        taken.append(found[-1] is not None)
        return found

    monkeypatch.setattr(forward, "operands", noted)
    return taken


def absorbed(name: str) -> tuple[Any, Any]:
    """The model by eager, and by tilewise with its layers absorbed."""
    from tilewise.integrations.transformers import absorb

    eager, ours = both(name)
    absorb(ours)
    return eager, ours


def pieces(model: Any, ids: Tensor, cache: Any = None, **given: Any) -> Tensor:
    """Logits of a prompt of 9, a piece of 2 and tokens one by one, through a cache."""
    parts = []
    with torch.no_grad():
        for piece in ids.split([9, 2, *[1] * (ids.shape[1] - 11)], 1):
            out = model(piece, past_key_values=cache, use_cache=True, **given)
            cache = out.past_key_values
            parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("own_cache", [False, True], ids=["dynamic", "latent"])
@pytest.mark.parametrize("name", NAMES)
def test_pieces_of_a_prompt_and_tokens(name: str, own_cache: bool, forms: list[bool]) -> None:
    from tilewise.integrations.transformers import latent_cache

    eager, ours = absorbed(name)
    ids = tokens(2, 15)
    found = pieces(ours, ids, latent_cache(ours) if own_cache else None)
    assert_equal_to_float32(found, eager(ids, use_cache=False).logits)
    assert set(forms[: len(forms) // 6]) == {False}, "the prompt is cheaper in the naive form"
    assert forms.count(True) >= 5 * forms.count(False), "all calls after it are absorbed"


@pytest.mark.parametrize("cache", ["dynamic", "static", "latent"])
@pytest.mark.parametrize("name", NAMES)
def test_generate_from_prompts_padded_on_the_left(name: str, cache: str, forms: list[bool]) -> None:
    from tilewise.integrations.transformers import latent_cache

    ids = tokens(3, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = mask[1, :1] = 0
    said: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    said |= {"attention_mask": mask}
    eager, ours = absorbed(name)
    due = eager.generate(ids * mask, **said)
    kind = "past_key_values" if cache == "latent" else "cache_implementation"
    given = latent_cache(ours) if cache == "latent" else cache
    assert torch.equal(ours.generate(ids * mask, **said, **{kind: given}), due)
    assert len(set(due[:, -12:].flatten().tolist())) > 1, "the test would see nothing"
    assert any(forms)


REAL = {
    "vocab_size": 99,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mlp_layer_types": ["dense", "dense"],  # no routes that rounding could change
    "initializer_range": 0.08,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_head_shapes_of_deepseek_by_the_2x_rule(dtype: torch.dtype, forms: list[bool]) -> None:
    """Logits of decoded tokens: against float64, as near as the naive form by eager."""
    import transformers

    from tilewise.integrations.transformers import absorb, latent_cache

    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**REAL)
    kind = transformers.DeepseekV3ForCausalLM
    eager = kind._from_config(config, attn_implementation="eager").eval().to(dtype)
    ours = deepcopy(eager)
    ours.set_attn_implementation("tilewise")
    absorb(ours)
    ids = tokens(1, 40)
    found = pieces(ours, ids, latent_cache(ours))
    assert_exact(found, pieces(eager, ids), pieces(eager.double(), ids), "logits")
    assert forms.count(True) == 2 * 30


def test_keys_and_values_are_views_of_a_latent_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of a token in the cache, and no other bytes for attention."""
    from tilewise.integrations.transformers import forward, latent_cache

    seen: list[tuple[int, int]] = []

    def noted(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
        seen.append((k.data_ptr(), v.data_ptr()))
        return tilewise.attention(q, k, v, **keywords)

    monkeypatch.setattr(forward, "by_the_faster", noted)
    _, ours = absorbed("deepseek_v3")
    cache = latent_cache(ours)
    pieces(ours, tokens(2, 15), cache)
    rooms = [layer.room for layer in cache.layers]
    assert all(room.shape[3] == 16 + 8 and 15 <= room.shape[2] <= 17 for room in rooms)
    assert seen[-2:] == [(room.data_ptr(),) * 2 for room in rooms]


def test_gradients_of_the_absorbed_form(forms: list[bool]) -> None:
    """Through a cache of transformers, whose latents have gradients too."""
    eager, ours = absorbed("deepseek_v3")
    ids, gradients = tokens(2, 20), []
    for model in (eager, ours):
        past = model(ids[:, :18], use_cache=True).past_key_values
        logits = model(ids[:, 18:], past_key_values=past).logits
        logits.logsumexp(-1).sum().backward()
        gradients.append([each.grad for each in model.parameters() if each.grad is not None])
    assert forms == [False, False, True, True]
    assert len(gradients[0]) > 10
    for due, got in zip(*gradients, strict=True):
        assert_equal_to_float32(got, due)


def test_a_latent_cache_that_is_reordered_and_cropped() -> None:
    """Beams, and tokens that are taken back."""
    from tilewise.integrations.transformers import latent_cache

    eager, ours = absorbed("deepseek_v3")
    ids = tokens(2, 9)
    said: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "num_beams": 3}
    found = ours.generate(ids, do_sample=False, past_key_values=latent_cache(ours), **said)
    assert torch.equal(found, eager.generate(ids, do_sample=False, **said))
    cache = latent_cache(ours)
    with torch.no_grad():
        ours(tokens(2, 12, seed=3)[:, :9], past_key_values=cache)
        cache.reset()
        ours(torch.cat((ids, ids[:, :3]), 1), past_key_values=cache)
        cache.crop(-3)
        logits = ours(ids[:, :1], past_key_values=deepcopy(cache)).logits
        due = eager(torch.cat((ids, ids[:, :1]), 1), use_cache=False).logits[:, -1:]
    assert_equal_to_float32(logits, due)
    with pytest.raises(Unsupported, match=r"(?s)gradients of what is in a latent_cache.*use_cache"):
        ours(ids[:, :1], past_key_values=cache)


def test_copies_other_implementations_and_the_way_back(forms: list[bool]) -> None:
    """The switch is the model's own; another implementation gets the keys that it knows."""
    from tilewise.integrations.transformers import absorb, unabsorb

    eager, ours = absorbed("deepseek_v2")
    absorb(ours)
    ids = tokens(2, 15)
    due, names = pieces(eager, ids), eager.state_dict().keys()
    copy = deepcopy(ours)
    for each in ours.parameters():
        each.data.zero_()
    assert_equal_to_float32(pieces(copy, ids), due)
    assert any(forms)
    forms.clear()
    copy.set_attn_implementation("eager")
    assert_equal_to_float32(pieces(copy, ids), due)
    copy.set_attn_implementation("tilewise")
    unabsorb(copy)
    unabsorb(copy)
    assert_equal_to_float32(pieces(copy, ids), due)
    assert not forms
    assert copy.state_dict().keys() == names


def test_latents_wider_than_the_kernels_are_refused() -> None:
    """When they are decoded: the prompt takes the naive form."""
    import transformers

    from tilewise.integrations.transformers import absorb

    config = transformers.DeepseekV3Config(**{**REAL, "kv_lora_rank": 520})
    kind = transformers.DeepseekV3ForCausalLM
    model = kind._from_config(config, attn_implementation="tilewise").eval()
    absorb(model)
    cache = model(tokens(1, 9)).past_key_values
    with pytest.raises(Unsupported, match="limit of 576"):
        model(tokens(1, 1), past_key_values=cache)


def test_what_cannot_be_absorbed_is_refused() -> None:
    from tilewise.integrations.transformers import absorb, unabsorb

    eager, ours = both("deepseek_v3")
    with pytest.raises(InvalidArgument, match=r"(?s)^model: got one with attn_implementation='eag"):
        absorb(eager)
    for call in (absorb, unabsorb):
        with pytest.raises(Unsupported, match="LlamaForCausalLM, no layer of which has latents"):
            call(both("llama")[1])
    layer = ours.model.layers[1].self_attn
    plain = layer.kv_b_proj

    class Adapted(nn.Linear):
        pass

    hooked = deepcopy(plain)
    hooked.register_forward_hook(lambda *given: None)
    biased = nn.Linear(plain.in_features, plain.out_features)
    for other in (Adapted(plain.in_features, plain.out_features, bias=False), hooked, biased):
        layer.kv_b_proj = other
        with pytest.raises(Unsupported, match=r"(?s)whose kv_b_proj is not .*unabsorb"):
            absorb(ours)
    layer.kv_b_proj = plain
    absorb(ours)
    layer.kv_b_proj = hooked  # later
    with pytest.raises(Unsupported, match="whose kv_b_proj is not"):
        ours(tokens(1, 3))
    unabsorb(ours)
    ours(tokens(1, 3))
