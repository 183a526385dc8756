"""Models of transformers over paged caches: 64 prompts at once as one at a time, and as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.tiny_models import DECODERS, TOKENS, both
from tests.serving.models import drawn_prompts, one_at_a_time
from tilewise.errors import InvalidArgument, Unsupported
from tilewise.serving import generate

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("transformers_with_tilewise"),
]
STOP = range(3, 8)


def models(name: str) -> tuple[Any, Any]:
    """The model by eager and over pages, in float64: no two logits are near by rounding."""
    eager, ours = both(name)
    ours.set_attn_implementation("tilewise_paged")
    return eager.double(), ours.double()


def by_eager(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding by the whole model, over all tokens each time."""
    found: list[int] = []
    with torch.no_grad():
        while len(found) < count and (not found or found[-1] not in STOP):
            logits = model(torch.tensor([prompt + found]), use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found


@pytest.mark.parametrize("name", list(DECODERS))
def test_as_eager(name: str) -> None:
    """Windows, softcaps, sinks, learned positions."""
    from tilewise.integrations.transformers import paged_caches, paged_step

    eager, ours = models(name)
    prompts = drawn_prompts(5, TOKENS, 20)
    caches = paged_caches(ours, pages=24, page_size=4)
    found = generate(paged_step(ours), caches, prompts, new_tokens=9, stop=STOP, concurrent=3)
    assert found == [by_eager(eager, prompt, 9) for prompt in prompts]
    assert len({token for each in found for token in each}) > 3, "the test would see nothing"
    assert all(cache.free_pages == 24 for cache in caches)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "minicpm3", "mistral4", "youtu"])
def test_latent_pages_as_eager(name: str) -> None:
    """MLA in its absorbed form: pages hold one latent and one rotated key for each token."""
    from tilewise.integrations.transformers import absorb, paged_caches, paged_step

    eager, ours = both(name)  # in float32: torch's products of experts know no float64
    ours.set_attn_implementation("tilewise_paged")
    absorb(ours)
    prompts = drawn_prompts(5, TOKENS, 20)
    caches = paged_caches(ours, pages=24, page_size=4)
    assert [each.k_pages.shape for each in caches] == [(24, 1, 4, 24)] * 2
    assert all(each.v_pages.data_ptr() == each.k_pages.data_ptr() for each in caches)
    found = generate(paged_step(ours), caches, prompts, new_tokens=9, stop=STOP, concurrent=3)
    assert found == [by_eager(eager, prompt, 9) for prompt in prompts]
    assert len({token for each in found for token in each}) > 3, "the test would see nothing"


def test_sixty_four_at_once() -> None:
    from tilewise.integrations.transformers import paged_caches, paged_step

    _, ours = models("gemma2")
    prompts = drawn_prompts(68, TOKENS, 30)
    counts = [1 + 7 * i % 11 for i in range(68)]
    caches = paged_caches(ours, pages=700, page_size=4)
    assert {cache.window for cache in caches} == {None, 6}
    running: list[int] = []
    step = paged_step(ours)

    def watched(tokens: Any, positions: Any, rows: Any, attend: Any) -> Any:
        running.append(len(rows))
        return step(tokens, positions, rows, attend)

    together = generate(watched, caches, prompts, new_tokens=counts, stop=STOP)
    assert running[0] == 64
    assert sum(running) > 64 + 68  # some go on, and some come later
    assert together == one_at_a_time(step, caches, prompts, counts, list(STOP))


def test_what_is_refused() -> None:
    from tilewise.integrations.transformers import paged_caches, paged_forward, paged_step

    _, ours = both("llama")
    with pytest.raises(InvalidArgument, match=r"^model: got one with attn_implementation='tilew"):
        paged_step(ours)
    ours.set_attn_implementation("tilewise_paged")
    with pytest.raises(Unsupported, match=r"(?s)outside of tilewise.serving.generate.*paged_step"):
        ours(torch.tensor([[3, 4]]))
    step, caches = paged_step(ours), paged_caches(ours, pages=4, page_size=4)
    ours.set_attn_implementation("eager")
    with pytest.raises(Unsupported, match="a model of 2 layers, 0 of which attend over paged"):
        generate(step, caches, [[3]], new_tokens=1)
    ours.set_attn_implementation("tilewise_paged")
    with pytest.raises(InvalidArgument, match=r"^model: got one in training mode"):
        paged_step(ours.train())
    ours.eval().config.layer_types = ["full_attention", "chunked_attention"]
    for call in (paged_step, lambda model: paged_caches(model, pages=4, page_size=4)):
        with pytest.raises(Unsupported, match="layers of chunked_attention over paged caches"):
            call(ours)
    _, latent = both("deepseek_v3")
    latent.set_attn_implementation("tilewise_paged")
    with pytest.raises(Unsupported, match=r"(?s)naive form of latent .*absorb\(model\) first"):
        paged_step(latent)
    _, whisper = both("whisper")
    whisper.set_attn_implementation("tilewise_paged")
    with pytest.raises(Unsupported, match="an encoder and decoder over paged caches"):
        paged_step(whisper)
    q, layer = torch.randn(1, 2, 5, 8), torch.nn.Module()
    words: dict[str, Any] = {"tilewise_attend": print}
    for more, said in (
        ({"position_bias": q}, "position_bias"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": q}, "attention_mask"),
        ({"dropout": 0.5}, "dropout"),
        ({"indices": q}, "indices"),
        ({"is_causal": False}, "not causal"),
    ):
        with pytest.raises(Unsupported, match=f"{said} over paged caches"):
            paged_forward(layer, q, q, q, **{"attention_mask": None, **words, **more})
    two = q.expand(2, -1, -1, -1)
    with pytest.raises(Unsupported, match="2 batch items over paged caches"):
        paged_forward(layer, two, two, two, None, **words)
