"""Keys and values: of sequences of one length in one piece, or of many in pages that they share."""

from collections.abc import Sequence
from inspect import signature
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.functional import attention, attention_paged
from tilewise.serving.cascade import cascade_attention
from tilewise.serving.pages import (
    Growth,
    Pool,
    Sequences,
    check_listed,
    check_rows,
    counts_of,
    room,
    size_of,
)
from tilewise.torch_private import left_alone
from tilewise.variants.masks import causal, window
from tilewise.variants.values import as_mask

_OF_PAGES, _OF_CASCADES = (
    signature(each).parameters.keys() for each in (attention_paged, cascade_attention)
)


class KVCache:
    """Room for ``capacity`` keys and values of each of B sequences that grow together.

    The cache copies and detaches appended keys and values: it passes no gradients.

    Args:
        batch: B, batch items.
        kv_heads: Hk.
        head_dim: D, the width of a head.
        capacity: how many keys a sequence may have.
        value_dim: Dv; D if None.
        dtype: of keys and values.
        device: where they are.
    """

    def __init__(
        self,
        *,
        batch: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        batch, kv_heads = size_of("batch", batch), size_of("kv_heads", kv_heads)
        head_dim = size_of("head_dim", head_dim)
        width = head_dim if value_dim is None else size_of("value_dim", value_dim)
        self.capacity = size_of("capacity", capacity)
        sizes = (batch, kv_heads, self.capacity)
        self._k = room((*sizes, head_dim), dtype, device)
        self._v = room((*sizes, width), dtype, device)
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def keys(self) -> Tensor:
        """[B, Hk, length, D], a view."""
        return self._k[:, :, : self._length]

    @property
    def values(self) -> Tensor:
        """[B, Hk, length, Dv], a view."""
        return self._v[:, :, : self._length]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Put M keys and values behind those that are there.

        Args:
            k: [B, Hk, M, D].
            v: [B, Hk, M, Dv].

        Raises:
            InvalidArgument, InvalidType: they are not of these sizes, or there is no room for them.
        """
        batch, heads, _, _ = self._k.shape
        more = check_rows(k, v, self._k, self._v, (batch, heads), 2)
        end = self._length + more
        if end > self.capacity:
            came = f"{more} keys behind {self._length}"
            raise InvalidArgument("k", came, f"no more than the capacity of {self.capacity} in all")
        with torch.no_grad():
            self._k[:, :, self._length : end] = k
            self._v[:, :, self._length : end] = v
        self._length = end

    def truncate(self, length: int) -> None:
        """Forget the keys from ``length`` on.

        Raises:
            InvalidArgument: there are not as many.
        """
        length = size_of("length", length, 0)
        if length > self._length:
            raise InvalidArgument("length", str(length), f"in [0, {self._length}]")
        self._length = length

    def attend(self, q: Tensor, **keywords: Any) -> Any:
        """Compute attention of q [B, Hq, M, D] over all keys; the last query sees the last key.

        Append the keys of these queries first. A prompt may be appended and attended in pieces. The
        result is equal except for rounding, and on the CPU often to the bit. There a row's bits
        follow from three things:

        * its own keys;
        * where these are cut into blocks: at every multiple of 128, but a rest of fewer than 64 at
          the end joins the block before it;
        * whether its sequence has more than 8 queries in the call or wants gradients: up to 8
          without have another kernel.

        So

        * pieces of more than 8 queries that end at multiples of 64 have the bits of one piece;
        * pieces of more than 8 queries that end elsewhere have them in all rows but the last
          (length % 128), where these are < 64;
        * up to 8 queries have the bits of as many calls of one, where the blocks of both are cut
          alike. This holds up to 16k keys; beyond, the kernel's splits grow with the number of
          keys;
        * a sequence has the bits that it has alone, whatever else is in the batch.

        Args:
            q: [B, Hq, M, D].
            keywords: those of ``tilewise.attention``; ``mask`` is ``masks.causal()`` if left out.
        """
        return attention(q, self.keys, self.values, **{"mask": causal(), **keywords})


class PagedKVCache(Sequences):
    """Pages of keys and values, handed out as sequences grow.

    A sequence is a number that ``add`` or ``fork`` gave. A fork shares all pages of its origin; the
    last page, where it is not full, is copied when one of them grows. Every operation is done whole
    or, where it raises, not at all. The cache copies and detaches appended keys and values.

    With a ``window``, a sequence releases the pages that no later query can see. These are the
    pages wholly behind the window of the first new key, each time that it grows. It then holds no
    more than ``window`` keys, those of the last ``append`` and two pages' rest. The remaining pages
    give the same bits as attention over everything under ``masks.window(window - 1, 0)``.

    With a ``storage``, pages hold 8-bit numbers and a float32 scale for each row and head, by the
    row's own largest number (``serving.pages.quantised`` has the formula and its error). A scale
    for a whole page would have to change when a later row is larger, and the rows before it be
    rounded again. So a row is rounded once, and its result does not depend on how it came. The
    scale costs 4 bytes per row of D. On the CPU, kernels read such pages where they lie. On a GPU
    ``attend`` writes out those of its sequences in ``dtype``, once each, for the time of the call:
    there it saves room, not time.

    With ``latent`` the values are the first ``value_dim`` numbers of the keys, as in the absorbed
    form of multi-head latent attention (DeepSeek-V2, V3): a token takes D numbers, and no more.

    ``append``, ``tables`` and ``attend`` are no part of a graph of torch.compile: which pages a
    sequence has changes with every call. They run between two graphs; fullgraph=True refuses them.

    Args:
        pages: how many there are.
        page_size: keys of a page; multiples of 16 read fastest.
        kv_heads: Hk.
        head_dim: D, the width of a head.
        value_dim: Dv; D if None.
        dtype: of keys and values.
        device: where they are.
        window: how many keys a query sees, its own the last of them; None for all before it.
        storage: torch.int8 or torch.float8_e4m3fn for pages in 8 bits; None for ``dtype``.
        latent: the values are a part of the keys.
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
        window: int | None = None,
        storage: torch.dtype | None = None,
        latent: bool = False,
    ) -> None:
        page_size, kv_heads = size_of("page_size", page_size), size_of("kv_heads", kv_heads)
        head_dim = size_of("head_dim", head_dim)
        width = head_dim if value_dim is None else size_of("value_dim", value_dim)
        window = None if window is None else size_of("window", window)
        if latent and width > head_dim:
            required = f"at most head_dim={head_dim} with latent=True"
            raise InvalidArgument("value_dim", str(width), required)
        super().__init__(pages, page_size, window)
        # With a window one page more, of zeros, stands in the tables for those that were dropped:
        # a tile that the window cuts reads rows that it hides, and 0 times NaN is NaN.
        self._blank = pages = self.pages
        held = pages if window is None else pages + 1
        self._value_dim = width
        self._pools = [
            Pool(held, kv_heads, page_size, each, dtype=dtype, storage=storage, device=device)
            for each in ((head_dim,) if latent else (head_dim, width))
        ]
        for pool in self._pools:
            pool.clear(pages)

    @property
    def k_pages(self) -> Tensor:
        """[pages, Hk, page_size, D], as they are stored; with a window one page more, of zeros."""
        return self._pools[0].values

    @property
    def v_pages(self) -> Tensor:
        """[pages, Hk, page_size, Dv], likewise; a view of ``k_pages`` if they are latent."""
        return self._pools[-1].values[..., : self._value_dim]

    @property
    def k_scales(self) -> Tensor | None:
        """The factors of the rows in 8 bits, float32 [pages, Hk, page_size]."""
        return self._pools[0].scales

    @property
    def v_scales(self) -> Tensor | None:
        """As ``k_scales``, float32 [pages, Hk, page_size]."""
        return self._pools[-1].scales

    def pages_for(self, first: int, total: int) -> int:
        """Return the most pages that a sequence needs, given keys at once and then one by one.

        Args:
            first: keys of the first ``append``.
            total: keys in the end.
        """
        every = -(-max(first, total) // self.page_size)
        if self.window is None:
            return every
        later = -(-(self.window + self.page_size - 1) // self.page_size)
        return min(every, max(-(-first // self.page_size), later))

    @left_alone
    def append(
        self,
        sequences: Sequence[int],
        k: Tensor,
        v: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        """Put M keys and values behind those of each sequence, or different numbers of them.

        Args:
            sequences: B different ones.
            k: [B, Hk, M, D]; or packed [T, Hk, D], with ``cu_seqlens``.
            v: [B, Hk, M, Dv]; or [T, Hk, Dv]. None if they are latent.
            cu_seqlens: int32 or int64 [B + 1]: sequence b is given the packed rows cu_seqlens[b] to
                cu_seqlens[b + 1]. It is read: best on the CPU.

        Raises:
            InvalidArgument, InvalidType: naming the argument that is wrong.
            OutOfPages: there are too few pages; nothing was appended.
        """
        self._different(sequences)
        batch, heads = len(sequences), self.k_pages.shape[1]
        like = self._pools[0].like, self._pools[1].like if len(self._pools) > 1 else None
        given = [k] if v is None else [k, v]
        if cu_seqlens is None:
            counts = [check_rows(k, v, *like, (batch, heads), 2)] * batch
            given = [x.transpose(1, 2).flatten(0, 1) for x in given]
        else:
            total = check_rows(k, v, *like, (heads,), 0)
            counts = counts_of(cu_seqlens, batch, total)
        growth = self._grow(sequences, counts)
        if not growth.pages:
            return
        try:
            self._write(growth, given)
        except BaseException:  # no memory for a copy, or Ctrl-C
            self._shrink(growth)
            raise

    def _write(self, growth: Growth, given: Sequence[Tensor]) -> None:
        """Put rows [T, Hk, width] of keys, and of values, where they go."""
        device = self.k_pages.device
        pages, places = (
            torch.tensor(each, dtype=torch.int64, device=device)
            for each in (growth.pages, growth.rows)
        )
        with torch.no_grad():
            for pool, rows in zip(self._pools, given, strict=True):
                for old, fresh in growth.copies:
                    pool.copy(old, fresh)
                pool.write(pages, places, rows)

    @left_alone
    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the arguments of ``attention_paged``: block_table [B, P] and key_lengths [B].

        They find rows of ``k_pages`` and ``v_pages``, and of the scales of those in 8 bits. With a
        window, a page of zeros stands for those that were dropped: attend by a mask that hides
        them.

        Raises:
            InvalidArgument: there is no such sequence.
        """
        check_listed(sequences)
        found = [self._of(sequence) for sequence in sequences]
        rows = [[self._blank] * held.dropped + held.pages for held in found]
        slots = max([1, *[len(row) for row in rows]])
        table = [row + [0] * (slots - len(row)) for row in rows]
        device = self.k_pages.device
        block_table = torch.tensor(table, dtype=torch.int32, device=device)
        lengths = torch.tensor([held.length for held in found], dtype=torch.int32, device=device)
        return block_table.reshape(len(found), slots), lengths

    @left_alone
    def attend(
        self, sequences: Sequence[int], q: Tensor, *, cascade: bool = False, **keywords: Any
    ) -> Any:
        """Attention of each sequence's queries over its keys; the last query sees the last key.

        Append the keys of these queries first. A sequence has the bits that it has alone, and of a
        prompt in pieces those that ``KVCache.attend`` tells of.

        Args:
            sequences: B of them.
            q: [B, Hq, M, D]; or packed [Tq, Hq, D], with ``cu_seqlens_q``.
            cascade: read the pages that all of them begin with once, by ``cascade_attention``,
                whose mask and score alone are then allowed. Not so by default, for the result is
                rounded where the common pages end: the bits of a sequence then depend on whom it
                is asked for with. Not with a window.
            keywords: those of ``tilewise.attention_paged``; ``mask`` is ``masks.causal()`` if left
                out. With a window both it and a mask must allow a pair.

        Raises:
            InvalidArgument: there is no such sequence; or with a window a query sees keys that were
                dropped: one before the keys of the last ``append`` (looked at where cu_seqlens_q
                is on the CPU).
        """
        check_listed(sequences)
        asked = {"mask": causal(), **keywords}
        if self.window is not None:
            if cascade:
                raise InvalidArgument("cascade", "True", "False for a cache with a window")
            self._check_queries(sequences, self._counts(sequences, q, keywords))
            seen, mask = window(self.window - 1, 0), keywords.get("mask")
            asked["mask"] = seen if mask is None else as_mask(mask) & seen
        tensors = (self.k_pages, self.v_pages, *self.tables(sequences))
        if self.k_scales is not None:
            asked |= {"k_scale": self.k_scales, "v_scale": self.v_scales}
        if not cascade:
            return attention_paged(q, *tensors, **asked)
        more = _OF_PAGES & keywords.keys() - _OF_CASCADES
        if more:
            raise InvalidArgument("cascade", f"True with {min(more)}=", f"False with {min(more)}=")
        counts = self._counts(sequences, q, keywords)
        if len(counts) != len(sequences):
            required = "[sequences + 1] on the CPU, where cascade=True looks for common pages"
            raise InvalidArgument("cu_seqlens_q", "another tensor", required)
        shared = self._common(sequences, counts) * self.page_size
        return cascade_attention(q, *tensors, shared, **asked)

    def _counts(self, sequences: Sequence[int], q: Tensor, keywords: dict[str, Any]) -> list[int]:
        """Return how many queries each sequence has; none where that cannot be looked at."""
        cu_seqlens = keywords.get("cu_seqlens_q")
        if cu_seqlens is None:
            return [q.shape[2] if q.dim() == 4 else 0] * len(sequences)
        known = isinstance(cu_seqlens, Tensor) and cu_seqlens.is_cpu
        if known and cu_seqlens.shape == (len(sequences) + 1,):
            counts: list[int] = cu_seqlens.diff().tolist()
            return counts
        return []

    def _common(self, sequences: Sequence[int], counts: Sequence[int]) -> int:
        """Return how many pages all sequences begin with, none with a key of these queries."""
        found = [self._of(sequence) for sequence in sequences]
        before = [
            (held.length - count) // self.page_size
            for held, count in zip(found, counts, strict=True)
        ]
        columns = zip(*[held.pages for held in found], strict=False)
        alike = takewhile(lambda column: len(set(column)) == 1, columns)
        return max(0, min([sum(1 for _ in alike), *before])) if len(found) > 1 else 0

    def _check_queries(self, sequences: Sequence[int], counts: Sequence[int]) -> None:
        """No query sees a key that was dropped."""
        for sequence, count in zip(sequences, counts, strict=False):
            held = self._of(sequence)
            if count and not self._has_keys_of(held, held.length - count):
                gone = held.dropped * self.page_size
                came = f"{count} queries of sequence {sequence}, which has {held.length} keys"
                required = f"fewer: with a window of {self.window} the first sees some of the "
                raise InvalidArgument("q", came, required + f"{gone} keys that were dropped")
