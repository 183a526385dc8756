"""Count the tiles of the score matrix that a walk visits: the sums behind every count.

There are three ways:

* If a mask has only bands and lengths, the tiles of a row are one run, found by arithmetic.
* If it ends with a table of tiles that fit into those of the walk, they are looked up.
* Otherwise every tile is judged as the reference does (``reference.programs.cover``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, Unsupported
from tilewise.problem import Operands, Problem
from tilewise.reference.blocks import Block, cut
from tilewise.reference.programs import Cover, cover
from tilewise.variants.program import EXPR, RAW, Instr, Program

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Tiles that are judged one by one at the most: some seconds.
MOST_TILES = 2**16


class Extent(NamedTuple):
    """Score matrices of M x N: so many ``items`` of them for each query head."""

    items: int
    queries: int
    keys: int


class Visits(NamedTuple):
    """Sums over the score matrices of all batch items and query heads.

    Args:
        tile: queries and keys of a tile.
        heads: Hq.
        kv_heads: Hk.
        extents: the matrices, for one head.
        row_tiles, key_tiles: tiles of rows, tiles of keys, whether visited or not.
        tiles: tiles that are visited.
        pairs: pairs of queries and keys in them.
        rows_walked, keys_walked: rows, and keys, of the visited tiles.
        rows_seen: rows of those tiles of rows of which any tile is visited.
        mask_bytes, score_bytes: what one walk reads of the tensors of the mask and the score.
        pages: entries of the block table that the visited tiles look up, one for each page that a
            tile touches; 0 where keys do not lie in pages.
        omitted: what is not in these sums, in words.
    """

    tile: tuple[int, int]
    heads: int
    kv_heads: int
    extents: tuple[Extent, ...]
    row_tiles: int = 0
    key_tiles: int = 0
    tiles: int = 0
    pairs: int = 0
    rows_walked: int = 0
    keys_walked: int = 0
    rows_seen: int = 0
    mask_bytes: int = 0
    score_bytes: int = 0
    pages: int = 0
    omitted: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Query rows of all heads."""
        return self.heads * sum(each.items * each.queries for each in self.extents)

    @property
    def keys(self) -> int:
        """Keys of all key heads."""
        return self.kv_heads * sum(each.items * each.keys for each in self.extents)

    @property
    def all_pairs(self) -> int:
        """Pairs, whether they attend or not."""
        return self.heads * sum(each.items * each.queries * each.keys for each in self.extents)

    @property
    def density(self) -> float:
        """Return the share of the pairs that is computed; 1 where there are none."""
        return self.pairs / self.all_pairs if self.all_pairs else 1.0

    @property
    def groups(self) -> int:
        """Key heads of all batch items or sequences."""
        return self.kv_heads * sum(each.items for each in self.extents)


class _Counts(NamedTuple):
    """Counts of what is visited of one head of one score matrix, or of several."""

    tiles: int
    pairs: int
    rows_walked: int
    keys_walked: int
    rows_seen: int
    pages: int = 0


class _Matrix(NamedTuple):
    """A score matrix with the tensors of its mask and score."""

    problem: Problem
    first_batch: int
    mask_tensors: tuple[Tensor, ...]
    score_tensors: tuple[Tensor, ...]


def visits_of(
    problem: Problem,
    tile: tuple[int, int],
    operands: Operands | None = None,
    lengths: Sequence[tuple[int, int]] | None = None,
    together: bool = False,
) -> Visits:
    """Return the visits of a walk.

    Args:
        problem: what to compute.
        tile: queries and keys of a tile.
        operands: with what; may be left out where mask and score capture no tensor.
        lengths: of a variable-length call without operands: each sequence's queries and keys.
        together: one answer serves all batch items and heads, as in the reference; else a mask
            with a table is looked up for each, and one with tensors judged for each batch item.

    Raises:
        InvalidArgument: a tile or the lengths make no sense, or tensors are missing.
        Unsupported: so many tiles would have to be judged that it would take minutes.
    """
    for name, size in zip(("query_tile", "key_tile"), tile, strict=True):
        if size < 1:
            raise InvalidArgument(name, str(size), "at least 1")
    named = problem.mask + problem.score
    if operands is None and any(instr.slots for instr in named):
        raise InvalidArgument(
            "operands", "None", "the operands of the call, because the mask or score has tensors"
        )
    sums = Visits(tile, problem.heads, problem.kv_heads, ())
    for matrix in _matrices(problem, operands, lengths):
        sums = _with(sums, matrix, together)
    expressions = any(instr.op in (EXPR, RAW) and instr.slots for instr in named)
    return sums._replace(omitted=("what expressions load",) if expressions else ())


def lengths_of(problem: Problem, operands: Operands) -> list[tuple[int, int]] | None:
    """Queries and keys of each sequence, where they differ; None for a dense call."""
    if operands.key_lengths is not None:
        keys: list[int] = operands.key_lengths.tolist()
    elif operands.cu_seqlens_k is not None:
        keys = operands.cu_seqlens_k.diff().tolist()
    else:
        return None
    if operands.cu_seqlens_q is None:
        return [(problem.queries, count) for count in keys]
    return list(zip(operands.cu_seqlens_q.diff().tolist(), keys, strict=True))


def _matrices(
    problem: Problem, operands: Operands | None, lengths: Sequence[tuple[int, int]] | None
) -> Iterator[_Matrix]:
    """Yield the score matrices of a call: one if dense, else one per sequence."""
    masks = () if operands is None else operands.mask_tensors
    scores = () if operands is None else operands.score_tensors
    if operands is not None:
        lengths = lengths_of(problem, operands)
    elif problem.layout != "dense" or problem.page_size:
        _check_lengths(problem, lengths)
    else:
        lengths = None
    if lengths is None:
        yield _Matrix(problem, 0, masks, scores)
        return
    for b, (m, n) in enumerate(lengths):
        yield _Matrix(
            problem._replace(layout="dense", batch=1, queries=m, keys=n),
            b,
            cut(problem.mask, masks, b, m, n),
            cut(problem.score, scores, b, m, n),
        )


def _check_lengths(problem: Problem, lengths: Sequence[tuple[int, int]] | None) -> None:
    fix = "Give lengths, or the operands with their cu_seqlens."
    if lengths is None:
        raise InvalidArgument("lengths", "None", "queries and keys of every sequence", fix)
    sums = tuple(sum(each[side] for each in lengths) for side in (0, 1))
    if not problem.page_size and (len(lengths), *sums) != (
        problem.batch,
        problem.queries,
        problem.keys,
    ):
        raise InvalidArgument(
            "lengths",
            f"{len(lengths)} sequences with {sums[0]} queries and {sums[1]} keys",
            f"{problem.batch} sequences that add up to {problem.queries} queries and "
            f"{problem.keys} keys",
            fix,
        )


def _with(sums: Visits, matrix: _Matrix, together: bool) -> Visits:
    problem, (across, along) = matrix.problem, sums.tile
    each = problem.batch * problem.heads
    rows, columns = -(-problem.queries // across), -(-problem.keys // along)
    found, weight = _visited(matrix, sums.tile, together)
    extent = Extent(problem.batch, problem.queries, problem.keys)
    return sums._replace(
        extents=(*sums.extents, extent),
        row_tiles=sums.row_tiles + each * rows,
        key_tiles=sums.key_tiles + each * columns,
        tiles=sums.tiles + weight * found.tiles,
        pairs=sums.pairs + weight * found.pairs,
        rows_walked=sums.rows_walked + weight * found.rows_walked,
        keys_walked=sums.keys_walked + weight * found.keys_walked,
        rows_seen=sums.rows_seen + weight * found.rows_seen,
        mask_bytes=sums.mask_bytes + each * _mask_bytes(matrix, sums.tile),
        score_bytes=sums.score_bytes + weight * _score_bytes(matrix, found),
        pages=sums.pages + weight * found.pages,
    )


def _visited(matrix: _Matrix, tile: tuple[int, int], together: bool) -> tuple[_Counts, int]:
    """Return the visited tiles' counts, and how many times to count them."""
    problem = matrix.problem
    each = problem.batch * problem.heads
    if not each or not problem.queries or not problem.keys:
        return _Counts(0, 0, 0, 0, 0), each
    if is_run(problem.mask):
        return _runs(problem, tile), each
    grid = _looked_up(matrix, tile)
    if grid is None:
        items = [matrix] if together else list(_by_item(matrix))
        grids = torch.stack([_judged(item, tile, len(items)) for item in items])
        return _of_grid(grids, problem, tile), each // len(items)
    if together:
        return _of_grid(grid.any(0).any(0), problem, tile), each
    return _of_grid(grid, problem, tile), each // (grid.shape[0] * grid.shape[1])


def _runs(problem: Problem, tile: tuple[int, int]) -> _Counts:
    start, stop, low, high = _spans_of(problem, tile)
    height, walked, size = stop - start, np.maximum(high - low, 0), problem.page_size
    tiles = -(-walked // tile[1])
    sums = (tiles, height * walked, height * tiles, walked, height * (tiles > 0))
    runs = zip(low.tolist(), high.tolist(), strict=True) if size else ()
    pages = sum(sum(_touched(range(*run), tile[1], size)) for run in runs)
    return _Counts(*(int(each.sum()) for each in sums))._replace(pages=pages)


def _looked_up(matrix: _Matrix, tile: tuple[int, int]) -> Tensor | None:
    """Visited tiles [B|1, Hq|1, rows, columns] by the table of the mask; None where that fails."""
    last = matrix.problem.mask[-1]
    if last.op != "tiles" and not (last.op == "blocks" and len(matrix.problem.mask) == 1):
        return None
    block = (int(last.params[0]), int(last.params[1]))
    if any(size % one for size, one in zip(tile, block, strict=True)):
        return None
    table = (matrix.mask_tensors[last.slots[0]] != 0).cpu()
    rows = -(-matrix.problem.queries // block[0])
    columns = -(-matrix.problem.keys // block[1])
    table = table[:, :, :rows, :columns]
    tall, wide = (size // one for size, one in zip(tile, block, strict=True))
    padded = torch.nn.functional.pad(table, (0, -columns % wide, 0, -rows % tall))
    height, width = padded.shape[2] // tall, padded.shape[3] // wide
    split: Tensor = padded.reshape(*padded.shape[:2], height, tall, width, wide)
    return split.any(5).any(3)


def _by_item(matrix: _Matrix) -> Iterator[_Matrix]:
    """Yield the batch items, each by itself where the tensors of the mask tell them apart."""
    problem, tensors = matrix.problem, matrix.mask_tensors
    named = {slot for instr in problem.mask if instr.op != EXPR for slot in instr.slots}
    if problem.batch == 1 or all(tensors[slot].shape[0] == 1 for slot in named):
        yield matrix
        return
    for b in range(problem.batch):
        own = cut(problem.mask, tensors, b, problem.queries, problem.keys)
        yield _Matrix(problem._replace(batch=1), b, own, matrix.score_tensors)


def _judged(matrix: _Matrix, tile: tuple[int, int], times: int = 1) -> Tensor:
    """Judge each tile one by one: return visited tiles [rows, columns], for ``times`` matrices."""
    problem, (across, along) = matrix.problem, tile
    rows, columns = -(-problem.queries // across), -(-problem.keys // along)
    if rows * columns * times > MOST_TILES:
        raise Unsupported(
            f"an account of {times} x {rows} x {columns} tiles of a mask that is judged one by one",
            fix="make it a table first: tilewise.BlockMask.of(mask, ...).",
        )
    whose = range(matrix.first_batch, matrix.first_batch + problem.batch), range(problem.heads)
    found = torch.zeros(rows, columns, dtype=torch.bool)
    for r in range(rows):
        spanned = range(r * across, min((r + 1) * across, problem.queries))
        for c in range(columns):
            keys = range(c * along, min((c + 1) * along, problem.keys))
            block = Block(spanned, keys, problem.queries, problem.keys, *whose)
            found[r, c] = cover(problem.mask, matrix.mask_tensors, block) is not Cover.EMPTY
    return found


def _of_grid(grid: Tensor, problem: Problem, tile: tuple[int, int]) -> _Counts:
    """Return the sums over visited tiles [.., rows, columns]."""
    heights, widths = (
        torch.tensor([min(size, total - at) for at in range(0, total, size)], dtype=torch.int64)
        for size, total in zip(tile, (problem.queries, problem.keys), strict=True)
    )
    seen = grid.to(torch.int64)
    sums = (
        seen,
        seen * heights[:, None] * widths,
        seen * heights[:, None],
        seen * widths,
        grid.any(-1).to(torch.int64) * heights,
    )
    counts = _Counts(*(int(each.sum()) for each in sums))
    if not problem.page_size:
        return counts
    pages = torch.tensor(_touched(range(problem.keys), tile[1], problem.page_size))
    return counts._replace(pages=int((seen * pages).sum()))


def _mask_bytes(matrix: _Matrix, tile: tuple[int, int]) -> int:
    """Return what a walk of one head reads to judge every tile of a score matrix."""
    problem, total = matrix.problem, 0
    rows, columns = (
        -(-size // one) for size, one in zip((problem.queries, problem.keys), tile, strict=True)
    )
    for instr in problem.mask:
        held = [matrix.mask_tensors[slot] for slot in instr.slots]
        if instr.op == "below" and held:
            total += held[0].element_size() * rows * columns
        elif instr.op == "same_document":
            sizes = (problem.queries * columns, problem.keys * rows)
            pairs = zip(held, sizes, strict=True)
            total += sum(ids.element_size() * size for ids, size in pairs)
        elif instr.op == "dense":
            tall = problem.queries if held[0].size(2) > 1 else rows
            wide = problem.keys if held[0].size(3) > 1 else columns
            total += held[0].element_size() * tall * wide
        elif instr.op in ("blocks", "tiles"):
            cells = [
                sum(_touched(range(size), one, int(block)))
                for size, one, block in zip(
                    (problem.queries, problem.keys), tile, instr.params[:2], strict=True
                )
            ]
            total += held[0].element_size() * cells[0] * cells[1]
    return total


def _touched(places: range, tile: int, block: int) -> list[int]:
    """Return how many blocks each tile touches along one side."""
    starts = range(places.start, places.stop, tile)
    return [(min(at + tile, places.stop) - 1) // block - at // block + 1 for at in starts]


def _score_bytes(matrix: _Matrix, found: _Counts) -> int:
    """Return what the visited tiles read of the tensors of a score."""
    total = 0
    for instr in matrix.problem.score:
        held = [matrix.score_tensors[slot] for slot in instr.slots]
        if instr.op == "alibi":
            total += held[0].element_size() * found.tiles
        elif instr.op == "bias":
            by_row, by_key = held[0].size(2) > 1, held[0].size(3) > 1
            both = found.keys_walked if by_key else found.tiles
            count = (found.pairs if by_key else found.rows_walked) if by_row else both
            total += held[0].element_size() * count
    return total


def is_run(mask: Program) -> bool:
    """Return whether the tiles of every row are one run: a mask of bands and lengths alone."""
    return all(
        instr.op in ("band", "and") or (instr.op == "below" and not instr.slots) for instr in mask
    )


class _Spans(NamedTuple):
    """Of every tile of rows: its rows, and the keys that it visits, none where high <= low."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    low: NDArray[np.int64]
    high: NDArray[np.int64]


def _spans_of(problem: Problem, tile: tuple[int, int]) -> _Spans:
    """Return the runs of all tiles of rows, for a mask that ``is_run``."""
    (across, along), queries, keys = tile, problem.queries, problem.keys
    start = np.arange(0, queries, across)
    stop = np.minimum(start + across, queries)
    first, last = np.zeros_like(start), np.full_like(start, -(-keys // along) - 1)
    for instr in problem.mask:
        low, high = _bounds(instr, start, stop, queries, keys)
        first = np.maximum(first, np.where(low < keys, low // along, last + 1))
        last = np.minimum(last, high // along)
    end = np.where(last >= first, np.minimum((last + 1) * along, keys), 0)
    return _Spans(start, stop, first * along, end)


def runs_of(problem: Problem, tile: tuple[int, int]) -> list[tuple[range, range]]:
    """Return the same row tile by row tile: its rows, and its keys."""
    found = zip(*(each.tolist() for each in _spans_of(problem, tile)), strict=True)
    return [(range(start, stop), range(low, high)) for start, stop, low, high in found]


def _bounds(instr: Instr, start: Any, stop: Any, queries: int, keys: int) -> tuple[Any, Any]:
    """Return the first and last key that any row of each tile may see by one leaf."""
    if instr.op == "below":
        return 0, int(instr.params[0]) - 1
    if instr.op != "band":
        return 0, keys - 1
    left, right, anchor = (int(number) for number in instr.params)
    shift = keys - queries if anchor else 0
    low = np.maximum(start + shift - left, 0) if left >= 0 else 0
    return low, stop - 1 + shift + right if right >= 0 else keys - 1
