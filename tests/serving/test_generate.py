"""Greedy decoding of many prompts, over pages: what each prompt gets alone."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tests.serving.models import drawn_prompts, one_at_a_time
from tilelab.models import decoding
from tilelab.models.gpt2 import GPT2, Shape
from tilewise import masks, scores
from tilewise.errors import InvalidArgument, OutOfPages, Unsupported
from tilewise.serving import Attend, KVCache, PagedKVCache, generate

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


def test_no_more_run_at_once_than_were_asked_for() -> None:
    model, rows = byte_model(), []
    step, caches = decoding.step(model), decoding.caches(model, pages=8, page_size=4)

    def counted(tokens: Tensor, *rest: Any) -> Tensor:
        rows.append(len(tokens))
        return step(tokens, *rest)

    generate(counted, caches, [[1], [2], [3]], new_tokens=2, concurrent=2)
    assert rows == [2, 2, 1, 1]


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
    assert [len(each) for each in generate(step, caches, [[2] * 14], **words)] == [3], "4 pages fit"

    def of_every_token(tokens: Tensor, positions: Tensor, *rest: Any) -> Tensor:
        return torch.zeros(len(tokens), 128)

    with pytest.raises(
        InvalidArgument, match=r"^step: got shape \(3, 128\); required: logits \[2,"
    ):
        generate(of_every_token, caches, [[1], [2, 3]], **words)
    assert all(cache.free_pages == cache.pages for cache in caches)
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


# ---- Which calls give a row the same bits: prompts in pieces, and sequences in other company.
#
# Keys are cut into blocks at every multiple of 128, but a rest of fewer than 64 at the end joins
# the block before it. That, and whether there are more than 8 queries, is all that a row's bits
# know. With AMX tiles, in bfloat16, they also know whether heads share keys, and more than 8
# queries have blocks of 64 keys where heads are no wider than 64.


HEADS, KV_HEADS, WIDTH = 4, 2, 16
shared_or_not = pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])


def drawn(heads: int, rows: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, heads, rows, WIDTH, generator=generator).to(dtype)


def block_keys(dtype: torch.dtype) -> int:
    """Keys of a block where there are more than 8 queries."""
    core = pytest.importorskip("tilewise._core")
    return 64 if dtype == torch.bfloat16 and core.isa_active() == "avx512_amx" else 128


def cuts(keys: int, row: int, block: int = 128) -> list[int]:
    """Where the keys that a row sees are cut in a call of so many keys."""
    blocks = max(1, (keys + block // 2) // block)
    return [block * i for i in range(1, blocks) if block * i <= row]


def in_pieces(kind: str, q: Tensor, k: Tensor, v: Tensor, ends: list[int]) -> Tensor:
    """The output of a prompt that is appended and attended in pieces."""
    sizes: dict[str, Any] = {"kv_heads": KV_HEADS, "head_dim": WIDTH, "dtype": q.dtype}
    pieces, start = [], 0
    rows = KVCache(batch=1, capacity=q.shape[2], **sizes)
    pages = PagedKVCache(pages=40, page_size=48, **sizes)
    sequence = pages.add()
    for end in ends:
        part = slice(start, end)
        if kind == "rows":
            rows.append(k[:, :, part], v[:, :, part])
            pieces.append(rows.attend(q[:, :, part]))
        else:
            pages.append([sequence], k[:, :, part], v[:, :, part])
            pieces.append(pages.attend([sequence], q[:, :, part]))
        start = end
    return torch.cat(pieces, 2)


@pytest.mark.parametrize("kind", ["rows", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("piece", [64, 100, 192, 37, 9])
@pytest.mark.parametrize("length", [512, 690])
def test_prompts_in_pieces(length: int, piece: int, dtype: torch.dtype, kind: str) -> None:
    """The bits of one piece wherever the keys are cut as in one piece."""
    q, k, v = (drawn(h, length, s, dtype) for s, h in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    whole = tilewise.attention(q, k, v, mask=masks.causal())
    ends = list(range(piece, length, piece))
    if length - (ends[-1] if ends else 0) <= 8:
        del ends[-1]  # another kernel would have the last few
    ends.append(length)
    found = in_pieces(kind, q, k, v, ends)
    own_end = [end for start, end in zip([0, *ends], ends, strict=False) for _ in range(start, end)]
    block = block_keys(dtype)
    equal = [
        row for row in range(length) if cuts(own_end[row], row, block) == cuts(length, row, block)
    ]
    assert len(equal) == length or piece % 64
    assert len(equal) > length // 2
    assert_same_bits(found[:, :, equal], whole[:, :, equal], "rows")
    torch.testing.assert_close(found, whole, rtol=2e-2, atol=2e-2)


@shared_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_few_queries_are_as_many_single_ones(dtype: torch.dtype, kv_heads: int) -> None:
    """What speculative decoding asks for: up to 8 at once, or one by one."""
    length = 330
    q, k, v = (drawn(h, length, s, dtype) for s, h in enumerate((HEADS, kv_heads, kv_heads)))

    def few(end: int, rows: int) -> Tensor:
        keys = k[:, :, :end], v[:, :, :end]
        return tilewise.attention(q[:, :, end - rows : end], *keys, mask=masks.causal())

    compared = 0
    for end in range(120, length, 11):
        together = few(end, 8)
        for i in range(8):
            row = end - 8 + i
            if cuts(end, row) == cuts(row + 1, row):
                compared += 1
                assert_same_bits(together[:, :, i : i + 1], few(row + 1, 1), f"row {row}")
    assert compared > 120
