"""Biases of xformers by their definitions: which rows of keys each row of queries sees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

ROWS = (3, 5, 1)  # of the sequences
KEYS = (4, 2, 6)  # of their keys: fewer than rows in the second
ROOM = 8  # of a padded sequence
STARTS = (2, 21, 9)  # of keys anywhere among 30
TABLE = ((4, 1, 0), (2, 6, 5), (3, 7, 2))  # pages of 3 keys, of which there are 8
INNER = (1, 0, 3)  # the first key within the pages of a sequence
PAGE, PAGES = 3, 8

Rule = Callable[[int, int, int, int], bool]  # (m, n, M, N), counted within a sequence


class Case(NamedTuple):
    """A bias.

    Args:
        name: of its class.
        make: it, from a module of biases: tilewise's or xformers'.
        rule: which pairs of a sequence attend.
        keys: for each sequence the rows of its keys; None for one sequence of 7 rows, 9 keys.
        total: how many rows of keys there are.
    """

    name: str
    make: Callable[[Any], Any]
    rule: Rule
    keys: Sequence[Sequence[int]] | None = None
    total: int = 9

    def seen(self) -> Tensor:
        """Which pairs attend: bool [M, N]."""
        if self.keys is None:
            return torch.tensor([[self.rule(m, n, 7, 9) for n in range(9)] for m in range(7)])
        found = torch.zeros(sum(ROWS), self.total, dtype=torch.bool)
        first = 0
        for count, rows in zip(ROWS, self.keys, strict=True):
            for m in range(count):
                for n, row in enumerate(rows):
                    found[first + m, row] |= self.rule(m, n, count, len(rows))
            first += count
        return found


def every(m: int, n: int, M: int, N: int) -> bool:
    return True


def first(m: int, n: int, M: int, N: int) -> bool:
    return n <= m


def last(m: int, n: int, M: int, N: int) -> bool:
    return N - n >= M - m


def within(left: int, right: int) -> Rule:
    return lambda m, n, M, N: -left <= (n - N) - (m - M) <= right


def window(size: int, rule: Rule, shift: bool) -> Rule:
    return lambda m, n, M, N: rule(m, n, M, N) and n > m + (N - M if shift else 0) - size


def _runs(starts: Sequence[int]) -> list[list[int]]:
    return [[start + n for n in range(count)] for start, count in zip(starts, KEYS, strict=True)]


def _paged(starts: Sequence[int]) -> list[list[int]]:
    return [
        [pages[at // PAGE] * PAGE + at % PAGE for at in run]
        for pages, run in zip(TABLE, _runs(starts), strict=True)
    ]


def _in_pages(name: str) -> Callable[[Any], Any]:
    def make(module: Any) -> Any:
        table = torch.tensor(TABLE, dtype=torch.int32)
        if "Gappy" not in name:
            return getattr(module, name).from_seqlens(list(ROWS), list(KEYS), table, PAGE)
        room = PAGE * len(TABLE[0])  # xformers' own ``from_seqlens`` of this class always raises
        starts = [inner + room * i for i, inner in enumerate((*INNER, 0))]
        bias = module.BlockDiagonalGappyKeysMask.from_seqlens(list(ROWS), starts, list(KEYS))
        return bias.make_paged(table, PAGE, room, getattr(module, name))

    return make


def _of(name: str, *given: Any, maker: str = "from_seqlens") -> Callable[[Any], Any]:
    return lambda module: getattr(getattr(module, name), maker)(*given)


# The rows of keys of each sequence, and how many rows there are in all.
_SIDE = _runs((0, 4, 6)), 12
_PADDED = _runs((0, ROOM, 2 * ROOM)), 3 * ROOM
_GAPPY = _runs(STARTS), 30
_LENGTHS = (list(ROWS), list(KEYS))
_FILLED = (list(ROWS), ROOM, list(KEYS))
_ANYWHERE = (list(ROWS), [*STARTS, 30], list(KEYS))
_WHOLE = (list(ROWS), [5, 7, 1])  # as many keys as rows, or more
_WIDER = [list(range(5)), list(range(5, 12)), [12]], 13

CASES = (
    Case("LowerTriangularMask", lambda x: x.LowerTriangularMask(), first),
    Case(
        "LowerTriangularFromBottomRightMask", lambda x: x.LowerTriangularFromBottomRightMask(), last
    ),
    Case(
        "LowerTriangularFromBottomRightLocalAttentionMask",
        lambda x: x.LowerTriangularFromBottomRightMask().make_local_attention(3),
        window(3, last, True),
    ),
    Case(
        "LocalAttentionFromBottomRightMask",
        lambda x: x.LocalAttentionFromBottomRightMask(window_left=2, window_right=1),
        within(2, 1),
    ),
    Case("BlockDiagonalMask", _of("BlockDiagonalMask", *_LENGTHS), every, *_SIDE),
    Case(
        "BlockDiagonalCausalMask",
        lambda x: x.BlockDiagonalMask.from_seqlens(*_LENGTHS).make_causal(),
        first,
        *_SIDE,
    ),
    Case(
        "BlockDiagonalCausalFromBottomRightMask",
        lambda x: x.BlockDiagonalMask.from_seqlens(*_WHOLE).make_causal_from_bottomright(),
        last,
        *_WIDER,
    ),
    Case(
        "BlockDiagonalCausalLocalAttentionMask",
        lambda x: x.BlockDiagonalMask.from_seqlens(*_LENGTHS).make_local_attention(4),
        window(4, first, False),
        *_SIDE,
    ),
    Case(
        "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
        lambda x: x.BlockDiagonalMask.from_seqlens(*_WHOLE).make_local_attention_from_bottomright(
            2
        ),
        window(2, last, True),
        *_WIDER,
    ),
    Case(
        "BlockDiagonalPaddedKeysMask", _of("BlockDiagonalPaddedKeysMask", *_FILLED), every, *_PADDED
    ),
    Case(
        "BlockDiagonalCausalWithOffsetPaddedKeysMask",
        _of("BlockDiagonalCausalWithOffsetPaddedKeysMask", *_FILLED),
        last,
        *_PADDED,
    ),
    Case(
        "BlockDiagonalLocalAttentionPaddedKeysMask",
        lambda x: x.BlockDiagonalPaddedKeysMask.from_seqlens(*_FILLED).make_local_attention(2, 1),
        within(2, 1),
        *_PADDED,
    ),
    Case(
        "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
        _of(
            "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
            *_FILLED,
            2,
            maker="from_seqlens_local",
        ),
        window(2, last, True),
        *_PADDED,
    ),
    Case(
        "BlockDiagonalGappyKeysMask", _of("BlockDiagonalGappyKeysMask", *_ANYWHERE), every, *_GAPPY
    ),
    Case(
        "BlockDiagonalCausalWithOffsetGappyKeysMask",
        _of("BlockDiagonalCausalWithOffsetGappyKeysMask", *_ANYWHERE),
        last,
        *_GAPPY,
    ),
    *(
        Case(name, _in_pages(name), rule, _paged(starts), PAGE * PAGES)
        for name, rule, starts in (
            ("PagedBlockDiagonalPaddedKeysMask", every, (0, 0, 0)),
            ("PagedBlockDiagonalCausalWithOffsetPaddedKeysMask", last, (0, 0, 0)),
            ("PagedBlockDiagonalGappyKeysMask", every, INNER),
            ("PagedBlockDiagonalCausalWithOffsetGappyKeysMask", last, INNER),
        )
    ),
)
