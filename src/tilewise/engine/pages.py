"""Check the integer tensors that find the keys of a paged call, and lower them to kernel form."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument
from tilewise.problem import Problem
from tilewise.validation import check_cu_seqlens
from tilewise.variants.checked import is_checked
from tilewise.variants.lower import Extent


class Pages(NamedTuple):
    """The integer tensors of ``functional.attention_paged``.

    Args:
        block_table: [B, P], the page of each run of page_size keys of each sequence.
        key_lengths: [B], how many keys each sequence has.
        cu_seqlens_q: [B + 1] of packed queries, or None.
    """

    block_table: Tensor
    key_lengths: Tensor
    cu_seqlens_q: Tensor | None


def packed_or_paged(
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    block_table: Tensor | None,
    key_lengths: Tensor | None,
    dropout_p: float,
) -> tuple[tuple[Tensor, Tensor] | None, Pages | None]:
    """Return cu_seqlens of a variable-length call, or the pages of a paged one.

    Raises:
        InvalidArgument: half of what such a call needs is missing, or it has what only others do.
    """
    if block_table is not None and key_lengths is not None:
        for name, came in (("cu_seqlens_k", cu_seqlens_k), ("dropout_p", dropout_p or None)):
            if came is not None:
                raise InvalidArgument(name, "one with a block_table", "none: keys lie in pages")
        return None, Pages(block_table, key_lengths, cu_seqlens_q)
    _both("block_table", block_table, "key_lengths", key_lengths)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        return (cu_seqlens_q, cu_seqlens_k), None
    _both("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k", cu_seqlens_k)
    return None, None


def _both(first: str, one: Tensor | None, second: str, other: Tensor | None) -> None:
    if (one is None) != (other is None):
        name = first if one is None else second
        raise InvalidArgument(name, "None", f"both of {first} and {second}, or neither")


def lower_pages(
    problem: Problem, pages: Pages, q: Tensor, k: Tensor, stays: bool
) -> tuple[Pages, Extent]:
    """Return what finds pages as kernels read it, and what captured tensors are broadcast against.

    Values are looked at where that stalls no device: on the CPU, and for the reference; of
    tensors on a device in checked mode.

    ``stays``: the kernels read the tensors on q's device.

    Raises:
        InvalidArgument: naming the tensor that says something impossible.
    """
    block_table, key_lengths, cu_q = pages
    on_cpu = block_table.is_cpu and key_lengths.is_cpu and (cu_q is None or cu_q.is_cpu)
    packed = cu_q is not None
    extent = Extent(
        problem.batch, problem.heads, 0 if packed else problem.queries, 0, True, check_values=False
    )
    if on_cpu or not stays or is_checked():
        query_counts = (problem.queries,) * problem.batch
        if cu_q is not None:
            starts = check_cu_seqlens("cu_seqlens_q", cu_q, problem.queries)
            query_counts = tuple([end - start for start, end in pairwise(starts)])
        key_counts = _checked_lengths(problem, key_lengths)
        table, held = block_table.cpu(), k.shape[0]
        check_entries("block_table", table, key_lengths.cpu(), problem.page_size, held)
        extent = extent._replace(
            queries=max(query_counts, default=0),
            keys=max(key_counts, default=0),
            key_counts=key_counts,
            query_counts=query_counts,
            check_values=True,
        )
    device = q.device if stays else torch.device("cpu")
    lowered = Pages(
        _moved(block_table, device, torch.int32),
        _moved(key_lengths, device, torch.int32),
        None if cu_q is None else _moved(cu_q, device, torch.int64),
    )
    return lowered, extent


def _moved(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    if tensor.dtype is dtype and tensor.device == device and tensor.is_contiguous():
        return tensor
    return tensor.to(device, dtype).contiguous()


def _checked_lengths(problem: Problem, key_lengths: Tensor) -> tuple[int, ...]:
    lengths: list[int] = key_lengths.tolist()
    for index, length in enumerate(lengths):
        if not 0 <= length <= problem.keys:
            slots = problem.keys // problem.page_size
            raise InvalidArgument(
                "key_lengths",
                f"{length} for sequence {index}",
                f"in [0, {problem.keys}]: block_table has {slots} pages of {problem.page_size} "
                "rows for a sequence",
            )
    return tuple(lengths)


def check_entries(name: str, table: Tensor, counts: Tensor, page_size: int, held: int) -> None:
    """Entries that a sequence has keys in name pages that there are; nobody reads the others."""
    if table.numel():
        least, most = torch.aminmax(table)
        if int(least) >= 0 and int(most) < held:
            return
    slots = torch.arange(table.shape[1])
    used = slots * page_size < counts[:, None]
    wrong = used & ((table < 0) | (table >= held))
    if not bool(wrong.any()):
        return
    index, slot = wrong.nonzero()[0].tolist()
    raise InvalidArgument(
        name,
        f"page {int(table[index, slot])} in slot {slot} of sequence {index}, which has "
        f"{int(counts[index])} keys",
        f"the number of one of the {held} pages",
    )
