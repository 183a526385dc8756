"""Keys and values of many sequences, in pages that those with a common start share."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, OutOfPages
from tilewise.functional import attention_paged
from tilewise.serving.pages import PageAllocator
from tilewise.serving.rows import check_rows
from tilewise.variants.masks import causal

__all__ = ["PagedKVCache"]


class _Held:
    """The pages of one sequence, in order, and how many keys it has in them."""

    __slots__ = ("length", "pages")

    def __init__(self, pages: list[int], length: int) -> None:
        self.pages = pages
        self.length = length


class PagedKVCache:
    """Pages of keys and values, handed out as sequences grow.

    A sequence is a number that ``add`` or ``fork`` gave. A fork shares all pages of its origin; the
    last page, where it is not full, is copied when one of them grows. Every operation is done whole
    or, where it raises, not at all. What is appended is copied and detached.

    Args:
        pages: how many there are.
        page_size: keys of a page; multiples of 16 read fastest.
        kv_heads: Hk.
        head_dim: D.
        value_dim: Dv; D if None.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        *,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        width = head_dim if value_dim is None else value_dim
        sizes = {"page_size": page_size, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, size in {**sizes, "value_dim": width}.items():
            if size < 1:
                raise InvalidArgument(name, str(size), "at least 1")
        self.page_size = page_size
        self._pages = PageAllocator(pages)
        self.k_pages = torch.empty(pages, kv_heads, page_size, head_dim, dtype=dtype, device=device)
        self.v_pages = torch.empty(pages, kv_heads, page_size, width, dtype=dtype, device=device)
        self._sequences: dict[int, _Held] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return self._pages.free

    def add(self) -> int:
        """A new sequence without keys."""
        return self._enter(_Held([], 0))

    def fork(self, sequence: int) -> int:
        """A new sequence with the keys that one has, in the same pages.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        held = self._held(sequence)
        self._pages.share(held.pages)
        return self._enter(_Held(list(held.pages), held.length))

    def remove(self, sequence: int) -> None:
        """Forget a sequence; pages that no other has are free.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        held = self._held(sequence)
        self._pages.release(held.pages)
        del self._sequences[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Forget the keys of a sequence from ``length`` on.

        Raises:
            InvalidArgument: there is no such sequence, or it has not as many keys.
        """
        held = self._held(sequence)
        if not 0 <= length <= held.length:
            raise InvalidArgument("length", str(length), f"in [0, {held.length}]")
        kept = -(-length // self.page_size)
        self._pages.release(held.pages[kept:])
        held.pages, held.length = held.pages[:kept], length

    def length(self, sequence: int) -> int:
        """How many keys a sequence has.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        return self._held(sequence).length

    def append(self, sequences: Sequence[int], k: Tensor, v: Tensor) -> None:
        """Put M keys and values behind those of each sequence.

        Args:
            sequences: B different ones.
            k: [B, Hk, M, D].
            v: [B, Hk, M, Dv].

        Raises:
            InvalidArgument, InvalidType: naming the argument that is wrong.
            OutOfPages: there are too few pages; nothing was appended.
        """
        self._check_different(sequences)
        fixed = (len(sequences), self.k_pages.shape[1])
        more = check_rows(k, v, self.k_pages, self.v_pages, fixed, 2)
        if more == 0 or not sequences:
            return
        grown = [self._held(sequence) for sequence in sequences]
        copied, wanted = self._wanted(grown, more)
        total = len(copied) + sum(wanted)
        if total > self._pages.free:
            raise OutOfPages(total, self._pages.free, self._pages.pages)
        for held in copied:
            self._copy_last(held)
        pages: list[int] = []
        rows: list[int] = []
        for held, count in zip(grown, wanted, strict=True):
            held.pages += self._pages.take(count)
            for n in range(held.length, held.length + more):
                pages.append(held.pages[n // self.page_size])
                rows.append(n % self.page_size)
            held.length += more
        device = self.k_pages.device
        at = torch.tensor(pages, device=device), torch.tensor(rows, device=device)
        with torch.no_grad():
            for pool, given in ((self.k_pages, k), (self.v_pages, v)):
                pool[at[0], :, at[1]] = given.transpose(1, 2).flatten(0, 1)

    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What ``attention_paged`` asks for: block_table [B, P] and key_lengths [B] of sequences.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        found = [self._held(sequence) for sequence in sequences]
        slots = max([1, *[len(held.pages) for held in found]])
        table = [held.pages + [0] * (slots - len(held.pages)) for held in found]
        device = self.k_pages.device
        block_table = torch.tensor(table, dtype=torch.int32, device=device)
        lengths = torch.tensor([held.length for held in found], dtype=torch.int32, device=device)
        return block_table.reshape(len(found), slots), lengths

    def attend(self, sequences: Sequence[int], q: Tensor, **keywords: Any) -> Any:
        """Attention of each sequence's queries over its keys; the last query sees the last key.

        Append the keys of these queries first.

        Args:
            sequences: B of them.
            q: [B, Hq, M, D]; or packed [Tq, Hq, D], with ``cu_seqlens_q``.
            keywords: those of ``tilewise.attention_paged``; ``mask`` is ``masks.causal()`` if left
                out.
        """
        asked = {"mask": causal(), **keywords}
        return attention_paged(q, self.k_pages, self.v_pages, *self.tables(sequences), **asked)

    def _enter(self, held: _Held) -> int:
        self._sequences[self._next] = held
        self._next += 1
        return self._next - 1

    def _held(self, sequence: int) -> _Held:
        held = self._sequences.get(sequence)
        if held is None:
            required = "one that add or fork gave and that was not removed"
            raise InvalidArgument("sequence", repr(sequence), required)
        return held

    def _check_different(self, sequences: Sequence[int]) -> None:
        twice = [sequence for sequence, times in Counter(sequences).items() if times > 1]
        if twice:
            raise InvalidArgument("sequences", f"{twice[0]} more than once", "different ones")

    def _wanted(self, grown: list[_Held], more: int) -> tuple[list[_Held], list[int]]:
        """Whose last page is copied before they grow, and how many new pages each then needs."""
        copied, wanted, left = [], [], Counter[int]()
        for held in grown:
            if held.length % self.page_size:
                last = held.pages[-1]
                if self._pages.holders(last) - left[last] > 1:
                    left[last] += 1  # the copy lets go of it
                    copied.append(held)
            wanted.append(-(-(held.length + more) // self.page_size) - len(held.pages))
        return copied, wanted

    def _copy_last(self, held: _Held) -> None:
        (fresh,) = self._pages.take(1)
        last = held.pages[-1]
        for pool in (self.k_pages, self.v_pages):
            pool[fresh] = pool[last]
        self._pages.release([last])
        held.pages[-1] = fresh
