"""Check the integer tensors that find the keys of a paged call, and lower them to kernel form."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import check_both, check_whole
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.problem import Problem
from tilewise.validation import check_cu_seqlens, check_page_tensors
from tilewise.variants.lower import Extent
from tilewise.variants.outside import is_checked

_LAST = 2**31 - 1  # kernels read pages as int32


class Pages(NamedTuple):
    """The integer tensors of ``functional.attention_paged``."""

    block_table: Tensor  # [B, P], the page of each run of page_size keys of each sequence
    key_lengths: Tensor  # [B], how many keys each sequence has
    cu_seqlens_q: Tensor | None  # [B + 1] of packed queries, or None


def signs(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return what a plan depends on in tensors other than q, k and v."""
    return tuple([None if x is None else (x.shape, x.dtype, x.device) for x in tensors])


class _Facts(NamedTuple):
    """The counts that a step's tensors hold; those of queries where they are packed."""

    key_counts: tuple[int, ...]
    query_counts: tuple[int, ...] | None
    queries: int | None
    last_page: int


class PagedStep:
    """The keys of each sequence in a step of a model, checked once for the calls of all layers.

    Pass it to ``attention_paged`` in place of ``block_table``, ``key_lengths`` and
    ``cu_seqlens_q``. It holds copies, so a scheduler may overwrite its own tensors afterwards. A
    call with other queries, another page size or too few pages is refused.

    Values on the CPU are checked here. On a device they are not read, as in ``attention_paged``.

    Args:
        block_table: int32 (or int64) [B, P], P pages for the longest sequence or more.
        key_lengths: int32 (or int64) [B], each at most P * page_size.
        cu_seqlens_q: int32 or int64 [B + 1] of packed queries, or None.
        page_size: keys of a page.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """

    def __init__(
        self,
        block_table: Tensor,
        key_lengths: Tensor,
        cu_seqlens_q: Tensor | None = None,
        *,
        page_size: int,
    ) -> None:
        check_page_tensors(block_table, key_lengths, cu_seqlens_q)
        self.page_size = check_whole("page_size", page_size, 1)
        starts = None if cu_seqlens_q is None else cu_seqlens_q.clone()
        own = Pages(block_table.clone(), key_lengths.clone(), starts)
        self._facts = _facts_of(own, page_size) if _on_cpu(own) else None
        self.pages = _lowered(own, block_table.device)
        self.signs = signs(*self.pages)

    def __repr__(self) -> str:
        sequences, slots = self.pages.block_table.shape
        return f"PagedStep({sequences} sequences, up to {slots} pages of {self.page_size} keys)"

    def covers(self, problem: Problem, held: int) -> bool:
        """Return whether a call of this step needs no check of values: they were read.

        ``held`` is how many pages there are.

        Raises:
            InvalidArgument: the call is not one of this step.
        """
        if problem.page_size != self.page_size:
            required = f"one for the pages of this call, of {problem.page_size} keys"
            raise InvalidArgument("block_table", repr(self), required)
        facts = self._facts
        if facts is None:
            return False
        if facts.queries is not None and facts.queries != problem.queries:
            required = f"the {facts.queries} of the step"
            raise InvalidArgument("q", f"{problem.queries} packed rows", required)
        if facts.last_page >= held:
            table, lengths, _ = self.pages
            check_entries("block_table", table, lengths, self.page_size, held)
        return True

    def extent(self, problem: Problem) -> Extent:
        """Return what tensors that a call captures are broadcast against, if ``covers`` it."""
        assert self._facts is not None
        key_counts, query_counts, *_ = self._facts
        return Extent.of_sequences(
            problem.heads, query_counts or (problem.queries,) * problem.batch, key_counts
        )


def pages_of(
    block_table: Tensor | PagedStep, key_lengths: Tensor | None, cu_seqlens_q: Tensor | None
) -> tuple[Pages, PagedStep | None]:
    """Return what finds the keys of a paged call, and the step that it comes from, if any."""
    if isinstance(block_table, PagedStep):
        for name, came in (("key_lengths", key_lengths), ("cu_seqlens_q", cu_seqlens_q)):
            if came is not None:
                raise InvalidArgument(name, "one with a PagedStep", "none: the step has its own")
        return block_table.pages, block_table
    if key_lengths is None:
        raise InvalidType("key_lengths", "None", "an int32 or int64 tensor [sequences]")
    return Pages(block_table, key_lengths, cu_seqlens_q), None


def packed_or_paged(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    key_lengths: Tensor | None,
    dropout_p: float,
) -> tuple[tuple[Tensor, Tensor] | None, Pages | None]:
    """Return cu_seqlens of a variable-length call, or the pages of a paged one."""
    if block_table is not None and key_lengths is not None:
        for name, came in (("cu_seqlens_k", cu_seqlens_k), ("dropout_p", dropout_p or None)):
            if came is not None:
                raise InvalidArgument(name, "one with a block_table", "none: keys lie in pages")
        return None, Pages(block_table, key_lengths, cu_seqlens_q)
    check_both("block_table", block_table, "key_lengths", key_lengths)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return (cu_seqlens_q, cu_seqlens_k), None
    check_both("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k", cu_seqlens_k)
    return None, None


def lower_pages(
    problem: Problem, pages: Pages, q: Tensor, k: Tensor, stays: bool
) -> tuple[Pages, Extent]:
    """Return what finds pages as kernels read it, and what captured tensors are broadcast against.

    Values are looked at where that stalls no device: on the CPU, and for the reference; of
    tensors on a device in checked mode.

    ``stays``: the kernels read the tensors on q's device.
    """
    block_table, key_lengths, cu_q = pages
    packed = cu_q is not None
    extent = Extent(
        problem.batch, problem.heads, 0 if packed else problem.queries, 0, True, check_values=False
    )
    if _on_cpu(pages) or not stays or is_checked():
        query_counts = (problem.queries,) * problem.batch
        if cu_q is not None:
            starts = check_cu_seqlens("cu_seqlens_q", cu_q, problem.queries)
            query_counts = counts_of(starts)
        key_counts = _checked_lengths(key_lengths, block_table.shape[1], problem.page_size)
        table, held = block_table.cpu(), k.shape[0]
        check_entries("block_table", table, key_lengths.cpu(), problem.page_size, held)
        extent = Extent.of_sequences(problem.heads, query_counts, key_counts)
    return _lowered(pages, q.device if stays else torch.device("cpu")), extent


def _on_cpu(pages: Pages) -> bool:
    block_table, key_lengths, cu_q = pages
    return block_table.is_cpu and key_lengths.is_cpu and (cu_q is None or cu_q.is_cpu)


def _facts_of(pages: Pages, page_size: int) -> _Facts:
    block_table, key_lengths, cu_q = pages
    slots = block_table.shape[1]
    key_counts = _checked_lengths(key_lengths, slots, page_size)
    used = block_table[_used(block_table, key_lengths, page_size)]
    first, last = (int(x) for x in used.aminmax()) if used.numel() else (0, -1)
    if first < 0 or last > _LAST:
        wrong = (block_table < 0) | (block_table > _LAST)
        required = f"0 to {_LAST}"
        _refuse_entries("block_table", block_table, key_lengths, page_size, wrong, required)
    if cu_q is None:
        return _Facts(key_counts, None, None, last)
    starts = check_cu_seqlens("cu_seqlens_q", cu_q, int(cu_q[-1]))
    return _Facts(key_counts, counts_of(starts), starts[-1], last)


def counts_of(starts: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of packed sequences, from where each starts and the last one ends."""
    return tuple([end - start for start, end in pairwise(starts)])


def _lowered(pages: Pages, device: torch.device) -> Pages:
    block_table, key_lengths, cu_q = pages
    return Pages(
        _moved(block_table, device, torch.int32),
        _moved(key_lengths, device, torch.int32),
        None if cu_q is None else _moved(cu_q, device, torch.int64),
    )


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous():
        return tensor
    return tensor.to(device, dtype).contiguous()


def _checked_lengths(key_lengths: Tensor, slots: int, page_size: int) -> tuple[int, ...]:
    lengths: list[int] = key_lengths.tolist()
    for index, length in enumerate(lengths):
        if not 0 <= length <= slots * page_size:
            raise InvalidArgument(
                "key_lengths",
                f"{length} for sequence {index}",
                f"in [0, {slots * page_size}]: block_table has {slots} pages of {page_size} rows "
                "for a sequence",
            )
    return tuple(lengths)


def check_entries(name: str, table: Tensor, counts: Tensor, page_size: int, held: int) -> None:
    """Entries that a sequence has keys in name pages that there are; nobody reads the others."""
    if table.numel():
        least, most = torch.aminmax(table)
        if int(least) >= 0 and int(most) < held:
            return
    wrong = (table < 0) | (table >= held)
    _refuse_entries(name, table, counts, page_size, wrong, f"the number of one of the {held} pages")


def _used(table: Tensor, counts: Tensor, page_size: int) -> Tensor:
    return torch.arange(table.shape[1], device=table.device) * page_size < counts[:, None]


def _refuse_entries(
    name: str, table: Tensor, counts: Tensor, page_size: int, wrong: Tensor, required: str
) -> None:
    wrong = wrong & _used(table, counts, page_size)
    if not bool(wrong.any()):
        return
    index, slot = wrong.nonzero()[0].tolist()
    raise InvalidArgument(
        name,
        f"page {int(table[index, slot])} in slot {slot} of sequence {index}, which has "
        f"{int(counts[index])} keys",
        required,
    )
