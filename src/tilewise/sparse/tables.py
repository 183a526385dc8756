"""The table of a mask: what it depends on, and who computes it."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.checks import check_both, check_whole
from tilewise.engine import dispatch
from tilewise.errors import InvalidArgument
from tilewise.problem import DTYPES, Operands, Problem
from tilewise.reference.programs import Grid, covers
from tilewise.validation import check_cu_seqlens, check_cu_tensors
from tilewise.variants import expr as expressions
from tilewise.variants.float8 import FLOAT8
from tilewise.variants.lower import Extent, lower_mask, statistics_dtype
from tilewise.variants.program import BY_USER, EXPR, Instr
from tilewise.variants.values import Mask


class Sizes(NamedTuple):
    """Sizes that a table is requested for."""

    # Both: None where the caller did not say.
    batch: int | None
    heads: int | None
    # Both: M and N; of a variable-length call Tq and Tk.
    queries: int
    keys: int
    cu_seqlens: tuple[Tensor, Tensor] | None  # of a variable-length call, checked, int64 on the CPU
    dtype: torch.dtype  # of the attention's operands
    # Both: each sequence's, of a variable-length call.
    query_counts: tuple[int, ...] = ()
    key_counts: tuple[int, ...] = ()

    @property
    def longest(self) -> tuple[int, int]:
        """M and N; of a variable-length call the longest sequence's."""
        if self.cu_seqlens is None:
            return self.queries, self.keys
        return max(self.query_counts, default=0), max(self.key_counts, default=0)


class Table(NamedTuple):
    """A table, and what it is for: B, Hq and the width of floats, 0 where any will do."""

    covers: Tensor
    batch: int
    heads: int
    width: int


def sizes(
    queries: int | None,
    keys: int | None,
    batch: int | None,
    heads: int | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    dtype: torch.dtype,
) -> Sizes:
    """Return the arguments of ``BlockMask.of``, checked."""
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", str(dtype), f"one of {', '.join(map(str, DTYPES))}")
    dtype = torch.float32 if dtype is FLOAT8 else dtype  # what masks of float8 compute in
    batch = None if batch is None else check_whole("batch", batch)
    heads = None if heads is None else check_whole("heads", heads, 1)
    check_both("cu_seqlens_q", cu_seqlens_q, "cu_seqlens_k", cu_seqlens_k)
    if cu_seqlens_q is None or cu_seqlens_k is None:
        if queries is None:
            raise InvalidArgument("queries", "None", "M, the number of query rows")
        queries = check_whole("queries", queries)
        keys = queries if keys is None else check_whole("keys", keys)
        return Sizes(batch, heads, queries, keys, None, dtype)
    for name, value in (("queries", queries), ("keys", keys), ("batch", batch)):
        if value is not None:
            raise InvalidArgument(name, str(value), "nothing beside cu_seqlens_q and cu_seqlens_k")
    return _ragged_sizes(cu_seqlens_q, cu_seqlens_k, heads, dtype)


def _ragged_sizes(cu_q: Tensor, cu_k: Tensor, heads: int | None, dtype: torch.dtype) -> Sizes:
    check_cu_tensors(cu_q, cu_k)
    totals = [int(cu[-1]) for cu in (cu_q, cu_k)]
    for name, cu, total in (("cu_seqlens_q", cu_q, totals[0]), ("cu_seqlens_k", cu_k, totals[1])):
        check_cu_seqlens(name, cu, total)
    cu_q, cu_k = (cu.to("cpu", torch.int64).contiguous() for cu in (cu_q, cu_k))
    batch, (queries, keys) = cu_q.shape[0] - 1, totals
    counts = [tuple(cu.diff().tolist()) for cu in (cu_q, cu_k)]
    return Sizes(batch, heads, queries, keys, (cu_q, cu_k), dtype, counts[0], counts[1])


def build(mask: Mask, extents: Sizes, block: tuple[int, int]) -> Table:
    """Return the table of a mask.

    Raises:
        InvalidArgument: the mask depends on the batch item or the head and their number is not
            given, or what it captures does not fit.
    """
    by_batch, by_head = depends_on(mask)
    by_batch = by_batch or extents.cu_seqlens is not None
    for name, letter, depends, given in (
        ("batch", "B", by_batch, extents.batch),
        ("heads", "Hq", by_head, extents.heads),
    ):
        if depends and given is None:
            raise InvalidArgument(name, "None", f"{letter}, because the mask depends on it")
    batch = 1 if extents.batch is None else extents.batch
    heads = 1 if extents.heads is None else extents.heads
    longest = extents.longest
    ragged = extents.cu_seqlens is not None
    extent = Extent(batch, heads, *longest, ragged, extents.key_counts, extents.query_counts)
    device = mask.captured[0].device if mask.captured else torch.device("cpu")
    extent = extent._replace(check_values=device.type == "cpu")
    tensors = lower_mask(mask.program, mask.captured, extent, device, extents.dtype)
    layout = "varlen" if ragged else "dense"
    widths = (heads, heads, extents.queries, extents.keys, 1, 1)
    problem = Problem(
        batch, *widths, extents.dtype, device.type, layout, mask.program, (), 1.0, 0.0, False
    )
    rows, columns = (-(-size // one) for size, one in zip(longest, block, strict=True))
    grid = Grid(*block, batch if by_batch else 1, heads if by_head else 1, rows, columns)
    nothing = torch.empty(0, device=device)
    cu_q, cu_k = extents.cu_seqlens or (None, None)
    operands = Operands(nothing, nothing, nothing, tensors, (), None, cu_q, cu_k)
    wide = statistics_dtype(extents.dtype) is torch.float64
    return Table(
        _covers(problem, operands, grid),
        batch if by_batch else 0,
        heads if by_head else 0,
        1 + wide if _has_floats(mask) else 0,
    )


def _covers(problem: Problem, operands: Operands, grid: Grid) -> Tensor:
    """Return the table by the first able backend; otherwise the reference evaluates every pair."""
    for name in dispatch.BACKEND_NAMES:
        backend = dispatch.load(name)
        if backend.absence() is None and not backend.why_not(problem):
            return backend.covers(problem, operands, grid)
    return covers(problem, operands, grid)


def depends_on(mask: Mask) -> tuple[bool, bool]:
    """Return whether what a mask says depends on the batch item, and on the head."""
    found = [_instr_depends(instr, mask.captured) for instr in mask.program]
    return any(batch for batch, _ in found), any(head for _, head in found)


def _instr_depends(instr: Instr, captured: tuple[Tensor, ...]) -> tuple[bool, bool]:
    if instr.op == EXPR:
        named = {node.op for node in expressions.decode(str(instr.params[0])).nodes}
        return "b" in named, "h" in named
    if instr.op == "below":
        return bool(instr.slots), False
    if instr.op == "same_document":
        by_user = bool(instr.params) and instr.params[0] == BY_USER
        ids = [captured[slot] for slot in instr.slots]
        return any(x.dim() == 2 and (by_user or x.shape[0] > 1) for x in ids), False
    if instr.op == "tiles":
        return instr.params[2] != 0, instr.params[3] != 0
    if instr.op not in ("dense", "blocks"):
        return False, False
    if instr.op == "dense" and instr.params:
        return 0 in instr.params[1:], 1 in instr.params[1:]
    sizes = captured[instr.slots[0]].shape
    batch, heads = (1, 1, 1, 1, *sizes)[-4:-2]
    return batch != 1, heads != 1


def _has_floats(mask: Mask) -> bool:
    return any(
        "float" in expressions.kinds(expressions.decode(str(instr.params[0])))
        for instr in mask.program
        if instr.op == EXPR
    )
