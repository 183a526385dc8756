"""Common keys read once for all: attention over everything but for rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import tilewise
from tests.cases import drawn
from tests.contract import assert_exact, assert_same_bits
from tests.paged import Paged, in_pages
from tests.plain import attend
from tilewise import AttentionResult, attention_paged, masks, scores
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.serving import KVCache, PagedKVCache, cascade_attention

HEADS, KV_HEADS, WIDTH, VALUE_WIDTH, SIZE, COMMON = 6, 2, 16, 12, 16, 160
OWN = (3, 40, 150)  # keys of each sequence behind the common ones


def plain(
    q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, cap: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of one sequence, [Hq, M, D] and [Hk, N, D]; out and lse."""
    later = k.shape[1] - q.shape[1]
    rows = attend(
        *(x[None].to(dtype) for x in (q, k, v)),
        score=(lambda s, *_: cap * (s / cap).tanh()) if cap else None,
        mask=lambda b, h, m, n: n <= m + later,
        sinks=sinks,
    )
    s = rows.s[0]
    if sinks is not None:
        s = torch.cat([s, sinks.to(dtype)[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return rows.out[0], s.to(torch.promote_types(dtype, torch.float32)).logsumexp(-1)


def sequences(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Paged]:
    """Keys and values of each sequence, and pages in which the common ones are there once."""
    start = [drawn(KV_HEADS, COMMON, w, seed=w, dtype=dtype) for w in (WIDTH, VALUE_WIDTH)]
    keys, values = [], []
    for i, own in enumerate(OWN):
        keys.append(torch.cat([start[0], drawn(KV_HEADS, own, WIDTH, seed=i, dtype=dtype)], 1))
        more = drawn(KV_HEADS, own, VALUE_WIDTH, seed=9 + i, dtype=dtype)
        values.append(torch.cat([start[1], more], 1))
    pages = in_pages(keys, values, SIZE)
    pages.block_table[:, : COMMON // SIZE] = pages.block_table[:1, : COMMON // SIZE]
    return keys, values, pages


@pytest.mark.parametrize("variant", ["", "softcap", "sinks"])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_2x_rule(dtype: torch.dtype, queries: int, variant: str) -> None:
    keys, values, pages = sequences(dtype)
    q = drawn(len(OWN), HEADS, queries, WIDTH, seed=30, dtype=dtype)
    words: dict[str, Any] = {"return_lse": True}
    sinks, cap = None, 0.0
    if variant == "sinks":
        sinks = words["sinks"] = drawn(HEADS, seed=31)
    if variant == "softcap":
        cap = 1.5
        words["score"] = scores.softcap(cap)
    result = cascade_attention(q, *pages, COMMON, **words)
    if dtype is torch.float64:  # whose oracle would have to be wider than torch has
        whole = attention_paged(q, *pages, mask=masks.causal(), **words)
        torch.testing.assert_close(result[:2], whole[:2], rtol=1e-12, atol=1e-12)
        return
    for i in range(len(OWN)):
        near = plain(q[i], keys[i], values[i], dtype, cap, sinks)
        wide = plain(q[i], keys[i], values[i], torch.float64, cap, sinks)
        assert_exact(result.out[i], near[0], wide[0], f"out of sequence {i}")
        assert_exact(result.lse[i], near[1].float(), wide[1], f"lse of sequence {i}")


def test_packed_queries_and_no_mask() -> None:
    _, _, pages = sequences(torch.float32)
    counts = (2, 0, 11)
    cu = torch.tensor([0, 2, 2, 13])
    q = drawn(sum(counts), HEADS, WIDTH, seed=30)
    for mask in (masks.causal(), None):
        got = cascade_attention(q, *pages, COMMON, cu, mask=mask, return_lse=True)
        due = attention_paged(q, *pages, cu, mask=mask, return_lse=True)
        assert isinstance(got, AttentionResult)
        torch.testing.assert_close(got[:2], due[:2])
    only = pages._replace(
        block_table=pages.block_table[:, : COMMON // SIZE], key_lengths=torch.full((3,), COMMON)
    )
    got = cascade_attention(q, *only, COMMON, cu, mask=None)
    torch.testing.assert_close(got, attention_paged(q, *only, cu))


def test_the_bits_do_not_depend_on_how_many_share() -> None:
    _, _, pages = sequences(torch.float32)
    q = drawn(len(OWN), HEADS, 1, WIDTH, seed=30)
    together = cascade_attention(q, *pages, COMMON)
    for i in range(len(OWN)):
        one = slice(i, i + 1)
        own = pages._replace(block_table=pages[2][one], key_lengths=pages[3][one])
        assert_same_bits(cascade_attention(q[one], *own, COMMON), together[one], f"sequence {i}")


def test_forks_of_a_cache() -> None:
    """Forks share what they began with; a cascade reads it once, and no further than it may."""
    cache = PagedKVCache(pages=60, page_size=SIZE, kv_heads=KV_HEADS, head_dim=WIDTH)
    origin = cache.add()
    start = drawn(1, KV_HEADS, 90, WIDTH, seed=1)
    cache.append([origin], start, start)
    forks = [origin, cache.fork(origin), cache.fork(origin)]
    for i, sequence in enumerate(forks):
        more = drawn(1, KV_HEADS, 1 + 20 * i, WIDTH, seed=5 + i)
        cache.append([sequence], more, more)
    q = drawn(3, HEADS, 1, WIDTH, seed=8)
    got = cache.attend(forks, q, cascade=True)
    pages = (cache.k_pages, cache.v_pages, *cache.tables(forks))
    assert_same_bits(got, cascade_attention(q, *pages, 80), "five common pages of 16")
    torch.testing.assert_close(got, cache.attend(forks, q))
    many = drawn(3, HEADS, 30, WIDTH, seed=8)  # the first of which sees 61 + 1 keys: 3 pages
    got = cache.attend(forks, many, cascade=True)
    assert_same_bits(got, cascade_attention(many, *pages, 48), "three common pages")
    packed = many[:, :, :1].squeeze(2), torch.arange(4)
    got = cache.attend(forks, packed[0], cascade=True, cu_seqlens_q=packed[1])
    torch.testing.assert_close(got, cache.attend(forks, packed[0], cu_seqlens_q=packed[1]))
    other = cache.add()
    cache.append([other], start, start)
    for alone in ([origin], [origin, other]):  # nothing in common: the plain call
        mine = q[: len(alone)]
        assert_same_bits(cache.attend(alone, mine, cascade=True), cache.attend(alone, mine), "out")


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("shared", {"shared": 24}, "got 24; required: a multiple of the page size 16 from 0 to"),
        ("shared", {"shared": -16}, "got -16"),
        ("shared", {"shared": 1600}, "got 1600"),
        ("block_table", {"shared": 176}, "got other pages for sequence 1"),
        ("key_lengths", {"key_lengths": torch.tensor([160, 200, 310])}, "got 160 keys for seq"),
        ("mask", {"mask": masks.window(4, 0)}, "got another mask"),
        ("score", {"score": scores.alibi(torch.ones(HEADS))}, "got alibi, which knows"),
        ("score", {"score": lambda s, b, h, m, n: s + h}, "got expr, which knows"),
        ("q", {"q": torch.zeros(3, WIDTH)}, r"got shape \(3, 16\); required: \[B, Hq, M"),
        ("q", {"q": [1.0]}, "got a list"),
        ("k_pages", {"q": torch.zeros(3, 3, 1, WIDTH)}, "got 2 key/value heads for 3 query heads"),
        ("block_table", {"block_table": [[1]]}, "got a list; required: an int32"),
        ("cu_seqlens_q", {"q": torch.zeros(3, 4, WIDTH), "cu_seqlens_q": torch.arange(3)}, "got 3"),
    ],
)
def test_what_is_refused(name: str, change: dict[str, Any], said: str) -> None:
    _, _, pages = sequences(torch.float32)
    q = drawn(len(OWN), HEADS, 1, WIDTH, seed=30)
    given = {"q": q, **pages._asdict(), "shared": COMMON, **change}
    with pytest.raises((InvalidArgument, InvalidType), match=f"^{name}: {said}"):
        cascade_attention(**given)


def test_what_a_cache_refuses() -> None:
    cache = PagedKVCache(pages=9, page_size=4, kv_heads=2, head_dim=4, window=3)
    with pytest.raises(InvalidArgument, match=r"^cascade: got True; required: False for a cache"):
        cache.attend([cache.add()], drawn(1, 2, 1, 4, seed=1), cascade=True)
    whole = PagedKVCache(pages=9, page_size=4, kv_heads=2, head_dim=4)
    with pytest.raises(
        InvalidArgument, match=r"^cascade: got True with return_stats=; required: F"
    ):
        whole.attend([whole.add()], drawn(1, 2, 1, 4, seed=1), cascade=True, return_stats=True)


# ---- The cache in one piece, and prompts that are taken in pieces.


def keys_drawn(seed: int, heads: int, rows: int) -> Tensor:
    return torch.randn(2, heads, rows, 16, generator=torch.Generator().manual_seed(seed))


def test_what_is_kept_and_what_is_asked_for() -> None:
    cache = KVCache(batch=2, kv_heads=2, head_dim=16, capacity=50)
    k, v, q = keys_drawn(1, 2, 40), keys_drawn(2, 2, 40), keys_drawn(3, 4, 1)
    cache.append(k.requires_grad_(), v)
    assert not cache.keys.requires_grad
    assert_same_bits(cache.values, v, "values")
    got = cache.attend(q, mask=masks.window(8, 0), return_lse=True)
    expected = tilewise.attention(q, k.detach(), v, mask=masks.window(8, 0), return_lse=True)
    assert_same_bits(got.out, expected.out, "out")
    assert_same_bits(got.lse, expected.lse, "lse")
    cache.truncate(7)
    assert_same_bits(cache.keys, k.detach()[:, :, :7], "keys")
    cache.append(k[:, :, 7:40], v[:, :, 7:40])
    assert_same_bits(cache.keys, k.detach(), "keys again")


def test_what_does_not_fit() -> None:
    cache = KVCache(batch=2, kv_heads=2, head_dim=16, capacity=50)
    cache.append(keys_drawn(1, 2, 40), keys_drawn(2, 2, 40))
    with pytest.raises(InvalidArgument, match=r"^k: got 11 keys behind 40; .*capacity of 50"):
        cache.append(keys_drawn(1, 2, 11), keys_drawn(2, 2, 11))
    with pytest.raises(InvalidArgument, match=r"^length: got 41; required: in \[0, 40\]"):
        cache.truncate(41)
    with pytest.raises(InvalidArgument, match=r"^k: got shape"):
        cache.append(keys_drawn(1, 3, 4), keys_drawn(2, 2, 4))
    with pytest.raises(InvalidArgument, match=r"^capacity: got 0"):
        KVCache(batch=2, kv_heads=2, head_dim=16, capacity=0)
    assert len(cache) == 40


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
def test_two_graphs_serve_a_prompt_and_all_that_follows() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache.append(k, v)
        return cache.attend(q)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    eager, traced = (KVCache(batch=2, kv_heads=2, head_dim=16, capacity=16) for _ in range(2))
    with torch.no_grad():
        for seed, rows in enumerate((5, 1, 1, 1, 1)):
            q, k, v = (
                keys_drawn(3 * seed + x, heads, rows) for x, heads in ((0, 4), (1, 2), (2, 2))
            )
            assert_same_bits(compiled(traced, q, k, v), step(eager, q, k, v), f"step {seed}")
    assert counter.frame_count == 2
    assert len(traced) == len(eager)
