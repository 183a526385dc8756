"""Checks of the CPU's tests on the GPU kernels: a NaN in the statistics, and keys in blocks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import tilewise
from tests.kernels.test_partial import Sizes, check_blocks, check_what_a_score_reads
from tests.kernels.test_statistics import _check, _holes, _inputs, _scores
from tilewise import masks


@pytest.mark.parametrize("wanted", [True, "top1"], ids=str)
@pytest.mark.parametrize(("sizes", "shift"), [((70, 150), 0), *(((1, 300), n) for n in range(8))])
def test_a_nan_is_seen(sizes: tuple[int, int], shift: int, wanted: Any) -> None:
    """By rows of every kind at once; by one query, of each kind of row in turn."""
    qkv = _inputs(*sizes, torch.float32)
    table = _holes(max(8, sizes[0]), sizes[1])[shift : shift + sizes[0]]
    score = [lambda s, b, h, m, n: s + table[m, n]]
    stats = tilewise.attention(*qkv, score=score, backend="gpu", return_stats=wanted).stats
    _check(stats, _scores(*qkv[:2], table))


def test_in_whole_and_in_partial_blocks() -> None:
    """Whole blocks are walked first: the first NaN counts, whichever walk meets it."""
    q, k, v = _inputs(70, 300, torch.float32)
    k[:, 0, [3, 290]] = math.nan
    k[:, 1, [150, 40]] = math.nan
    mask = masks.window(200, 0)
    m, n = torch.arange(70)[:, None] + 230, torch.arange(300)
    seen = (n <= m) & (n >= m - 200)
    stats = tilewise.attention(q, k, v, mask=mask, backend="gpu", return_stats="top1").stats
    _check(stats, _scores(q, k, None, seen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_add_up(dtype: torch.dtype) -> None:
    check_blocks("gpu", Sizes(19, (0, 1, 20, 37), 16, 16), dtype)


def test_what_a_score_reads() -> None:
    check_what_a_score_reads("gpu")
