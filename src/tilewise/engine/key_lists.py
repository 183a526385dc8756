"""Key lists: which keys each query row reads, checked and brought to one form."""

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from tilewise.checks import INDICES, check_tensor, check_whole
from tilewise.errors import InvalidArgument
from tilewise.problem import Problem


class KeyBlocks(NamedTuple):
    """Lists of blocks of keys: block i holds the keys i * block to (i + 1) * block - 1.

    Args:
        indices: int32 or int64 [B, Hk or 1, ceil(M / query_block), K], the blocks that each block
            of query rows reads; in a variable-length call [Hk or 1, Tq, K]. -1 stands for none.
        block: keys in a block; the last block of a sequence may have fewer.
        query_block: query rows that share a list; 1 in a variable-length call.
    """

    indices: Tensor
    block: int
    query_block: int = 1


KeyLists: TypeAlias = Tensor | KeyBlocks


class Listed(NamedTuple):
    """Key lists as sets, one for each row group (the query rows that share a list) and head.

    Args:
        indices: int32 [T, Hk or 1, K], T row groups: blocks in ascending order, each once; then
            the number of blocks of the sequence, which stands for none.
        counts: int64 [T, Hk or 1], how many keys that is.
    """

    indices: Tensor
    counts: Tensor


def read_key_lists(keys: object) -> KeyBlocks:
    """Return key lists as blocks: single keys are blocks of one.

    Raises:
        InvalidArgument, InvalidType: it is neither a tensor of indices nor KeyBlocks.
    """
    if not isinstance(keys, KeyBlocks):
        required = "an int32 or int64 tensor [B, Hk or 1, M, K] of keys, or tilewise.KeyBlocks"
        return KeyBlocks(check_tensor("keys", keys, required, INDICES), 1)
    required = "an int32 or int64 tensor of blocks"
    check_tensor("keys (indices)", keys.indices, required, INDICES)
    check_whole("keys (block)", keys.block, 1)
    check_whole("keys (query_block)", keys.query_block, 1)
    return keys


def checked_key_lists(lists: KeyBlocks, problem: Problem, device: torch.device) -> KeyBlocks:
    """Return key lists with blocks no longer than the call.

    Raises:
        InvalidArgument: shape or device are not those of the call.
    """
    indices, block, rows = lists
    if problem.layout == "varlen":
        required = f"[Hk or 1, Tq, K] with Hk = {problem.kv_heads}, Tq = {problem.queries}"
        shape: tuple[int, ...] = (problem.queries,)
        if rows > 1:
            fix = "Repeat each list for the rows that share it."
            raise InvalidArgument("keys (query_block)", str(rows), "1 for packed sequences", fix)
    else:
        groups = -(-problem.queries // rows)
        required = f"[B, Hk or 1, {'M' if rows == 1 else 'blocks of rows'}, K] with "
        required += f"B = {problem.batch}, Hk = {problem.kv_heads}, {groups} rows of lists"
        shape = (problem.batch, groups)
    came = tuple(indices.shape)
    fits = len(came) == len(shape) + 2 and (*came[:-3], came[-2]) == shape
    # torch.compile, whose sizes may be symbols, gets `came[-3] not in (...)` wrong.
    if not fits or not (came[-3] == 1 or came[-3] == problem.kv_heads):
        raise InvalidArgument("keys", f"shape {came}", f"a tensor {required}")
    if indices.device != device:
        raise InvalidArgument("keys", f"a tensor on {indices.device}", f"on q's device, {device}")
    if block > problem.keys:
        block = max(problem.keys, 1)
    if rows > problem.queries:
        rows = max(problem.queries, 1)
    return KeyBlocks(indices, block, rows)


def listed(lists: KeyBlocks, lengths: Tensor) -> Listed:
    """Return key lists as sets.

    On a device values are not looked at: there an index beyond the sequence's keys counts as none.

    Args:
        lists: of ``checked_key_lists``.
        lengths: int64 [T], the keys of each row group's sequence.

    Raises:
        InvalidArgument: on the CPU, an index that names no key or block.
    """
    indices, block, _ = lists
    rows = indices.movedim(-3, -2).flatten(0, -3) if indices.dim() == 4 else indices.movedim(0, 1)
    limits = (lengths + (block - 1)).div(block, rounding_mode="floor").to(torch.int32)
    limits = limits[:, None, None]
    if rows.is_cpu:
        _check_values(rows, limits, block)
    none = (rows < 0) | (rows >= limits)
    found = torch.where(none, limits, rows.to(torch.int32))
    if not _ascending(found, limits):
        found = found.sort(dim=-1).values
        again = torch.zeros_like(found, dtype=torch.bool)
        torch.eq(found[..., 1:], found[..., :-1], out=again[..., 1:])
        found = torch.where(again, limits, found).sort(dim=-1).values
    counts = (found < limits).sum(dim=-1) * block
    if block > 1:
        missing = limits * block - lengths[:, None, None]
        counts = counts - torch.where(found == limits - 1, missing, 0).sum(dim=-1)
    return Listed(found.contiguous(), counts)


def _check_values(rows: Tensor, limits: Tensor, block: int) -> None:
    wrong = (rows < -1) | (rows >= limits)
    if not bool(wrong.any()):
        return
    group, head, at = wrong.nonzero()[0].tolist()
    what = "key" if block == 1 else "block"
    raise InvalidArgument(
        "keys",
        f"{int(rows[group, head, at])} in list {group} of head {head}",
        f"a {what} below {int(limits[group])}, or -1 for none",
    )


def _ascending(found: Tensor, limits: Tensor) -> bool:
    """Return whether lists are sets already; on a device nobody waits to know."""
    if not found.is_cpu:
        return False
    rises = found[..., 1:] > found[..., :-1]
    return bool((rises | (found[..., 1:] == limits)).all())
