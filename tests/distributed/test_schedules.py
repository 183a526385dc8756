"""Attention over several processes is that of one.

Protects ``tilewise.distributed``: every variant of the catalogue, every schedule, uneven lengths,
packed sequences, dropout, the 2x rule, and the same bits wherever they are promised.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tests.distributed.calls import (
    NAMES,
    SIZES,
    WAYS,
    Packed,
    Way,
    listed,
    names,
    packed,
    variant,
)
from tests.distributed.ranks import COUNT, Ranks
from tests.variants.calls import Call, Sizes, assert_all_close
from tilewise import masks
from tilewise.distributed import Layout, balanced_layout, context_parallel_attention, parts
from tilewise.distributed.layout import even_bounds, layout_of
from tilewise.distributed.parts import Starts
from tilewise.engine.dispatch import plan_of
from tilewise.validation import varlen_problem

ways = pytest.mark.parametrize("way", WAYS)
# Queries and keys of each sequence: empty ones, ones that begin and end everywhere.
LENGTHS = [(9, 9), (0, 0), (1, 4), (30, 30), (5, 0), (0, 3), (17, 20), (2, 2)]


@ways
@names
def test_every_variant(ranks: Ranks, name: str, way: str) -> None:
    """In float64, against the formula in plain torch: outputs and every gradient."""
    expected = Call(NAMES[name], torch.float64, SIZES).plain()
    for got in ranks.run(variant, WAYS[way], name, torch.float64, SIZES):
        assert_all_close(got, expected)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["causal", "documents", "relative", "sinks"])
def test_the_2x_rule(ranks: Ranks, name: str, dtype: torch.dtype, way: str) -> None:
    call, wide = Call(NAMES[name], dtype, SIZES), Call(NAMES[name], torch.float64, SIZES)
    for each, leaf in wide.leaves.items():
        leaf.data.copy_(call.leaves[each].data)
    wide.grad_out, wide.grad_lse = call.grad_out.double(), call.grad_lse.double()
    plain, oracle = call.dense(dtype), wide.dense(torch.float64)
    (got, *_) = ranks.run(variant, WAYS[way], name, dtype, SIZES)
    for each, tensor in got.items():
        assert_exact(tensor, plain[each], oracle[each], each)


@ways
@pytest.mark.parametrize("count", range(1, COUNT + 1))
def test_any_number_of_processes(ranks: Ranks, count: int, way: str) -> None:
    if WAYS[way].rings and count < COUNT:
        pytest.skip("a mesh is made by all processes together")
    expected = Call(NAMES["causal"], torch.float64, SIZES).plain()
    for got in ranks.run(variant, WAYS[way], "causal", torch.float64, SIZES, count=count):
        assert_all_close(got, expected)


@ways
@hypothesis.settings(max_examples=6)
@hypothesis.given(data=st.data())
def test_any_length(ranks: Ranks, way: str, data: st.DataObject) -> None:
    """Of queries and keys, also shorter than there are processes, with any mask."""
    queries, keys = (data.draw(st.integers(1, 23)) for _ in range(2))
    name = data.draw(st.sampled_from(["causal", "window", "relative", "prefix"]))
    sizes = Sizes(1, 4, queries, keys)
    expected = Call(NAMES[name], torch.float64, sizes).plain()
    for got in ranks.run(variant, WAYS[way], name, torch.float64, sizes):
        assert_all_close(got, expected)


@st.composite
def splits(draw: st.DrawFn) -> tuple[Way, int]:
    """A length, and who holds which runs of its rows: runs may be empty, and so may a process."""
    length, rings = draw(st.integers(1, 23)), draw(st.sampled_from([0, 2]))
    places = rings or COUNT
    owners = draw(st.lists(st.integers(0, places - 1), min_size=1, max_size=9))
    cuts = draw(
        st.lists(st.integers(0, length), min_size=len(owners) - 1, max_size=len(owners) - 1)
    )
    layout = Layout((0, *sorted(cuts), length), tuple(owners), places)
    return Way(draw(st.sampled_from(["ring", "gather", layout])), rings), length


@hypothesis.settings(max_examples=12)
@hypothesis.given(split=splits(), name=st.sampled_from(["causal", "documents", "relative"]))
def test_any_split(ranks: Ranks, split: tuple[Way, int], name: str) -> None:
    """Of the ring alone, or of a ring whose places share heads."""
    way, length = split
    sizes = Sizes(1, 4, length, length)
    expected = Call(NAMES[name], torch.float64, sizes).plain()
    for got in ranks.run(variant, way, name, torch.float64, sizes):
        assert_all_close(got, expected)


@pytest.mark.parametrize("fixed", ["", "qk", "qkv"])
@pytest.mark.parametrize("name", ["relative", "sinks"])
def test_fewer_heads_than_processes(ranks: Ranks, name: str, fixed: str) -> None:
    """A process without a head takes part in every exchange, whatever takes a gradient."""
    sizes = Sizes(heads=2)
    expected = Call(NAMES[name], torch.float64, sizes).plain()
    rest: tuple[Any, ...] = (torch.float64, sizes, {}, False, fixed)
    for got in ranks.run(variant, WAYS["ulysses"], name, *rest, count=3):
        assert set(expected) - set(got) == set(fixed)
        assert_all_close(got, {each: expected[each] for each in got})


def one_process(call: Packed, **more: Any) -> dict[str, Tensor]:
    """The results of packed sequences by ``attention_varlen``."""
    keywords = {**call.keywords, **more, "return_lse": True}
    out, lse, _ = tilewise.attention_varlen(*call.qkv, *call.starts, **keywords)
    grads = torch.autograd.grad(
        [out, lse], list(call.leaves.values()), call.grads, materialize_grads=True
    )
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(call.leaves, grads, strict=True))}


@ways
@names
def test_packed_sequences(ranks: Ranks, name: str, way: str) -> None:
    expected = one_process(Packed(name, LENGTHS, torch.float64))
    for got in ranks.run(packed, WAYS[way], name, LENGTHS, torch.float64):
        assert_all_close(got, expected)


@pytest.mark.parametrize(("backend", "place"), [("gpu", "meta"), ("tiled", "cpu")])
def test_starts_lie_where_kernels_read_them(
    monkeypatch: pytest.MonkeyPatch, backend: str, place: str
) -> None:
    """Those of the sequences of a part; meta stands for a GPU."""
    x = torch.ones(1, 2, 9, 4)
    starts = Starts((0, 4, 9), (0, 4, 9))
    problem = varlen_problem(
        *(x[0].transpose(0, 1),) * 3, *map(torch.tensor, starts),
        mask=(), score=(), scale=None, dropout_p=0.0, sinks=None,
    )  # fmt: skip
    plan = plan_of(problem, None)._replace(backend=backend)
    monkeypatch.setattr(parts, "plan_of", lambda *_: plan)
    whole = parts.Whole(problem, range(2), (), (), 0, None, starts)
    part = parts.Part(whole, whole.everything())
    far = x.to("meta")
    found = part.operands(far, far, far, for_backward=False)
    for each in (found.cu_seqlens_q, found.cu_seqlens_k):
        assert each is not None
        assert each.device.type == place


@ways
def test_dropout_drops_what_one_process_drops(ranks: Ranks, way: str) -> None:
    """The places in the whole sequence count, of dense and of packed rows."""
    dropping: dict[str, Any] = {"dropout_p": 0.3, "seed": 2**63 + 5}
    call = Call(NAMES["causal"], torch.float64, SIZES)
    out, lse, _ = tilewise.attention(*call.qkv, **{**call.keywords(None), **dropping})
    expected = call.results(out, lse)
    for got in ranks.run(variant, WAYS[way], "causal", torch.float64, SIZES, dropping):
        assert_all_close(got, expected)
    expected = one_process(Packed("causal", LENGTHS, torch.float64), **dropping)
    for got in ranks.run(packed, WAYS[way], "causal", LENGTHS, torch.float64, dropping):
        assert_all_close(got, expected)


@ways
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_bits_each_time(ranks: Ranks, dtype: torch.dtype, way: str) -> None:
    """Also where some processes are late."""
    first, second = (
        ranks.run(variant, WAYS[way], "relative", dtype, SIZES, {}, late)[0]
        for late in (False, True)
    )
    for name, tensor in first.items():
        assert_same_bits(second[name], tensor, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["causal", "relative", "sinks", "window"])
def test_heads_apart_have_the_bits_of_one_process(
    ranks: Ranks, name: str, dtype: torch.dtype
) -> None:
    """Ulysses, with key heads that divide: forward and backward; of two processes."""
    call = Call(NAMES[name], dtype, SIZES)
    expected = call.run(None)
    (got, _) = ranks.run(variant, WAYS["ulysses"], name, dtype, SIZES, count=2)
    for each in ("out", "lse", "q", "k", "v"):
        assert_same_bits(got[each], expected[each], each)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["causal", "relative", "window"])
def test_gathered_keys_give_the_outputs_of_one_process(
    ranks: Ranks, name: str, dtype: torch.dtype
) -> None:
    expected = Call(NAMES[name], dtype, SIZES).run(None)
    (got, *_) = ranks.run(variant, WAYS["gather"], name, dtype, SIZES)
    for each in ("out", "lse"):
        assert_same_bits(got[each], expected[each], each)


def work_of(layout: Layout, seen: Tensor) -> list[int]:
    """Pairs that the rows of each position see."""
    return [
        sum(int(seen[rows.start : rows.stop].sum()) for rows in layout.ranges(position))
        for position in range(layout.positions)
    ]


@pytest.mark.parametrize("kind", ["causal", "documents", "packed"])
def test_a_balanced_layout(ranks: Ranks, kind: str) -> None:
    """Its positions have the same work, up to a tenth, and it computes the same."""
    length = 400
    ids = torch.tensor([0] * 100 + [1] * 250 + [2] * 50)
    cu = torch.tensor([0, 100, 350, 400])
    causal = tilewise.visible_pairs(masks.causal(), length, length)[0, 0]
    if kind == "packed":
        layout = balanced_layout(length, 4, mask=masks.causal(), cu_seqlens=cu)
    else:
        mask = masks.causal() if kind == "causal" else masks.document(ids[None]) & masks.causal()
        layout = balanced_layout(length, 4, mask=mask)
    seen = causal if kind == "causal" else causal & (ids[:, None] == ids)
    work = work_of(layout, seen)
    assert max(work) < 1.1 * sum(work) / 4, work
    assert max(work_of(layout_of("ring", length, 4), seen)) > 1.3 * sum(work) / 4
    sizes = Sizes(keys=SIZES.queries)
    way = WAYS["ring"]._replace(schedule=balanced_layout(SIZES.queries, 2, mask=masks.causal()))
    expected = Call(NAMES["causal"], torch.float64, sizes).plain()
    for got in ranks.run(variant, way, "causal", torch.float64, sizes, count=2):
        assert_all_close(got, expected)


def test_layouts() -> None:
    """Zigzag pairs chunks from both ends, and rows differ by the rounding alone."""
    layout = layout_of("zigzag", 37, 4)
    assert layout.owners == (0, 1, 2, 3, 3, 2, 1, 0)
    assert [layout.count(p) for p in range(4)] == [9, 10, 8, 10]
    assert layout.chunks(1) == (1, 6)
    assert even_bounds(3, 4) == (0, 0, 1, 2, 3)
    assert layout_of("ring", 3, 4).chunks(0) == ()
    with pytest.raises(tilewise.errors.InvalidArgument, match="schedule: got 'rings'"):
        layout_of("rings", 8, 2)
    with pytest.raises(tilewise.errors.InvalidArgument, match="positions: got 0"):
        balanced_layout(9, 0)


@names
def test_key_lists(ranks: Ranks, name: str) -> None:
    """Each row reads its own keys of the whole sequence, wherever they are."""
    generator = torch.Generator().manual_seed(4)
    draw = torch.rand(SIZES.batch, 1, SIZES.queries, SIZES.keys, generator=generator)
    keys = draw.argsort(-1)[..., :9].to(torch.int32)
    keys[..., ::4, 5:] = -1
    call = Call(NAMES[name], torch.float64, SIZES)
    out, lse, _ = tilewise.attention(*call.qkv, keys=keys, **call.keywords(None))
    expected = call.results(out, lse)
    for got in ranks.run(listed, name, keys, torch.float64, count=3):
        assert_all_close(got, expected)


def refuse_lists(group: Any) -> None:
    x = torch.ones(1, 2, 6, 4)
    keys = torch.zeros(1, 1, 6, 2, dtype=torch.int32)
    with pytest.raises(tilewise.errors.Unsupported, match="gather"):
        context_parallel_attention(x, x, x, mesh=group, keys=keys)


def test_key_lists_want_all_keys(ranks: Ranks) -> None:
    ranks.run(refuse_lists, count=2)
