"""Caches with a window: pages behind it go back, none is lost, and nothing else changes."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tilewise import masks
from tilewise.errors import InvalidArgument, OutOfPages
from tilewise.serving import PagedKVCache

PAGES, SIZE, WINDOW = 9, 3, 5


class Windowed(RuleBasedStateMachine):
    """Sequences beside lists of all rows that they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(
            pages=PAGES, page_size=SIZE, kv_heads=1, head_dim=1, window=WINDOW
        )
        self.lists: dict[int, list[int]] = {}
        self.last = 1

    def picked(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.lists)))

    @rule()
    def add(self) -> None:
        if len(self.lists) < 5:
            self.lists[self.cache.add()] = []

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        if len(self.lists) < 5:
            origin = self.picked(data)
            self.lists[self.cache.fork(origin)] = list(self.lists[origin])

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = self.picked(data)
        self.cache.remove(gone)
        del self.lists[gone]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), back=st.integers(0, 12))
    def truncate(self, data: st.DataObject, back: int) -> None:
        sequence = self.picked(data)
        length = max(0, len(self.lists[sequence]) - back)
        dropped = self.dropped(sequence)
        if dropped and length + 1 - WINDOW < dropped * SIZE:
            with pytest.raises(InvalidArgument, match=r"^length: .* were dropped"):
                self.cache.truncate(sequence, length)
            return
        self.cache.truncate(sequence, length)
        del self.lists[sequence][length:]

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), count=st.integers(0, 8))
    def append(self, data: st.DataObject, count: int) -> None:
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True, max_size=3))
        total = len(chosen) * count
        k = torch.arange(self.last, self.last + total, dtype=torch.float32)
        k = k.view(len(chosen), 1, count, 1)
        free = self.cache.free_pages
        try:
            self.cache.append(chosen, k, -k)
        except OutOfPages:
            assert self.cache.free_pages == free
            return
        for i, sequence in enumerate(chosen):
            before = len(self.lists[sequence])
            self.lists[sequence] += range(self.last + i * count, self.last + (i + 1) * count)
            if count:  # what lies wholly behind the window of the first new key is gone
                assert self.dropped(sequence) >= max(0, before + 1 - WINDOW) // SIZE
        self.last += total

    def dropped(self, sequence: int) -> int:
        table, lengths = self.cache.tables([sequence])
        return table[0, : -(-int(lengths[0]) // SIZE)].tolist().count(PAGES)

    @invariant()
    def holds_what_queries_see(self) -> None:
        used = set()
        for sequence, numbers in self.lists.items():
            table, lengths = self.cache.tables([sequence])
            assert lengths.tolist() == [len(numbers)] == [self.cache.length(sequence)]
            dropped = self.dropped(sequence)
            mine = table[0, dropped : -(-len(numbers) // SIZE)].tolist()
            assert PAGES not in mine
            used |= set(mine)
            assert dropped == 0 or dropped * SIZE <= len(numbers) + 1 - WINDOW
            for pool, sign in ((self.cache.k_pages, 1), (self.cache.v_pages, -1)):
                found = pool[mine].transpose(0, 1).flatten()[: len(numbers) - dropped * SIZE]
                assert (found * sign).tolist() == numbers[dropped * SIZE :]
                assert not bool(pool[PAGES].any())
        assert self.cache.free_pages == PAGES - len(used)

    def teardown(self) -> None:
        for sequence in self.lists:
            self.cache.remove(sequence)
        assert self.cache.free_pages == PAGES


TestWindowed = Windowed.TestCase
TestWindowed.settings = settings(max_examples=25, stateful_step_count=30)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


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
