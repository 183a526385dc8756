"""The lists of tiles that a BlockMask leaves, and the forward pass that follows them."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_same_bits
from tilewise import BlockMask, masks
from tilewise.kernels.gpu.backend import GpuBackend
from tilewise.kernels.gpu.expressions import Table
from tilewise.kernels.gpu.walk.lists import _KEPT, tile_lists
from tilewise.problem import Operands, Problem
from tilewise.reference.programs import Grid, covers
from tilewise.validation import dense_problem, varlen_problem
from tilewise.variants.lower import Extent, lower_mask

NAN = math.nan


def _problem(queries: int, keys: int) -> Problem:
    q, k = torch.empty(2, 3, queries, 8), torch.empty(2, 3, keys, 8)
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    return dense_problem(q, k, k, mask=(), score=(), **nothing)


def _operands(*tables: Tensor, cu: tuple[Tensor, Tensor] | None = None) -> Operands:
    empty = torch.empty(0)
    return Operands(empty, empty, empty, tables, (), None, *(cu or (None, None)))


def _listed(order: Tensor, counts: Tensor) -> tuple[list[int], list[int]]:
    full, partial = counts.tolist()
    return order[:full].tolist(), order[full : full + partial].tolist()


def _expected(
    pairs: Tensor, sure: Tensor, tile: tuple[int, int], row: int, size: tuple[int, int]
) -> tuple[list[int], list[int]]:
    """Full and partial columns of a row of tiles, from what the table says of each pair.

    ``pairs`` is 0, 1 or 2 for each pair, ``sure`` whether a 2 is to be believed.
    """
    full, partial = [], []
    for column in range(-(-size[1] // tile[1])):
        rows = slice(row * tile[0], min((row + 1) * tile[0], size[0]))
        columns = slice(column * tile[1], min((column + 1) * tile[1], size[1]))
        block = pairs[rows, columns]
        inside = (row + 1) * tile[0] <= size[0] and (column + 1) * tile[1] <= size[1]
        if bool((block == 2).all()) and bool(sure) and inside:
            full.append(column)
        elif bool((block > 0).any()):
            partial.append(column)
    return full, partial


RECTANGLES = [(16, 16), (32, 8), (8, 32), (5, 7), (48, 16), (1, 64), (200, 200)]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("rectangle", RECTANGLES, ids=str)
@pytest.mark.parametrize("tile", [(16, 16), (32, 16)], ids=str)
def test_lists_of_any_rectangles(
    rectangle: tuple[int, int], tile: tuple[int, int], whole: bool
) -> None:
    """Rectangles that are tiles, divide them, hold them, or neither."""
    size = (67, 90)
    rows, columns = (-(-s // r) for s, r in zip(size, rectangle, strict=True))
    generator = torch.Generator().manual_seed(rows * columns)
    drawn = torch.rand(2, 1, rows, columns, generator=generator)
    table = (drawn * 3).to(torch.uint8)
    table[1] = (drawn[1] * 2).to(torch.uint8) * 2  # enough of 0 and 2 to make larger tiles so
    table[1, 0, : rows // 2] = 2
    found = tile_lists(_problem(*size), _operands(table), [Table(0, *rectangle, whole)], *tile)
    assert found is not None
    for b in range(2):
        pairs = table[b, 0].repeat_interleave(rectangle[0], 0).repeat_interleave(rectangle[1], 1)
        for row in range(-(-size[0] // tile[0])):
            expected = _expected(pairs[: size[0], : size[1]], torch.tensor(whole), tile, row, size)
            assert _listed(found.order[b, 0, row], found.counts[b, 0, row]) == expected


def test_lists_by_keys_are_the_same_tiles() -> None:
    """Transposed: of each tile of keys the tiles of queries."""
    table = torch.randint(0, 3, (1, 3, 5, 6), dtype=torch.uint8)
    problem, tables = _problem(80, 96), [Table(0, 16, 16, True)]
    by_rows = tile_lists(problem, _operands(table), tables, 16, 16)
    by_keys = tile_lists(problem, _operands(table), tables, 16, 16, by_keys=True)
    assert by_rows is not None
    assert by_keys is not None
    pairs = {
        (h, row, column)
        for h in range(3)
        for row in range(5)
        for some in _listed(by_rows.order[0, h, row], by_rows.counts[0, h, row])
        for column in some
    }
    assert pairs == {
        (h, row, column)
        for h in range(3)
        for column in range(6)
        for some in _listed(by_keys.order[0, h, column], by_keys.counts[0, h, column])
        for row in some
    }
    assert by_rows.numbers() == (0, 5 * 6, 0, 5 * 2)


def test_lists_are_made_once_for_a_table() -> None:
    """Anew for other tiles, for a table that was changed in place, and for lengths of a call."""
    table, tables = torch.ones(1, 1, 4, 4, dtype=torch.uint8), [Table(0, 16, 16, True)]

    def lists(queries: int, keys: int, by_keys: bool = False) -> Any:
        return tile_lists(_problem(64, 64), _operands(table), tables, queries, keys, by_keys)

    first = lists(16, 16)
    assert lists(16, 16) is first
    assert lists(16, 16, True) is not first
    assert lists(32, 16) is not first
    assert lists(16, 16) is first
    table[0, 0, 0] = 0
    again = lists(16, 16)
    assert again is not first
    assert again.counts[0, 0, :, 1].tolist() == [0, 4, 4, 4]
    for keys in range(16, 16 * 40, 16):  # calls of many sizes keep no more than some
        tile_lists(_problem(64, keys), _operands(table), tables, 16, 16)
    assert len(_KEPT[table]) == 16
    cu = torch.tensor([0, 64])
    packed = _operands(table, cu=(cu, cu))
    made = [tile_lists(_problem(64, 64), packed, tables, 16, 16) for _ in range(2)]
    assert made[0] is not made[1]
    other = torch.ones_like(table)
    kept = weakref.ref(other)
    tile_lists(_problem(64, 64), _operands(other), tables, 16, 16)
    del other
    assert kept() is None


def test_two_tables_leave_what_both_leave() -> None:
    """A tile that one of them calls empty is; one that a whole table calls full is."""
    one, two = (torch.randint(0, 3, (1, 1, 4, 4), dtype=torch.uint8) for _ in range(2))
    tables = [Table(0, 16, 16, False), Table(1, 16, 16, False)]
    found = tile_lists(_problem(64, 64), _operands(one, two), tables, 16, 16)
    assert found is not None
    for row in range(4):
        full, partial = _listed(found.order[0, 0, row], found.counts[0, 0, row])
        assert full == []
        assert partial == ((one[0, 0, row] > 0) & (two[0, 0, row] > 0)).nonzero().flatten().tolist()


def test_packed_ends_are_bounded_by_their_own_lengths() -> None:
    """The table reaches as far as the longest sequence; a tile at the end of another is partial."""
    cu = torch.tensor([0, 40, 56])
    q = torch.empty(56, 3, 8)
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    problem = varlen_problem(q, q, q, cu, cu, mask=(), score=(), **nothing)
    table = torch.full((2, 1, 3, 3), 2, dtype=torch.uint8)
    found = tile_lists(problem, _operands(table, cu=(cu, cu)), [Table(0, 16, 16, True)], 16, 16)
    assert found is not None
    assert _listed(found.order[0, 0, 0], found.counts[0, 0, 0]) == ([0, 1], [2])
    assert _listed(found.order[1, 0, 0], found.counts[1, 0, 0]) == ([0], [1, 2])
    assert tile_lists(problem, _operands(), [], 16, 16) is None


MASKS = {
    "causal": masks.causal(),
    "window": masks.window(30, 5, align="top_left"),
    "documents": masks.document(torch.arange(150) // 40),
    "each": ~masks.document(torch.randint(0, 2, (3, 150)))
    & masks.lengths(torch.tensor([9, 0, 99])),
    "heads": masks.dense(torch.rand(1, 2, 1, 150) < 0.5),
}


@pytest.mark.parametrize("name", MASKS)
def test_tables_are_those_of_the_reference(name: str) -> None:
    """Every rectangle, those at the ends too; with and without batch items and heads."""
    mask, q = MASKS[name], torch.empty(3, 2, 150, 8)
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    problem = dense_problem(q, q, q, mask=mask.program, score=(), **nothing)
    tensors = lower_mask(mask.program, mask.captured, Extent(3, 2, 150, 150), q.device)
    for block in ((64, 32), (70, 9), (150, 200)):
        rows, columns = (-(-150 // size) for size in block)
        grid = Grid(*block, 3 if name == "each" else 1, 2 if name == "heads" else 1, rows, columns)
        found = GpuBackend().covers(problem, Operands(q, q, q, tensors), grid)
        assert torch.equal(found, covers(problem, Operands(q, q, q, tensors), grid))


def test_a_packed_table_is_that_of_the_reference() -> None:
    """What lies past the end of a sequence is empty."""
    mask, cu, q = masks.causal(), torch.tensor([0, 40, 40, 150]), torch.empty(150, 2, 8)
    nothing: dict[str, Any] = {"scale": None, "dropout_p": 0.0, "sinks": None}
    problem = varlen_problem(q, q, q, cu, cu, mask=mask.program, score=(), **nothing)
    operands, grid = Operands(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu), Grid(32, 16, 3, 1, 4, 7)
    found = GpuBackend().covers(problem, operands, grid)
    assert torch.equal(found, covers(problem, operands, grid))


def _agree(mask: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    got = tilewise.attention(q, k, v, mask=mask, backend="gpu", return_lse=True)
    expected = tilewise.attention(q, k, v, mask=mask, backend="tiled", return_lse=True)
    torch.testing.assert_close(got[:2], expected[:2])


@pytest.mark.parametrize(
    "block",
    [
        *((64, 32), (20, 50)),
        *(pytest.param(block, marks=pytest.mark.thorough) for block in ((32, 32), (128, 64))),
    ],
    ids=str,
)
def test_a_block_mask_is_its_mask(block: tuple[int, int]) -> None:
    """Documents, by themselves and with a mask beside the table."""
    q, k, v = (torch.randn(2, 2, 200, 16) for _ in range(3))
    ids = torch.tensor([0, 0, 1, 1, 1, 3, 3, 4, 4, 4]).repeat_interleave(20)
    documents = masks.document(ids)
    sizes: dict[str, Any] = {"queries": 200, "block": block}
    _agree(BlockMask.of(documents & masks.causal(), **sizes), q, k, v)
    _agree(BlockMask.of(documents, **sizes) & masks.causal(), q, k, v)
    _agree(~BlockMask.of(documents, **sizes), q, k, v)


def test_full_tiles_never_look_at_the_mask_and_empty_ones_are_not_there() -> None:
    """A table that says more than its mask is right; keys of empty tiles may be NaN."""
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    layout = torch.tensor([[True, False, False, True], [True, True, False, False]])
    mask = BlockMask.from_layout(layout, (64, 32))
    good = tilewise.attention(q, k, v, mask=mask, backend="gpu")
    k[:, :, 64:96] = NAN
    v[:, :, 64:96] = NAN
    assert_same_bits(tilewise.attention(q, k, v, mask=mask, backend="gpu"), good, "out")
    v[:, :, 32:64] = NAN
    got = tilewise.attention(q, k, v, mask=mask, backend="gpu")
    assert_same_bits(got[:, :, :64], good[:, :, :64], "the rows that do not see them")
    assert bool(got[:, :, 64:].isnan().all())


def test_a_packed_block_mask() -> None:
    """Tables of a variable-length call."""
    cu = torch.tensor([0, 100, 130, 130, 200])
    q, k, v = (torch.randn(200, 2, 16) for _ in range(3))
    mask = BlockMask.of(masks.causal(), cu_seqlens_q=cu, cu_seqlens_k=cu, block=(32, 32))
    got, expected = (
        tilewise.attention_varlen(q, k, v, cu, cu, mask=mask, backend=name)
        for name in ("gpu", "tiled")
    )
    torch.testing.assert_close(got, expected)
