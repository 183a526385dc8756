"""Greedy decoding of many prompts, over pages: what each prompt gets alone."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.serving.models import drawn_prompts, one_at_a_time
from tilelab.models import decoding
from tilelab.models.gpt2 import GPT2, Shape
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, OutOfPages, Unsupported
from tilewise.serving import Attend, PagedKVCache, generate

BYTES, CONTEXT, STOP = 256, 128, range(12)


def byte_model(**variant: Any) -> GPT2:
    """A byte GPT in float64, so that no two logits are near by rounding; far from even."""
    model = GPT2(Shape(layers=2, heads=2, width=32, context=CONTEXT, vocabulary=BYTES), **variant)
    for parameter in model.parameters():
        parameter.data *= 8.0 if parameter.dim() == 2 else 1.0
    return model.double().eval()


def written_out(model: GPT2, prompt: list[int], count: int, stop: Container[int]) -> list[int]:
    """Greedy decoding by the whole model, over all tokens each time."""
    found: list[int] = []
    with torch.no_grad():
        while len(found) < count and (not found or found[-1] not in stop):
            found.append(int(model(torch.tensor([prompt + found]))[0, -1].argmax()))
    return found


def test_sixty_four_sequences_at_once() -> None:
    """Some prompts wait until others end; all have what they have alone, and written out."""
    model = byte_model()
    prompts = drawn_prompts(72, BYTES, 40)
    counts = [1 + 7 * i % 13 for i in range(72)]
    caches = decoding.caches(model, pages=180, page_size=8)
    sizes: list[int] = []

    def watched(tokens: Tensor, positions: Tensor, rows: Tensor, attend: Attend) -> Tensor:
        sizes.append(len(rows))
        return step(tokens, positions, rows, attend)

    step = decoding.step(model)
    together = generate(watched, caches, prompts, new_tokens=counts, stop=STOP)
    assert max(sizes) > 32
    assert len(set(sizes)) > 10
    assert all(cache.free_pages == 180 for cache in caches)
    alone = one_at_a_time(step, caches, prompts, counts, STOP)
    assert together == alone
    roomy = decoding.caches(model, pages=900, page_size=16)
    sizes.clear()
    assert generate(watched, roomy, prompts, new_tokens=counts, stop=STOP) == alone
    assert max(sizes) == sizes[0] == 64
    for i in range(0, 72, 8):
        assert alone[i] == written_out(model, prompts[i], counts[i], STOP)
    assert len({token for found in alone for token in found}) > 20
    assert any(found[-1] in STOP and len(found) < counts[i] for i, found in enumerate(alone))


def test_windows_alibi_and_eight_bits() -> None:
    slopes = torch.tensor([0.5, 0.1])
    model = byte_model(mask=masks.window(11, 0), score=scores.alibi(slopes))
    prompts = drawn_prompts(6, BYTES, 40)
    caches = decoding.caches(model, pages=40, page_size=4)
    assert [cache.window for cache in caches] == [12, 12]
    found = generate(decoding.step(model), caches, prompts, new_tokens=30, concurrent=4)
    assert found == [written_out(model, prompt, 30, ()) for prompt in prompts]
    small = decoding.caches(model, pages=40, page_size=4, storage=torch.int8)
    words: dict[str, Any] = {"new_tokens": 10, "concurrent": 4}
    rounded = generate(decoding.step(model), small, prompts, **words)
    assert rounded == one_at_a_time(decoding.step(model), small, prompts, [10] * 6, ())


@pytest.mark.parametrize("window", [None, 1, 7, 8, 20])
@pytest.mark.parametrize("page_size", [1, 4, 8])
def test_pages_that_are_needed_at_most(page_size: int, window: int | None) -> None:
    for first, total in ((1, 40), (13, 40), (33, 34), (5, 5), (8, 7)):
        cache = PagedKVCache(pages=64, page_size=page_size, kv_heads=1, head_dim=1, window=window)
        sequence, most = cache.add(), 0
        rows = torch.zeros(1, 1, max(first, total), 1)
        for count in (first, *[1] * (total - first)):
            cache.append([sequence], rows[:, :, :count], rows[:, :, :count])
            most = max(most, 64 - cache.free_pages)
        assert most <= cache.pages_for(first, total) <= most + (window is not None)


def test_what_is_refused() -> None:
    model = byte_model()
    step, caches = decoding.step(model), decoding.caches(model, pages=4, page_size=4)
    words: dict[str, Any] = {"new_tokens": 3}
    with pytest.raises(InvalidArgument, match=r"^caches: got none"):
        generate(step, [], [[1]], **words)
    with pytest.raises(InvalidArgument, match=r"^prompts: got no tokens in prompt 1"):
        generate(step, caches, [[1], []], **words)
    with pytest.raises(InvalidArgument, match=r"^new_tokens: got 2 numbers; required: one number"):
        generate(step, caches, [[1]], new_tokens=[1, 2])
    with pytest.raises(InvalidArgument, match=r"^new_tokens: got 0"):
        generate(step, caches, [[1]], new_tokens=0)
    with pytest.raises(InvalidArgument, match=r"^concurrent: got 0"):
        generate(step, caches, [[1]], **words, concurrent=0)
    with pytest.raises(OutOfPages, match=r"^5 pages are needed, and 4 of 4 are free"):
        generate(step, caches, [[1], [2] * 15], **words)
    assert generate(step, caches, [], **words) == []
    roomy = decoding.caches(model, pages=400, page_size=4)
    with pytest.raises(InvalidArgument, match=r"^prompts: got one with a token at position 128"):
        generate(step, roomy, [[1], [2] * 127], **words)
    assert roomy[0].free_pages == 400  # nothing stays behind
    with pytest.raises(InvalidArgument, match=r"^model: got one in training mode"):
        decoding.step(byte_model().train())
    for variant in (
        {"mask": masks.causal("top_left")},
        {"score": scores.bias(torch.zeros(2, CONTEXT, CONTEXT))},
        {"score": lambda s, b, h, m, n: s - m},
    ):
        with pytest.raises(Unsupported, match=r"(?s)may count queries from the first.*causal\(\)"):
            decoding.step(byte_model(**variant))
        with pytest.raises(Unsupported, match="may count queries"):
            decoding.caches(byte_model(**variant), pages=4, page_size=4)


def test_rows_of_different_numbers_are_appended() -> None:
    cache = PagedKVCache(pages=9, page_size=4, kv_heads=2, head_dim=3)
    one, other = cache.add(), cache.add()
    rows = torch.arange(42.0).view(7, 2, 3)
    cache.append([one, other], rows, -rows, torch.tensor([0, 5, 7]))
    table, lengths = cache.tables([one, other])
    assert lengths.tolist() == [5, 2]
    found = cache.k_pages[table[0, :2].long()].transpose(1, 2).flatten(0, 1)[:5]
    assert torch.equal(found, rows[:5])
    assert torch.equal(cache.v_pages[int(table[1, 0]), :, :2], -rows[5:].transpose(0, 1))
    for wrong, said in (
        (torch.tensor([0, 5]), r"got shape \(2,\); required: an int32 or int64"),
        (torch.tensor([0, 5, 6]), "got 6 as its last entry"),
        (torch.tensor([0.0, 5, 7]), "got a tensor of torch.float32"),
    ):
        with pytest.raises(InvalidArgument, match=f"^cu_seqlens: {said}"):
            cache.append([one, other], rows, rows, wrong)
    assert cache.free_pages == 6
