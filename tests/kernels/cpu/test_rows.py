"""Rows of a table: copied as torch copies them, and added in order, whatever the threads."""

from __future__ import annotations

import pytest
import torch

from tests.contract import assert_same_bits
from tilewise.kernels.cpu import core
from tilewise.kernels.key_lists import add_rows, copied_rows, zero_rows

pytestmark = pytest.mark.usefixtures("isa")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WIDTHS = (1, 5, 64, 130)
SOME, COUNT = 40, 150  # so most places come more than once


def _drawn(dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sizes[-1])).to(dtype)


def _places() -> torch.Tensor:
    return torch.randint(SOME, (COUNT,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies(dtype: torch.dtype, width: int) -> None:
    """Of a table whose rows overlap too, into memory that was there."""
    numbers, places = _drawn(dtype, SOME * width + width), _places()
    for stride in (width, width // 2 + 1):
        table = numbers.as_strided((SOME, width), (stride, 1))
        assert_same_bits(copied_rows(table, places), table[places], "rows")
        room = torch.full((COUNT, width), 7.0, dtype=dtype)
        assert copied_rows(table, places, room) is room
        assert_same_bits(room, table[places], "rows in a room")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum in the order of the rows, in the dtype of statistics; the same with threads."""
    rows, places = _drawn(dtype, COUNT, width), _places()
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    expected = _drawn(wide, SOME, width)
    found = [expected.clone() for _ in range(2)]
    for place, row in zip(places.tolist(), rows.to(wide), strict=True):
        expected[place] += row
    for threads, table in enumerate(found, 1):
        monkeypatch.setattr("tilewise.kernels.key_lists.threads", lambda count=threads: count)
        add_rows(table, places, rows)
        assert_same_bits(table, expected, f"sums, {threads} threads")


def test_nothing_to_do() -> None:
    table = torch.ones(3, 4)
    none = torch.zeros(0, dtype=torch.int64)
    assert copied_rows(table, none).shape == (0, 4)
    add_rows(table, none, torch.ones(0, 4))
    assert bool((table == 1).all())


def test_places_outside_are_refused() -> None:
    for place in (-1, 3):
        places = torch.tensor([0, place])
        with pytest.raises(ValueError, match=f"place {place} is none of the table's 3"):
            copied_rows(torch.ones(3, 4), places)
        with pytest.raises(ValueError, match=f"place {place} is none of the table's 3"):
            add_rows(torch.ones(3, 4), places, torch.ones(2, 4))


@pytest.mark.parametrize("size", [10, 1 << 21])
def test_zeros(size: int) -> None:
    """Few of them, and so many that they are in large pages; in memory that was in use too."""
    for _ in range(2):
        made = zero_rows(torch.empty(size, 1, dtype=torch.bfloat16), torch.float32)
        assert made.shape == (size, 1)
        assert made.dtype is torch.float32
        assert not made.any()
        made.fill_(3)


def test_large_pages_of_nothing() -> None:
    core().large_pages(0, 0)
    core().large_pages(4097, 10)  # less than a page
