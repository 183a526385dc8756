"""The pages of a paged cache: which sequence holds which, and their memory.

Who holds a page, and lengths, are numbers alone (``PageAllocator``, ``Sequences``). The memory has
rows as they come, checked, or in 8 bits with a scale for each (``Pool``).
"""

import operator
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor, named
from tilewise.errors import InvalidArgument, InvalidType, OutOfPages
from tilewise.validation import check_cu_seqlens
from tilewise.variants.float8 import FLOAT8


def size_of(name: str, value: Any, least: int = 1) -> int:
    """Return a size or a length as a number of Python: numpy's and tensors' integers are some."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidType(name, named(value), f"an integer, {least} or more") from None
    if number < least:
        raise InvalidArgument(name, str(number), f"at least {least}")
    return number


def check_listed(sequences: Any) -> None:
    """Raise InvalidType where some sequences are one number, or can be read but once."""
    if not isinstance(sequences, Collection):
        once = isinstance(sequences, Iterable)
        came = named(sequences) if once else repr(sequences)
        fix = "Call list() of it." if once else f"For one: [{sequences}]."
        required = "a list of the numbers that add or fork gave"
        raise InvalidType("sequences", came, required, fix)


class PageAllocator:
    """Hands out pages by their numbers; a page that several hold is free when the last lets go.

    Every operation is done whole or, where it raises, not at all.
    """

    def __init__(self, pages: int) -> None:
        self.pages = size_of("pages", pages)
        self._holders = [0] * self.pages
        # The last one given back is the first to be taken: it may still be in a cache.
        self._free = list(range(self.pages - 1, -1, -1))

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


@dataclass(eq=False, slots=True)
class Held:
    """Pages and length of one sequence."""

    pages: list[int]  # those that it holds, in order
    length: int  # how many keys it was given
    # How many pages were before ``pages`` and went back, because no query to come sees a key in
    # them.
    dropped: int


class Growth(NamedTuple):
    """Places where new rows go."""

    copies: list[tuple[int, int]]  # (from, to) of pages to be copied before anything is written
    pages: list[int]  # of each new row, those of the first sequence first
    rows: list[int]  # of each new row within its page
    # Each sequence that grew, with its length and its last page before; None for that page where it
    # had none.
    before: list[tuple[Held, int, int | None]]


class Sequences:
    """Sequences that grow, share their pages and let go of them.

    Every operation is done whole or, where it raises, not at all. The arguments are those of
    ``PagedKVCache``.
    """

    def __init__(self, pages: int, page_size: int, window: int | None) -> None:
        self._allocator = PageAllocator(pages)
        self.pages = self._allocator.pages
        self.page_size = page_size
        self.window = window
        self._held: dict[int, Held] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """Return how many pages no sequence has."""
        return self._allocator.free

    def _of(self, sequence: int) -> Held:
        held = self._held.get(sequence) if isinstance(sequence, Hashable) else None
        if held is None:
            required = "one that add or fork gave and that was not removed"
            raise InvalidArgument("sequence", repr(sequence), required)
        return held

    def _different(self, sequences: Sequence[int]) -> list[Held]:
        """Return what each of some sequences has, none of which is named twice."""
        check_listed(sequences)
        found = [self._of(sequence) for sequence in sequences]
        twice = [sequence for sequence, times in Counter(sequences).items() if times > 1]
        if twice:
            raise InvalidArgument("sequences", f"{twice[0]} more than once", "different ones")
        return found

    def add(self) -> int:
        """Return a new sequence without keys."""
        return self._enter(Held([], 0, 0))

    def fork(self, sequence: int) -> int:
        """Return a new sequence with the keys that one has, in the same pages.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        held = self._of(sequence)
        self._allocator.share(held.pages)
        return self._enter(Held(list(held.pages), held.length, held.dropped))

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other has are free.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        self._allocator.release(self._of(sequence).pages)
        del self._held[sequence]

    def length(self, sequence: int) -> int:
        """Return how many keys a sequence was given.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        return self._of(sequence).length

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the keys of a sequence from ``length`` on.

        Raises:
            InvalidArgument: there is no such sequence, it has not as many keys, or with a window
                the next query would see keys that were dropped (never before the last ``append``).
        """
        held, length = self._of(sequence), size_of("length", length, 0)
        if length > held.length:
            raise InvalidArgument("length", str(length), f"in [0, {held.length}]")
        if not self._has_keys_of(held, length):
            gone = held.dropped * self.page_size
            required = f"{gone + (self.window or 1) - 1} or more: the next query sees "
            required += f"{self.window} keys, and the first {gone} were dropped"
            raise InvalidArgument("length", str(length), required)
        kept = -(-length // self.page_size) - held.dropped
        self._allocator.release(held.pages[kept:])
        held.pages, held.length = held.pages[:kept], length

    def _has_keys_of(self, held: Held, position: int) -> bool:
        """Return whether no key that a query at a position sees was dropped."""
        first = position + 1 - (self.window or 0)
        return held.dropped == 0 or first >= held.dropped * self.page_size

    def _grow(self, sequences: Sequence[int], counts: Sequence[int]) -> Growth:
        """Room for so many new rows of each sequence; pages behind its window go back first."""
        found = self._different(sequences)
        grown = [(held, count) for held, count in zip(found, counts, strict=True) if count]
        behind = [self._behind(held) for held, _ in grown]
        left = Counter(
            [
                page
                for (held, _), count in zip(grown, behind, strict=True)
                for page in held.pages[:count]
            ]
        )
        freed = sum(self._allocator.holders(page) == times for page, times in left.items())
        copied, wanted = self._wanted(grown, left)
        total, free = len(copied) + sum(wanted), self.free_pages + freed
        if total > free:
            raise OutOfPages(total, free, self.pages)
        for (held, _), count in zip(grown, behind, strict=True):
            self._allocator.release(held.pages[:count])
            held.pages = held.pages[count:]
            held.dropped += count
        before = [(held, held.length, held.pages[-1] if held.pages else None) for held, _ in grown]
        growth = Growth([self._copy_last(held) for held in copied], [], [], before)
        for (held, count), more in zip(grown, wanted, strict=True):
            held.pages += self._allocator.take(more)
            for n in range(held.length, held.length + count):
                growth.pages.append(held.pages[n // self.page_size - held.dropped])
                growth.rows.append(n % self.page_size)
            held.length += count
        return growth

    def _shrink(self, growth: Growth) -> None:
        """Take back a growth whose rows could not be written.

        Pages that went back stay free: no query to come sees a key in them.
        """
        for held, length, last in growth.before:
            kept = -(-length // self.page_size) - held.dropped
            self._allocator.release(held.pages[kept:])
            held.pages, held.length = held.pages[:kept], length
            if last is not None and held.pages and held.pages[-1] != last:
                self._allocator.share([last])  # its copy may hold nothing yet
                self._allocator.release(held.pages[-1:])
                held.pages[-1] = last

    def _enter(self, held: Held) -> int:
        self._held[self._next] = held
        self._next += 1
        return self._next - 1

    def _behind(self, held: Held) -> int:
        """Return how many of its pages lie wholly behind the window of the next query."""
        if self.window is None:
            return 0
        first = max(0, held.length + 1 - self.window)
        return max(0, first // self.page_size - held.dropped)

    def _wanted(
        self, grown: list[tuple[Held, int]], left: Counter[int]
    ) -> tuple[list[Held], list[int]]:
        """Whose last page is copied before they grow, and how many new pages each then needs.

        ``left`` says how often pages are let go of by then.
        """
        copied, wanted = [], []
        for held, count in grown:
            if held.length % self.page_size:
                last = held.pages[-1]
                if self._allocator.holders(last) - left[last] > 1:
                    left[last] += 1  # the copy lets go of it
                    copied.append(held)
            needed = -(-(held.length + count) // self.page_size)
            wanted.append(needed - held.dropped - len(held.pages))
        return copied, wanted

    def _copy_last(self, held: Held) -> tuple[int, int]:
        (fresh,) = self._allocator.take(1)
        last = held.pages[-1]
        self._allocator.release([last])
        held.pages[-1] = fresh
        return last, fresh


def room(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return an empty tensor that may be written in every mode.

    One that is made under ``torch.inference_mode`` could be written there alone.
    """
    if torch.compiler.is_compiling():
        return torch.empty(shape, dtype=dtype, device=device)
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=dtype, device=device)


def counts_of(cu_seqlens: Tensor, sequences: int, total: int) -> list[int]:
    """Return how many of ``total`` packed rows each sequence is given."""
    required = f"an int32 or int64 tensor [{sequences + 1}]"
    check_tensor("cu_seqlens", cu_seqlens, required, INDICES, shape=(sequences + 1,))
    starts = check_cu_seqlens("cu_seqlens", cu_seqlens, total)
    return [end - start for start, end in pairwise(starts)]


def check_rows(
    k: Tensor,
    v: Tensor | None,
    k_room: Tensor,
    v_room: Tensor | None,
    fixed: tuple[int, ...],
    rows: int,
) -> int:
    """Return how many rows of keys [..., D] and values [..., Dv] there are.

    ``k_room`` and ``v_room`` are where they go, with the width, dtype and device that they must
    have; None where values are a part of the keys. ``fixed`` are the sizes of all dimensions but
    the last and the one that counts rows, whose number is ``rows``.
    """
    for name, tensor, room in (("k", k, k_room), ("v", v, v_room)):
        if room is None:
            if tensor is not None:
                raise InvalidArgument(name, "a tensor", "None: the values are a part of the keys")
            continue
        shape = (*fixed[:rows], None, *fixed[rows:], room.shape[-1])
        words = ", ".join("any" if size is None else str(size) for size in shape)
        check_tensor(name, tensor, f"a tensor [{words}]", shape=shape)
        assert tensor is not None
        if (tensor.dtype, tensor.device) != (room.dtype, room.device):
            came = f"{tensor.dtype} on {tensor.device}"
            raise InvalidArgument(name, came, f"the cache's {room.dtype} on {room.device}")
    if v is not None and k.shape[rows] != v.shape[rows]:
        raise InvalidArgument("v", f"{v.shape[rows]} rows", f"as many as k has, {k.shape[rows]}")
    return k.shape[rows]


_LARGEST = {torch.int8: 127.0, FLOAT8: 448.0}


def quantised(x: Tensor, storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round rows to 8 bits: ``scale = max|row| / largest``, ``row / scale`` to the nearest number.

    The largest number is 127 for int8 and 448 for float8_e4m3fn. With int8 the error of an element
    is at most scale / 2, a 254th of the row's largest. With float8 it is at most a 16th of the
    element, or scale / 1024 where the element is smaller than scale / 64. A row with a NaN or
    infinity reads as NaN.

    Args:
        x: [..., D], floating.
        storage: torch.int8 or torch.float8_e4m3fn.

    Returns:
        [..., D] of that dtype, and the scales [...], float32.
    """
    wide = x.to(torch.float32)
    largest = _LARGEST[storage]
    scales = wide.abs().amax(-1) / largest
    units = wide / torch.where(scales > 0, scales, 1.0)[..., None]
    units = units.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(-largest, largest)
    if storage is torch.int8:
        units = units.round()
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return units.to(storage), scales


class Pool:
    """Rows of keys, or of values, in pages.

    ``dtype`` is that of rows that go in and that are read, ``storage`` None for the same, or an
    8-bit dtype of ``quantised``.

    Attributes:
        values: [pages, Hk, page_size, width] in the dtype of storage.
        scales: float32 [pages, Hk, page_size], or None.
        like: an empty tensor of the width, dtype and device of rows that go in.
    """

    def __init__(
        self,
        pages: int,
        heads: int,
        page_size: int,
        width: int,
        *,
        dtype: torch.dtype,
        storage: torch.dtype | None,
        device: torch.device | str,
    ) -> None:
        shape = (pages, heads, page_size)
        self.scales: Tensor | None = None
        if storage is not None:
            if storage not in _LARGEST:
                required = "None, torch.int8 or torch.float8_e4m3fn"
                raise InvalidArgument("storage", str(storage), required)
            if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
                required = "a floating dtype of 16 bits or more, that of queries"
                raise InvalidArgument("dtype", f"{dtype} with storage={storage}", required)
            self.scales = room(shape, torch.float32, device)
        self.values = room((*shape, width), storage or dtype, device)
        self.like = torch.empty(0, width, dtype=dtype, device=device)

    def _bytes(self) -> Tensor:
        """Return the values in a dtype that torch indexes: it does not index float8 everywhere."""
        return self.values if self.scales is None else self.values.view(torch.uint8)

    def clear(self, first: int) -> None:
        """Zeros in all pages from one on."""
        self._bytes()[first:] = 0
        if self.scales is not None:
            self.scales[first:] = 0

    def copy(self, old: int, fresh: int) -> None:
        """Make a page the copy of another."""
        self._bytes()[fresh] = self._bytes()[old]
        if self.scales is not None:
            self.scales[fresh] = self.scales[old]

    def write(self, pages: Tensor, places: Tensor, rows: Tensor) -> None:
        """Put rows [T, Hk, width] at places of pages, int64 [T] each."""
        if self.scales is None:
            self.values[pages, :, places] = rows
            return
        values, scales = quantised(rows, self.values.dtype)
        self._bytes()[pages, :, places] = values.view(torch.uint8)
        self.scales[pages, :, places] = scales
