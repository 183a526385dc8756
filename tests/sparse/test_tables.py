"""The table of a mask: no tile is called what it is not, by any way of computing it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse.pairs import SIZES, Sizes, catalogue, shown, table_of
from tests.variants.drawn import SHAPES, expressions, own_slots, program_of, quarters
from tilewise import BlockMask, masks
from tilewise.engine import registry
from tilewise.kernels.cpu.backend import CpuBackend
from tilewise.variants.values import Mask

BLOCKS = ((64, 128), (128, 128), (48, 80), (1, 7), (200, 16), (1000, 1000))
CATALOGUE = catalogue()
# More tiles than are computed on one thread, and a batch of one; nothing along one side or both.
LARGE, ODD = Sizes(1, 2, 1030, 4100), (Sizes(1, 1, 1, 1), Sizes(2, 2, 0, 5), Sizes(1, 3, 7, 0))


@pytest.fixture(params=["core", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table by the core, or as where the core is missing."""
    missing = registry.load("cpu").absence()
    if request.param == "reference":
        monkeypatch.setattr(CpuBackend, "absence", lambda self: "hidden by a test")
    elif missing:
        pytest.skip(missing)
    return request.param


def _check(mask: Any, sizes: Sizes, block: tuple[int, int]) -> BlockMask:
    keywords: dict[str, Any] = {"batch": sizes.batch, "heads": sizes.heads, "block": block}
    found = BlockMask.of(mask, sizes.queries, sizes.keys, **keywords)
    expected = table_of(shown(mask, sizes), block)
    assert found.covers.dtype is torch.uint8
    assert torch.equal(found.covers.expand_as(expected), expected)
    return found


@pytest.mark.parametrize("way", ["reference"], indirect=True)
@pytest.mark.parametrize("name", CATALOGUE)
def test_exact_without_the_core(name: str, way: str) -> None:
    _check(CATALOGUE[name], SIZES, BLOCKS[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", CATALOGUE)
def test_exact_in_every_block(name: str, way: str) -> None:
    for block in BLOCKS:
        _check(CATALOGUE[name], SIZES, block)


@pytest.mark.parametrize("name", CATALOGUE)
def test_exact_on_every_instruction_set(name: str, isa: str) -> None:
    _check(CATALOGUE[name], SIZES, (64, 128))


@pytest.mark.parametrize("sizes", ODD)
def test_odd_sizes(sizes: Sizes, way: str) -> None:
    for mask in catalogue(sizes).values():
        _check(mask, sizes, (2, 3))


@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_threads(threads: int) -> None:
    torch.set_num_threads(threads)
    for name in ("documents-causal", "mixed-or-band", "neighbours", "checkers"):
        _check(catalogue(LARGE)[name], LARGE, (16, 32))


@st.composite
def drawn_masks(draw: st.DrawFn) -> Mask:
    kinds = draw(st.lists(st.sampled_from(["bool", "int"]), max_size=4))
    expr, used = own_slots(draw(expressions("bool", kinds=kinds, floats=False, defined=True)))
    types = {"bool": torch.bool, "int": torch.int64}
    captured = tuple(
        (quarters(SHAPES[slot % len(SHAPES)], slot) * 4).to(types[kinds[slot]]) for slot in used
    )
    return Mask(program_of(expr), captured)


@given(drawn_masks(), st.sampled_from([(4, 5), (8, 16), (64, 128)]))
@settings(max_examples=80, deadline=None)
def test_drawn_expressions(mask: Mask, block: tuple[int, int]) -> None:
    """Of any expression in the language: intervals prove nothing that is not so."""
    _check(mask, Sizes(2, 2, 21, 50), block)


def test_one_table_where_one_serves_all() -> None:
    many: dict[str, Any] = {"batch": 4, "heads": 6}
    ids = torch.zeros(4, 9, dtype=torch.int64)
    cases: list[tuple[Any, tuple[int, int]]] = [
        (masks.causal(), (1, 1)),
        (masks.document(ids[0]), (1, 1)),
        (masks.document(ids), (4, 1)),
        (masks.lengths(torch.tensor([1, 2, 3, 4])), (4, 1)),
        (lambda b, h, m, n: ids[b, m] == ids[b, n], (4, 1)),
        (lambda b, h, m, n: m // (h + 1) == n, (1, 6)),
        (torch.ones(6, 9, 9, dtype=torch.bool), (1, 6)),
        (masks.causal() & (lambda b, h, m, n: (m + n + b * h) % 2 == 0), (4, 6)),
    ]
    for mask, apart in cases:
        assert BlockMask.of(mask, 9, **many).covers.shape[:2] == apart


def test_memory_is_of_tiles() -> None:
    """A million tokens against themselves: the table is what is kept."""
    found = BlockMask.of(masks.window(500, 0), 2**20, block=(1024, 1024))
    assert found.covers.shape == (1, 1, 1024, 1024)
    assert found.counts == (1024 * 1024 - 2047, 2047, 0)


def test_varlen() -> None:
    """Each sequence has its own corner, its own documents, and nothing past its end."""
    lengths = [(70, 200), (0, 10), (300, 130), (5, 0), (64, 128)]
    cu_q, cu_k = (torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) for side in (0, 1))
    ids = torch.arange(300).expand(5, 300) // torch.tensor([40, 50, 60, 70, 80])[:, None]
    mask = masks.causal() | masks.document(ids, ids)
    found = BlockMask.of(mask, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, block=(32, 48))
    assert (found.queries, found.keys) == (300, 200)
    for b, (queries, keys) in enumerate(lengths):
        own = masks.causal() | masks.document(ids[b, :keys], ids[b, :queries])
        expected = table_of(shown(own, Sizes(1, 1, queries, keys)), (32, 48))[0, 0]
        rows, columns = expected.shape
        assert torch.equal(found.covers[b, 0, :rows, :columns], expected)
        assert int(found.covers[b, 0, rows:].sum() + found.covers[b, 0, :, columns:].sum()) == 0
