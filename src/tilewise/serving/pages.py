"""Track the holders of each page: numbers and counts, no memory."""

from collections import Counter
from collections.abc import Iterable

from tilewise.errors import InvalidArgument, OutOfPages


class PageAllocator:
    """Hands out pages by their numbers; a page that several hold is free when the last lets go.

    Every operation is done whole or, where it raises, not at all.

    Args:
        pages: how many there are.
    """

    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise InvalidArgument("pages", str(pages), "at least 1")
        self.pages = pages
        self._holders = [0] * pages
        # The last one given back is the first to be taken: it may still be in a cache.
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """Return how many pages nobody holds."""
        return len(self._free)

    def holders(self, page: int) -> int:
        """Return how many hold a page.

        Raises:
            InvalidArgument: there is no such page.
        """
        self._check_pages((page,))
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages that nobody held; each is now held once.

        Raises:
            OutOfPages: there are not as many.
            InvalidArgument: the count is negative.
        """
        if count < 0:
            raise InvalidArgument("count", str(count), "0 or more")
        if count > len(self._free):
            raise OutOfPages(count, len(self._free), self.pages)
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """Hold pages once more that somebody holds.

        Raises:
            InvalidArgument: nobody holds one of them.
        """
        for page, times in self._check_held(pages, 1).items():
            self._holders[page] += times

    def release(self, pages: Iterable[int]) -> None:
        """Let go of pages, once for each time that one is named.

        Raises:
            InvalidArgument: a page is named more often than it is held.
        """
        for page, times in self._check_held(pages, None).items():
            self._holders[page] -= times
            if self._holders[page] == 0:
                self._free.append(page)

    def _check_held(self, pages: Iterable[int], least: int | None) -> Counter[int]:
        """Count each page's mentions; each must be held ``least`` times, or as often as named."""
        named = Counter(pages)
        self._check_pages(named)
        for page, times in named.items():
            required = times if least is None else least
            if self._holders[page] < required:
                came = f"page {page}, held {self._holders[page]} times, {times} times"
                raise InvalidArgument("pages", came, "pages that are held as often")
        return named

    def _check_pages(self, pages: Iterable[int]) -> None:
        for page in pages:
            if not 0 <= page < self.pages:
                came = f"page {page}"
                raise InvalidArgument("pages", came, f"one of the {self.pages} pages, from 0 on")
