"""The cache in pages: what sequences have is what they were given, whatever they share.

With a window, pages behind it go back, none is lost, and nothing else changes. Pages do not leak,
and are neither handed out nor given back twice.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import tilewise
from tests.cases import drawn
from tests.contract import assert_same_bits
from tilewise import masks
from tilewise.errors import InvalidArgument, InvalidType, OutOfPages
from tilewise.serving import KVCache, PageAllocator, PagedKVCache
from tilewise.serving.pages import Pool

PAGES = 9


def rows(first: int, count: int) -> Tensor:
    """Rows [1, 1, count, 1] that are told apart by their number."""
    return torch.arange(first, first + count, dtype=torch.float32)[None, None, :, None]


class Cache(RuleBasedStateMachine):
    """Sequences beside lists of all rows that they were given."""

    page_size = 4
    window: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(
            pages=PAGES, page_size=self.page_size, kv_heads=1, head_dim=1, window=self.window
        )
        self.lists: dict[int, list[int]] = {}
        self.last = 1

    def picked(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lists)))

    @rule()
    def add(self) -> None:
        if len(self.lists) < 6:
            self.lists[self.cache.add()] = []

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        origin = self.picked(data)
        if len(self.lists) < 6:
            self.lists[self.cache.fork(origin)] = list(self.lists[origin])

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = self.picked(data)
        self.cache.remove(gone)
        del self.lists[gone]
        with pytest.raises(InvalidArgument, match=rf"^sequence: got {gone}"):
            self.cache.remove(gone)

    def dropped(self, sequence: int) -> int:
        """How many pages of a sequence have gone back: its table names the page of zeros."""
        table, lengths = self.cache.tables([sequence])
        return table[0, : -(-int(lengths[0]) // self.page_size)].tolist().count(PAGES)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        sequence = self.picked(data)
        held = len(self.lists[sequence])
        length = data.draw(st.integers(max(0, held - 20), held + 1))
        gone = self.dropped(sequence) * self.page_size
        needed = length + 1 - (self.window or 0)
        if length > held or (gone and needed < gone):
            words = "required" if length > held else ".* were dropped"
            with pytest.raises(InvalidArgument, match=rf"^length: .*{words}"):
                self.cache.truncate(sequence, length)
            return
        self.cache.truncate(sequence, length)
        del self.lists[sequence][length:]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), count=st.integers(0, 9))
    def append(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True, max_size=4))
        given = [rows(self.last + i * count, count) for i in range(len(chosen))]
        k = torch.cat(given) if given else torch.empty(0, 1, count, 1)
        free = self.cache.free_pages
        try:
            self.cache.append(chosen, k, -k)
        except OutOfPages:
            assert self.cache.free_pages == free
            return
        for i, sequence in enumerate(chosen):
            before = len(self.lists[sequence])
            self.lists[sequence] += range(self.last + i * count, self.last + (i + 1) * count)
            if count and self.window:  # what is wholly behind the window of the first new key
                behind = max(0, before + 1 - self.window) // self.page_size
                assert self.dropped(sequence) >= behind
        self.last += len(chosen) * count

    @invariant()
    def holds_what_was_given(self) -> None:
        chosen = sorted(self.lists)
        table, lengths = self.cache.tables(chosen)
        assert lengths.tolist() == [len(self.lists[sequence]) for sequence in chosen]
        used = set()
        for pages, sequence in zip(table.tolist(), chosen, strict=True):
            numbers = self.lists[sequence]
            assert self.cache.length(sequence) == len(numbers)
            dropped = self.dropped(sequence)
            gone = dropped * self.page_size
            assert gone <= (len(numbers) + 1 - self.window if gone and self.window else 0)
            mine = pages[dropped : -(-len(numbers) // self.page_size)]
            assert PAGES not in mine
            used |= set(mine)
            for pool, sign in ((self.cache.k_pages, 1), (self.cache.v_pages, -1)):
                found = pool[mine].transpose(0, 1).flatten()[: len(numbers) - gone]
                assert (found * sign).tolist() == numbers[gone:]
                assert not bool(pool[PAGES:].any())
        assert self.cache.free_pages == PAGES - len(used)

    def teardown(self) -> None:
        for sequence in self.lists:
            self.cache.remove(sequence)
        assert self.cache.free_pages == PAGES


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=40, stateful_step_count=30)


class Windowed(Cache):
    """The same, and what lies behind the window is gone."""

    page_size, window = 3, 5


TestWindowed = Windowed.TestCase
TestWindowed.settings = settings(max_examples=25, stateful_step_count=30)


def test_a_fork_costs_the_page_that_it_changes() -> None:
    cache = PagedKVCache(pages=8, page_size=16, kv_heads=2, head_dim=4)
    first = cache.add()
    cache.append([first], drawn(1, 2, 40, 4), drawn(1, 2, 40, 4))
    assert cache.free_pages == 5
    second = cache.fork(first)
    assert cache.free_pages == 5
    cache.append([second], drawn(1, 2, 1, 4), drawn(1, 2, 1, 4))
    assert cache.free_pages == 4
    cache.append([first], drawn(1, 2, 1, 4), drawn(1, 2, 1, 4))  # alone in its last page by now
    assert cache.free_pages == 4
    cache.remove(first)
    assert cache.free_pages == 5
    third = cache.fork(second)
    cache.append([second, third], drawn(2, 2, 1, 4), drawn(2, 2, 1, 4))  # one copy for the two
    assert cache.free_pages == 4


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_attend_is_attention_over_what_was_appended(page_size: int) -> None:
    """Sequences of other lengths together have the bits that each has alone."""
    cache = PagedKVCache(pages=400, page_size=page_size, kv_heads=2, head_dim=8, value_dim=6)
    kept = []
    for index, length in enumerate((1, 40, 133)):
        sequence = cache.add()
        k, v = drawn(1, 2, length, 8, seed=index), drawn(1, 2, length, 6, seed=9 + index)
        for piece in (slice(0, length // 3), slice(length // 3, length)):
            cache.append([sequence], k[:, :, piece], v[:, :, piece])
        kept.append((sequence, k, v))
    q = drawn(3, 4, 1, 8, seed=20)
    together = cache.attend([sequence for sequence, _, _ in kept], q)
    for index, (sequence, k, v) in enumerate(kept):
        mine = q[index : index + 1]
        assert_same_bits(cache.attend([sequence], mine), together[index : index + 1], "alone")
        expected = tilewise.attention(mine, k, v, mask=masks.causal())
        assert_same_bits(together[index : index + 1], expected, "in one piece")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("k", {"k": torch.zeros(1, 2, 3, 5)}),
        ("k", {"k": torch.zeros(1, 3, 3, 4)}),
        ("v", {"v": torch.zeros(1, 2, 4, 4)}),
        ("v", {"v": torch.zeros(1, 2, 3, 4).double()}),
        ("sequences", {"sequences": [0, 0]}),
    ],
)
def test_wrong_rows_are_named(name: str, change: dict[str, Any]) -> None:
    cache = PagedKVCache(pages=4, page_size=4, kv_heads=2, head_dim=4)
    given: dict[str, Any] = {
        "sequences": [cache.add()],
        "k": torch.zeros(1, 2, 3, 4),
        "v": torch.zeros(1, 2, 3, 4),
    }
    with pytest.raises(InvalidArgument, match=rf"^{name}: got"):
        cache.append(**{**given, **change})
    with pytest.raises(InvalidType, match=r"^k: got a list"):
        cache.append(**{**given, "k": [1]})
    with pytest.raises(InvalidArgument, match=r"^sequence: got 7; required: one that add"):
        cache.append(**{**given, "sequences": [7]})
    assert cache.free_pages == 4
    with pytest.raises(InvalidArgument, match=r"^page_size: got 0"):
        PagedKVCache(pages=4, page_size=0, kv_heads=2, head_dim=4)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own
def test_compiled_code_leaves_pages_to_python() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()

    def step(cache: PagedKVCache, sequences: list[int], q: Tensor, k: Tensor) -> Tensor:
        cache.append(sequences, k * 2, k + 1)
        out: Tensor = cache.attend(sequences, q * 3)
        return out + 1

    caches = [PagedKVCache(pages=8, page_size=2, kv_heads=1, head_dim=4) for _ in range(3)]
    for cache in caches:
        sequences = [cache.add(), cache.add()]
    compiled = torch.compile(step, backend=counter)
    with torch.no_grad():
        for _ in range(4):
            q, k = torch.randn(2, 2, 1, 4), torch.randn(2, 1, 1, 4)
            wanted = step(caches[0], sequences, q, k)
            assert_same_bits(compiled(caches[1], sequences, q, k), wanted, "out")
        assert counter.frame_count == 3
        torch._dynamo.reset()
        whole = torch.compile(step, backend=counter, fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="append cannot be part of a graph"):
            whole(caches[2], sequences, q, k)
    assert caches[2].length(sequences[0]) == 0


@pytest.mark.parametrize("page_size", [1, 16, 48, 160])
def test_the_bits_of_the_mask_over_everything(page_size: int) -> None:
    """Long pieces and single keys, two sequences and a fork; pages that nobody wrote hold NaN."""
    window, length = 40, 350
    cache = PagedKVCache(pages=400, page_size=page_size, kv_heads=2, head_dim=8, window=window)
    for pool in (cache.k_pages, cache.v_pages):
        pool[:400].fill_(math.nan)
    q, k, v = (drawn(1, heads, length, 8, seed=heads) for heads in (4, 2, 2))
    sequence = cache.add()
    cuts = [0, 130, 131, 190, *range(191, 300), 349, 350]
    for start, end in pairwise(cuts):
        cache.append([sequence], k[:, :, start:end], v[:, :, start:end])
        found = cache.attend([sequence], q[:, :, start:end])
        keys = (k[:, :, :end], v[:, :, :end])
        due = tilewise.attention(q[:, :, start:end], *keys, mask=masks.window(window - 1, 0))
        assert_same_bits(found, due, f"queries {start} to {end}")
    held = 400 - cache.free_pages
    assert held <= -(-window // page_size) + 1
    fork = cache.fork(sequence)
    more = drawn(2, 2, 3, 8, seed=9)
    cache.append([fork, sequence], more, more)
    seen = cache.attend([sequence], q[:, :, :3], mask=masks.window(1, 0))
    own = torch.cat([v[:, :, -1:], more[1:]], 2), torch.cat([k[:, :, -1:], more[1:]], 2)
    due = tilewise.attention(q[:, :, :3], own[1], own[0], mask=masks.window(1, 0))
    torch.testing.assert_close(seen, due)
    cache.remove(sequence)
    cache.remove(fork)
    assert cache.free_pages == 400


def test_queries_that_would_see_what_was_dropped() -> None:
    cache = PagedKVCache(pages=20, page_size=4, kv_heads=1, head_dim=4, window=6)
    sequence = cache.add()
    k = drawn(1, 1, 21, 4, seed=1)
    cache.append([sequence], k[:, :, :20], k[:, :, :20])
    cache.attend([sequence], k[:, :, :20])
    cache.append([sequence], k[:, :, 20:], k[:, :, 20:])
    cache.attend([sequence], k[:, :, :4])
    with pytest.raises(InvalidArgument, match=r"^q: got 5 queries of sequence 0.*12 keys that"):
        cache.attend([sequence], k[:, :, :5])
    packed = k[0, :, :5].transpose(0, 1), torch.tensor([0, 5])
    with pytest.raises(InvalidArgument, match=r"^q: got 5 queries"):
        cache.attend([sequence], packed[0], cu_seqlens_q=packed[1])
    with pytest.raises(InvalidArgument, match=r"^length: got 16; required: 17 or more: the next"):
        cache.truncate(sequence, 16)
    cache.truncate(sequence, 17)
    with pytest.raises(InvalidArgument, match=r"^window: got 0"):
        PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=4, window=0)


ALLOCATED = 12


class Pages(RuleBasedStateMachine):
    """Any order of operations, beside a count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(ALLOCATED)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, ALLOCATED + 1))
    def take(self, count: int) -> None:
        free = ALLOCATED - len(self.held)
        if count > free:
            with pytest.raises(
                OutOfPages, match=rf"^{count} pages .*, and {free} of {ALLOCATED} are free: remove"
            ):
                self.allocator.take(count)
            return
        taken = self.allocator.take(count)
        assert len(taken) == len(set(taken)) == count
        assert not set(taken) & set(self.held)
        self.held.update(taken)

    @rule(pages=st.lists(st.integers(-1, ALLOCATED), max_size=4))
    def share(self, pages: list[int]) -> None:
        if all(page in self.held for page in pages):
            self.allocator.share(pages)
            self.held.update(pages)
        else:
            with pytest.raises(InvalidArgument, match=r"^pages: got page"):
                self.allocator.share(pages)

    @rule(pages=st.lists(st.integers(-1, ALLOCATED), max_size=4))
    def release(self, pages: list[int]) -> None:
        if Counter(pages) <= self.held:
            self.allocator.release(pages)
            self.held = self.held - Counter(pages)
        else:
            with pytest.raises(InvalidArgument, match=r"^pages: got page"):
                self.allocator.release(pages)

    @invariant()
    def counts(self) -> None:
        assert self.allocator.free == ALLOCATED - len(self.held)
        found = [self.allocator.holders(page) for page in range(ALLOCATED)]
        assert found == [self.held[page] for page in range(ALLOCATED)]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40)


def test_one_sequence_is_a_list_of_one() -> None:
    cache = PagedKVCache(pages=2, page_size=4, kv_heads=1, head_dim=8)
    one, row = cache.add(), torch.zeros(1, 1, 1, 8)
    for call in (
        lambda: cache.append(one, row, row),  # type: ignore[arg-type]
        lambda: cache.attend(one, row),  # type: ignore[arg-type]
        lambda: cache.tables(one),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidType, match=r"^sequences: got 0; .*For one: \[0\]"):
            call()
    with pytest.raises(InvalidType, match=r"^sequences: got a generator; .*Call list\(\)"):
        cache.attend((each for each in [one]), row)  # type: ignore[arg-type]
    for call in (
        lambda: cache.append([[one]], row, row),  # type: ignore[list-item]
        lambda: cache.fork([one]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidArgument, match=r"^sequence: got \[0\]; required: one that add"):
            call()


def test_wrong_counts() -> None:
    with pytest.raises(InvalidArgument, match=r"^pages: got 0; required: at least 1"):
        PageAllocator(0)
    with pytest.raises(InvalidArgument, match=r"^count: got -1"):
        PageAllocator(3).take(-1)
    with pytest.raises(InvalidArgument, match=r"^pages: got page 3"):
        PageAllocator(3).holders(3)


@pytest.mark.parametrize("window", [None, 6])
def test_latent_pages_hold_keys_alone(window: int | None) -> None:
    """Values are the first numbers of the keys, in forks and behind windows too: the same bits."""
    shape: dict[str, Any] = {"pages": 12, "page_size": 4, "kv_heads": 2, "head_dim": 24}
    shape |= {"value_dim": 16, "window": window}
    latent, apart = PagedKVCache(latent=True, **shape), PagedKVCache(**shape)
    assert latent.v_pages.data_ptr() == latent.k_pages.data_ptr()
    found = []
    for cache in (latent, apart):
        first = cache.add()
        prompt = drawn(1, 2, 9, 24)
        cache.append([first], prompt, *([] if cache is latent else [prompt[..., :16]]))
        both = [first, cache.fork(first)]
        token = drawn(2, 2, 1, 24, seed=1)
        cache.append(both, token, *([] if cache is latent else [token[..., :16]]))
        found.append(cache.attend(both, drawn(2, 4, 1, 24, seed=2)))
    assert found[0].shape == (2, 4, 1, 16)
    assert_same_bits(found[0], found[1], "out")


def test_latent_pages_in_8_bits() -> None:
    """One scale serves a row as key and as value."""
    keys, q = drawn(1, 1, 9, 24), drawn(1, 4, 1, 24, seed=2)
    cache = PagedKVCache(
        pages=4, page_size=4, kv_heads=1, head_dim=24, value_dim=16, latent=True, storage=torch.int8
    )
    sequence = cache.add()
    cache.append([sequence], keys)
    scales = keys.abs().amax(-1, keepdim=True) / 127
    rounded = (keys / scales).round() * scales
    due = tilewise.attention(q, rounded, rounded[..., :16])
    torch.testing.assert_close(cache.attend([sequence], q), due, rtol=1e-5, atol=1e-6)


def test_latent_pages_take_no_values() -> None:
    cache = PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=8, value_dim=4, latent=True)
    sequence = cache.add()
    with pytest.raises(InvalidArgument, match=r"^v: got a tensor.*part of the keys"):
        cache.append([sequence], drawn(1, 1, 2, 8), drawn(1, 1, 2, 4))
    with pytest.raises(InvalidArgument, match=r"^value_dim: got 9; required: at most head_dim=8"):
        PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=8, value_dim=9, latent=True)
    apart = PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=8)
    with pytest.raises(InvalidType, match=r"^v: got a NoneType"):
        apart.append([apart.add()], drawn(1, 1, 2, 8))


@pytest.mark.parametrize("storage", [None, torch.int8])
def test_a_cache_made_in_inference_mode_may_be_written_outside_of_it(
    storage: torch.dtype | None,
) -> None:
    with torch.inference_mode():
        paged = PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=1, storage=storage)
        whole = KVCache(batch=1, kv_heads=1, head_dim=1, capacity=8)
        new = rows(1, 2)
    sequence = paged.add()
    for given in (new, rows(3, 3)):
        paged.append([sequence], given, given)
        whole.append(given, given)
    assert paged.length(sequence) == len(whole) == 5
    query = torch.ones(1, 1, 1, 1)
    torch.testing.assert_close(
        paged.attend([sequence], query), whole.attend(query), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("fails", [0, 1, 2])
def test_rows_that_cannot_be_written_leave_the_cache_as_it_was(
    window: int | None, fails: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as where a GPU has no memory left for the copies that an append makes."""
    cache = PagedKVCache(pages=PAGES, page_size=4, kv_heads=1, head_dim=1, window=window)
    origin = cache.add()
    cache.append([origin], rows(1, 6), rows(1, 6))
    every = [origin, cache.fork(origin), cache.fork(origin), cache.add()]
    query, free = torch.ones(3, 1, 1, 1), cache.free_pages
    before = cache.attend(every[:3], query)
    calls = iter(range(9))

    def no_memory(*arguments: Any) -> None:
        if next(calls) == fails:
            raise MemoryError

    for name in ("write", "copy"):
        monkeypatch.setattr(Pool, name, no_memory)
    more = rows(7, 5).expand(4, 1, 5, 1)
    with pytest.raises(MemoryError):
        cache.append(every, more, more)
    monkeypatch.undo()
    assert [cache.length(each) for each in every] == [6, 6, 6, 0]
    if window is None:
        assert cache.free_pages == free
        assert_same_bits(cache.attend(every[:3], query), before, "after the refused call")
    cache.append(every, more, more)
    wanted = PagedKVCache(pages=3, page_size=4, kv_heads=1, head_dim=1, window=window)
    alone = wanted.add()
    for given in (rows(1, 6), rows(7, 5)):
        wanted.append([alone], given, given)
    expected = wanted.attend([alone], query[:1]).expand(3, 1, 1, 1)
    assert_same_bits(cache.attend(every[:3], query), expected, "of all three")
    for sequence in every:
        cache.remove(sequence)
    assert cache.free_pages == PAGES


@pytest.mark.parametrize("length", [2.5, "2", None])
def test_lengths_and_sizes_are_integers(length: Any) -> None:
    whole = KVCache(batch=1, kv_heads=1, head_dim=1, capacity=8)
    paged = PagedKVCache(pages=4, page_size=4, kv_heads=1, head_dim=1)
    sequence = paged.add()
    whole.append(rows(1, 6), rows(1, 6))
    paged.append([sequence], rows(1, 6), rows(1, 6))
    with pytest.raises(InvalidType, match=r"^length: got a .*; required: an integer, 0 or"):
        whole.truncate(length)
    with pytest.raises(InvalidType, match=r"^length: got a"):
        paged.truncate(sequence, length)
    assert len(whole) == paged.length(sequence) == 6
    sizes: dict[str, Any] = {"pages": 4, "page_size": 4, "kv_heads": 1, "head_dim": 1}
    for name in sizes:
        with pytest.raises(InvalidType, match=rf"^{name}: got a .*; required: an integer, 1"):
            PagedKVCache(**{**sizes, name: length})
    if length is not None:
        with pytest.raises(InvalidType, match=r"^window: got a"):
            PagedKVCache(**sizes, window=length)
    for name in ("batch", "capacity"):
        with pytest.raises(InvalidType, match=f"^{name}: got a"):
            KVCache(**{"batch": 1, "kv_heads": 1, "head_dim": 1, "capacity": 8, name: length})
    four: Any = torch.tensor(4)
    whole.truncate(four)
    assert len(whole) == 4
