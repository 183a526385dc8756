"""Pages do not leak, and are neither handed out nor given back twice, whatever is done."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tilewise.errors import InvalidArgument, OutOfPages
from tilewise.serving import PageAllocator

PAGES = 12


class Pages(RuleBasedStateMachine):
    """Any order of operations, beside a count of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES)
        self.held: Counter[int] = Counter()

    @rule(count=st.integers(0, PAGES + 1))
    def take(self, count: int) -> None:
        free = PAGES - len(self.held)
        if count > free:
            with pytest.raises(OutOfPages, match=rf"^{count} pages are needed, and {free} of"):
                self.allocator.take(count)
            return
        taken = self.allocator.take(count)
        assert len(taken) == len(set(taken)) == count
        assert not set(taken) & set(self.held)
        self.held.update(taken)

    @rule(pages=st.lists(st.integers(-1, PAGES), max_size=4))
    def share(self, pages: list[int]) -> None:
        if all(page in self.held for page in pages):
            self.allocator.share(pages)
            self.held.update(pages)
        else:
            with pytest.raises(InvalidArgument, match=r"^pages: got page"):
                self.allocator.share(pages)

    @rule(pages=st.lists(st.integers(-1, PAGES), max_size=4))
    def release(self, pages: list[int]) -> None:
        if Counter(pages) <= self.held:
            self.allocator.release(pages)
            self.held = self.held - Counter(pages)
        else:
            with pytest.raises(InvalidArgument, match=r"^pages: got page"):
                self.allocator.release(pages)

    @invariant()
    def counts(self) -> None:
        assert self.allocator.free == PAGES - len(self.held)
        found = [self.allocator.holders(page) for page in range(PAGES)]
        assert found == [self.held[page] for page in range(PAGES)]


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=40)


def test_wrong_counts() -> None:
    with pytest.raises(InvalidArgument, match=r"^pages: got 0; required: at least 1"):
        PageAllocator(0)
    with pytest.raises(InvalidArgument, match=r"^count: got -1"):
        PageAllocator(3).take(-1)
    with pytest.raises(InvalidArgument, match=r"^pages: got page 3"):
        PageAllocator(3).holders(3)
