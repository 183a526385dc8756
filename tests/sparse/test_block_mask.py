"""BlockMask as a value: what it says of itself, equality, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewise
from tests.sparse.pairs import SIZES, Sizes, catalogue, shown, table_of
from tests.variants.drawn import SHAPES, expressions, own_slots, program_of, quarters
from tilewise import BlockMask, masks
from tilewise.engine import dispatch
from tilewise.errors import InvalidArgument, InvalidType, Unsupported
from tilewise.kernels.cpu.backend import CpuBackend
from tilewise.variants.program import Instr
from tilewise.variants.values import Mask

CATALOGUE = catalogue()
KEYWORDS: dict[str, Any] = {"batch": SIZES.batch, "heads": SIZES.heads}


def of(name: str) -> BlockMask:
    return BlockMask.of(CATALOGUE[name], SIZES.queries, SIZES.keys, **KEYWORDS)


def test_what_it_says() -> None:
    found = BlockMask.of(masks.causal(), 256, 384, block=(64, 128))
    assert found.covers.tolist() == [[[[2, 1, 0], [2, 1, 0], [2, 2, 1], [2, 2, 1]]]]
    assert found.counts == (2, 4, 6)
    assert found.density == 10 / 12
    assert (found.block, found.queries, found.keys) == ((64, 128), 256, 384)
    assert repr(found) == (
        "BlockMask(4 x 3 tiles of 64 x 128, density 0.833: 2 empty, 4 partial, 6 full)"
    )
    assert found.picture() == "█▒·\n█▒·\n██▒\n██▒"
    assert str(found) == f"{found!r}\n{found.picture()}"


def test_the_default_is_a_square_of_the_kernels_tiles() -> None:
    found = BlockMask.of(masks.causal(), 300)
    assert (found.queries, found.keys, found.block) == (300, 300, (64, 128))
    assert BlockMask.of(None, 300).counts == (0, 0, 15)


def test_large_pictures_are_small() -> None:
    found = BlockMask.of(masks.window(40, 0), 2**14, block=(16, 16))
    lines = found.picture(width=32).splitlines()
    assert len(lines) == 16
    assert {len(line) for line in lines} == {32}
    for row, line in enumerate(lines):
        assert set(line[: max(0, 2 * row - 1)]) <= {"·"}
        assert set(line[2 * row : 2 * row + 2]) == {"░"}
        assert set(line[2 * row + 2 :]) <= {"·"}
    heads = BlockMask.of(lambda b, h, m, n: n < 8 * h, 8, 16, heads=3, block=(8, 8))
    assert [heads.picture(head=head) for head in range(3)] == ["··", "█·", "██"]
    assert repr(heads).startswith("BlockMask(1 x 3 x 1 x 2 tiles")
    assert BlockMask.of(masks.causal(), 0, 5).picture() == ""


def test_layout() -> None:
    tiles = torch.tensor([[True, False, True], [False, True, True]])
    found = BlockMask.from_layout(tiles, (5, 4))
    assert found.counts == (2, 0, 4)
    assert (found.queries, found.keys) == (None, None)
    assert found.picture() == "█·█\n·██"
    each = BlockMask.from_layout(torch.stack([tiles, ~tiles]), (5, 4))
    assert each.covers.shape == (1, 2, 2, 3)
    sizes = SIZES._replace(batch=1, heads=2, queries=8, keys=11)
    assert torch.equal(each.covers, table_of(shown(each, sizes), (5, 4)))
    tiles.zero_()
    assert found.counts == (2, 0, 4)


@pytest.mark.parametrize("name", ["causal", "mixed", "layout", "heads", "looked-up"])
def test_equality(name: str) -> None:
    """Made again, copied, pickled: equal; another mask, size or tensor: not."""
    found = of(name)
    others = [of(name), pickle.loads(pickle.dumps(found)), copy.deepcopy(found), found.to("cpu")]
    for other in others:
        assert other == found
        assert hash(other) == hash(found)
    assert found != of("window")
    assert of("causal") != BlockMask.of(masks.causal(), SIZES.queries, SIZES.keys + 1)
    assert found != CATALOGUE["causal"]
    ids = torch.zeros(9, dtype=torch.int64)
    assert BlockMask.of(masks.document(ids), 9) != BlockMask.of(masks.document(ids + 1), 9)


@pytest.mark.parametrize("name", CATALOGUE)
def test_to_mask(name: str) -> None:
    """The mask without its table, with it, and with the table of a table show the same pairs."""
    found = of(name)
    expected = shown(CATALOGUE[name])
    assert torch.equal(shown(found), expected)
    assert torch.equal(shown(found.to_mask()), expected)
    assert type(found.to_mask()) is Mask
    again = BlockMask.of(found, SIZES.queries, SIZES.keys, **KEYWORDS)
    assert again == found


def test_algebra() -> None:
    """Masks with tables compose as masks do."""
    one, other = of("mixed"), of("layout")
    whole, part = shown(one), shown(other)
    for made, expected in (
        (one & other, whole & part),
        (one | masks.causal(), whole | shown(masks.causal())),
        (~other, ~part),
        (torch.ones(1, dtype=torch.bool) & one, whole),
    ):
        assert type(made) is Mask
        assert torch.equal(shown(made), expected)
        found = BlockMask.of(made, SIZES.queries, SIZES.keys, **KEYWORDS)
        table = table_of(expected, (64, 128))
        assert torch.equal(found.covers.expand_as(table), table)


def test_immutable() -> None:
    found = of("causal")
    with pytest.raises(AttributeError, match="immutable"):
        found.covers = torch.zeros(1)  # type: ignore[misc]
    with pytest.raises(InvalidType, match="truth value"):
        bool(found)


def test_changed_tensors_are_refused() -> None:
    """What was captured changes in place: no call goes on with the table of before."""
    ids = torch.arange(64) // 8
    found = BlockMask.of(masks.document(ids), 64)
    assert found.current() is found
    other = torch.ones(64, dtype=torch.bool)
    joined = found & (lambda b, h, m, n: other[n])
    copied = copy.deepcopy(joined)
    other[3] = False  # no table was made from it
    assert joined.current() is joined
    made = [found, joined, masks.causal() | found, ~found, ~(found | masks.causal())]
    ids[5] = 9
    q = torch.zeros(1, 1, 64, 8)
    for stale in (*made, found & masks.causal(), ~found):
        with pytest.raises(InvalidArgument, match="changed in place since it was made"):
            tilewise.attention(q, q, q, mask=stale)
    for used in (lambda: found.to("cpu"), found.to_flex, lambda: copy.deepcopy(joined)):
        with pytest.raises(InvalidArgument, match="changed in place since it was made"):
            used()
    assert copied.current() is copied
    next(each for each in copied.captured if each.dtype is torch.int64)[5] = 9
    with pytest.raises(InvalidArgument, match="changed in place since it was made"):
        copied.current()
    assert BlockMask.of(masks.document(ids), 64).current().counts == (0, 1, 0)
    with torch.inference_mode():
        fixed = torch.arange(64) // 8
        assert BlockMask.of(masks.document(fixed), 64).counts == (0, 1, 0)


MASK = masks.causal()
PER_HEAD: Callable[..., Any] = lambda b, h, m, n: n < h  # noqa: E731
REFUSED: dict[type[Exception], dict[str, Callable[[], object]]] = {
    InvalidArgument: {
        "queries": lambda: BlockMask.of(MASK),
        "keys: got -1": lambda: BlockMask.of(MASK, 8, -1),
        "heads: got None": lambda: BlockMask.of(PER_HEAD, 8),
        "heads: got 0": lambda: BlockMask.of(PER_HEAD, 8, heads=0),
        "batch: got None": lambda: BlockMask.of(masks.lengths(torch.tensor([1, 2])), 8),
        "with B = 3": lambda: BlockMask.of(masks.lengths(torch.tensor([1, 2])), 8, batch=3),
        r"block\[1\]: got 0": lambda: BlockMask.of(MASK, 8, block=(64, 0)),
        "dtype": lambda: BlockMask.of(MASK, 8, dtype=torch.int64),
        "cu_seqlens_k: got None": lambda: BlockMask.of(MASK, cu_seqlens_q=torch.tensor([0, 5])),
        "queries: got 5; required: nothing beside": lambda: BlockMask.of(
            MASK, 5, cu_seqlens_q=torch.tensor([0, 5]), cu_seqlens_k=torch.tensor([0, 5])
        ),
        "never decrease": lambda: BlockMask.of(
            MASK, cu_seqlens_q=torch.tensor([0, 5, 4]), cu_seqlens_k=torch.tensor([0, 5, 9])
        ),
        "tiles.*float32": lambda: BlockMask.from_layout(torch.ones(2, 2)),
        "tiles": lambda: BlockMask.from_layout(torch.ones(2, dtype=torch.bool)),
        "band.*table": lambda: BlockMask((Instr("band", (-1, 0, 1)),)),
        r"\(\).*table": lambda: BlockMask(()),
        "head: got 3": lambda: of("heads").picture(head=3),
        "width": lambda: of("heads").picture(width=0),
    },
    InvalidType: {
        "queries": lambda: BlockMask.of(MASK, 8.0),  # type: ignore[arg-type]
        "a pair": lambda: BlockMask.of(MASK, 8, block=64),  # type: ignore[arg-type]
        "mask": lambda: BlockMask.of(3, 8),  # type: ignore[arg-type]
        "tiles": lambda: BlockMask.from_layout([[True]]),  # type: ignore[arg-type]
        "iteration": lambda: list(of("heads")),
    },
}


@pytest.mark.parametrize(
    ("kind", "message"), [(kind, message) for kind, rows in REFUSED.items() for message in rows]
)
def test_refused(kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        REFUSED[kind][message]()


def test_not_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(Unsupported, match="outside of what is compiled"):
        BlockMask.of(masks.causal(), 8)


# ---- The table of a mask: no tile is called what it is not, by any way of computing it.


BLOCKS = ((64, 128), (128, 128), (48, 80), (1, 7), (200, 16), (1000, 1000))
# More tiles than are computed on one thread, and a batch of one; nothing along one side or both.
LARGE, ODD = Sizes(1, 2, 1030, 4100), (Sizes(1, 1, 1, 1), Sizes(2, 2, 0, 5), Sizes(1, 3, 7, 0))


@pytest.fixture(params=["core", "reference"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table by the core, or as where the core is missing."""
    missing = dispatch.load("cpu").absence()
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
        (masks.document(ids[:1]), (1, 1)),
        (masks.lengths(torch.tensor([1, 2, 3, 4])), (4, 1)),
        (lambda b, h, m, n: ids[b, m] == ids[b, n], (4, 1)),
        (lambda b, h, m, n: m // (h + 1) == n, (1, 6)),
        (torch.ones(6, 9, 9, dtype=torch.bool), (1, 6)),
        (masks.causal() & (lambda b, h, m, n: (m + n + b * h) % 2 == 0), (4, 6)),
    ]
    for mask, apart in cases:
        assert BlockMask.of(mask, 9, **many).covers.shape[:2] == apart
    two = BlockMask.of(masks.document(ids[:2]), 9, batch=2, heads=6)
    assert two.covers.shape[:2] == (2, 1)


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
