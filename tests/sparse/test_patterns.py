"""The published patterns show what their papers say, pair by pair."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.sparse.pairs import Sizes, shown
from tilewise import BlockMask, patterns
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.values import Mask

M, N = 45, 52

Says = Callable[[int, int], bool]


def _butterfly(m: int, n: int) -> bool:
    """The support of a sum of butterfly factors: factor k joins i with i plus or minus k / 2."""
    row, column = m // 4, n // 4
    if row == column:
        return True
    for half in (1, 2, 4, 8):
        block = 2 * half
        joined = row // block == column // block and row % half == column % half
        if joined and abs(row - column) == half:
            return True
    return False


PAPERS: dict[str, tuple[Callable[[], Mask], Says]] = {
    "butterfly": (lambda: patterns.butterfly(4), _butterfly),
    "butterfly-near": (
        lambda: patterns.butterfly(4, reach=4),
        lambda m, n: _butterfly(m, n) and abs(m // 4 - n // 4) < 4,
    ),
    "pixelated": (
        lambda: patterns.butterfly(4, low_rank=2),
        lambda m, n: _butterfly(m, n) or m < 8 or n < 8,
    ),
    "longformer": (
        lambda: patterns.local_global(5, 3),
        lambda m, n: abs(m - n) <= 5 or m < 3 or n < 3,
    ),
    "window-only": (lambda: patterns.local_global(2, 0), lambda m, n: abs(m - n) <= 2),
    "dilated": (
        lambda: patterns.dilated(3, 4),
        lambda m, n: abs(m - n) in (0, 4, 8, 12),
    ),
    "strided": (
        lambda: patterns.strided(7),
        lambda m, n: n <= m and (m - n < 7 or (m - n) % 7 == 0),
    ),
    "fixed": (
        lambda: patterns.fixed(8, 2),
        lambda m, n: n <= m and (m // 8 == n // 8 or n % 8 in (6, 7)),
    ),
    "fixed-all": (lambda: patterns.fixed(4, 4), lambda m, n: n <= m),
}


@pytest.mark.parametrize("name", PAPERS)
def test_as_published(name: str) -> None:
    make, says = PAPERS[name]
    expected = torch.tensor([[says(m, n) for n in range(N)] for m in range(M)])
    assert torch.equal(shown(make(), Sizes(1, 1, M, N))[0, 0], expected)
    assert make().text == make().text


def test_butterfly_has_a_block_per_bit_and_row() -> None:
    table = BlockMask.of(patterns.butterfly(128), 128 * 64, block=(128, 128)).covers
    assert (table == 2).sum(-1).unique().tolist() == [7]
    assert (table == 1).sum() == 0


def test_bigbird() -> None:
    """Window and global blocks, the same draws for one seed, each head's own, none twice."""
    made = patterns.bigbird(640, 960, block=32, window=3, globals=1, random=4, seed=3, heads=2)
    (table,) = made.captured
    assert table.shape == (1, 2, 20, 30)
    row, column = torch.arange(20)[:, None], torch.arange(30)
    always = ((row - column).abs() <= 1) | (row < 1) | (column < 1)
    assert bool(table[0, :, always].all())
    extra = (table[0] & ~always).sum(-1)
    assert int(extra.max()) == 4
    assert not torch.equal(table[0, 0], table[0, 1])
    again = patterns.bigbird(640, 960, block=32, window=3, globals=1, random=4, seed=3, heads=2)
    other = patterns.bigbird(640, 960, block=32, window=3, globals=1, random=4, seed=4, heads=2)
    assert torch.equal(again.captured[0], table)
    assert not torch.equal(other.captured[0], table)
    everything = patterns.bigbird(64, block=32, random=99)
    assert bool(everything.captured[0].all())
    assert patterns.bigbird(0).captured[0].shape == (1, 1, 0, 0)


def test_random_is_not_drawn_from_torchs_generator() -> None:
    before = torch.get_rng_state()
    patterns.bigbird(640)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: patterns.butterfly(0), InvalidArgument, "block: got 0"),
        (lambda: patterns.butterfly(8, reach=0), InvalidArgument, "reach: got 0"),
        (lambda: patterns.butterfly(8, low_rank=-1), InvalidArgument, "low_rank: got -1"),
        (lambda: patterns.local_global(-1, 2), InvalidArgument, "window: got -1"),
        (lambda: patterns.local_global(1, 2.0), InvalidType, "tokens: got a float"),  # type: ignore[arg-type]
        (lambda: patterns.dilated(3, 0), InvalidArgument, "dilation: got 0"),
        (lambda: patterns.fixed(4, 5), InvalidArgument, "summary: got 5; required: at most"),
        (lambda: patterns.bigbird(64, window=2), InvalidArgument, "window: got 2"),
        (lambda: patterns.layout(torch.ones(2, 2).bool(), 4), InvalidType, "block: got 4"),  # type: ignore[arg-type]
        (lambda: patterns.layout(torch.ones(2, 2).bool(), (4, 0)), InvalidArgument, r"block\[1\]"),
        (lambda: patterns.bigbird(64, seed=-1), InvalidArgument, "seed: got -1"),
    ],
)
def test_refused(make: Callable[[], Mask], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()
