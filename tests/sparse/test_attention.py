"""Attention with a BlockMask: the bits of the mask alone, tiles that are left out, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import tilewise
from tests.cases import FLOATS, TABLE, Case, Inputs, build, cases
from tests.contract import assert_all_same_bits, assert_same_bits
from tests.kernels.conftest import target  # noqa: F401  the fixture
from tests.kernels.targets import Target
from tests.oracle import assert_same, attend, send
from tests.plain import attend as attend_plainly
from tests.sparse.pairs import Sizes, catalogue, tabled
from tilewise import BlockMask, masks, scores
from tilewise.errors import InvalidArgument
from tilewise.variants.values import Mask, as_mask

BLOCKS = ((64, 128), (128, 128), (16, 48), (100, 7))
MASKED = [case for case in TABLE if case.mask]
WIDTH: dict[str, Any] = {"batch": 1, "head_dim": 8, "value_dim": 8}
# Several chunks of keys, few heads and many, and what is summed over all tiles.
LARGE = [
    Case("one-head", **WIDTH, heads=1, kv_heads=1, queries=1300, keys=4500, mask=("document",)),
    Case("grouped", **WIDTH, heads=4, kv_heads=2, queries=330, keys=4500, mask=("causal",)),
    Case("heads", **WIDTH, heads=9, kv_heads=9, queries=70, keys=2300, mask=("bool_keys",)),
    Case(
        "packed",
        **WIDTH,
        heads=2,
        kv_heads=1,
        mask=("document_each", "causal", "and"),
        score=("bias_keys", "alibi"),
        dropout_p=0.2,
        sinks=True,
        sequences=((50, 2500), (30, 1100), (1, 7), (64, 70), (0, 5), (300, 1500)),
    ),
]


def _same(inputs: Inputs, other: Inputs, backend: str, name: str) -> None:
    """Two ways of saying one mask give one and the same outcome."""
    sent = send(inputs)
    found, wanted = (attend(x, backend, sent, statistics="top1") for x in (other, inputs))
    assert_same(found, wanted, name)


@pytest.mark.parametrize("case", MASKED, ids=lambda case: case.name)
def test_the_bits_of_the_mask_alone(target: Target, case: Case) -> None:  # noqa: F811
    index = MASKED.index(case) + target.rank
    inputs = build(case.of(FLOATS[index % 4]))
    _same(inputs, tabled(inputs, BLOCKS[index % len(BLOCKS)]), target.backend, case.name)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("threads", [1, 3])
def test_many_tiles(case: Case, threads: int) -> None:
    """Over chunks of keys, whatever thread takes which task first."""
    torch.set_num_threads(threads)
    dtype = FLOATS[(LARGE.index(case) + threads) % 4]
    inputs = build(case.of(dtype))
    for block in BLOCKS[:2]:
        _same(inputs, tabled(inputs, block), "cpu", case.name)


@pytest.mark.parametrize("name", catalogue())
def test_every_kind_of_mask(name: str) -> None:
    sizes = Sizes(2, 2, 200, 333)
    case = Case("mask", 2, 2, 1, 200, 333, 8, 8)
    inputs = build(case)._replace(mask=as_mask(catalogue(sizes)[name]))
    _same(inputs, tabled(inputs), "cpu", name)


@given(cases())
@settings(max_examples=25, deadline=None)
def test_drawn_cases(case: Case) -> None:
    inputs = build(case)
    _same(inputs, tabled(inputs, (16, 32)), "cpu", str(case))


def test_a_layout_is_its_pairs_spelled_out(target: Target) -> None:  # noqa: F811
    tiles = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)) < 0.5
    inputs = build(Case("layout", 1, 2, 1, 250, 300, 16, 16))
    for block in ((64, 128), (70, 100)):
        rows, columns = torch.arange(250) // block[0], torch.arange(300) // block[1]
        spelled = masks.dense(tiles[:, rows[:, None], columns])
        one, other = (
            inputs._replace(mask=x) for x in (spelled, BlockMask.from_layout(tiles, block))
        )
        _same(one, other, target.backend, str(block))


@pytest.mark.parametrize(("keys", "heads"), [(600, 2), (1200, 1)])
def test_the_gradients_of_keys_that_many_tiles_share(keys: int, heads: int) -> None:
    """More tiles of queries than settle at once, of which blocks see many, few, one and none."""
    generator = torch.Generator().manual_seed(6)
    queries, columns = 9_000, -(-keys // 128)
    share = torch.linspace(0, 0.9, columns)
    tiles = torch.rand(heads, -(-queries // 64), columns, generator=generator) < share
    tiles[:, 100, 0], tiles[:, :, 1] = True, False
    seen = tiles.repeat_interleave(64, 1).repeat_interleave(128, 2)[:, :queries, :keys]
    q, k, v, grad = (
        torch.randn(1, heads, size, 4, generator=generator, dtype=torch.float64)
        for size in (queries, keys, keys, queries)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    plain = attend_plainly(*leaves, mask=lambda b, h, m, n: seen)
    wanted = torch.autograd.grad(plain.out, leaves, grad)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        out = tilewise.attention(*leaves, mask=BlockMask.from_layout(tiles))
        got = torch.autograd.grad(out, leaves, grad)
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
        assert not got[0][~seen.any(-1)[None]].any()


def _with_table(mask: Mask, table: Tensor, keys: int) -> BlockMask:
    """The mask with a table that does not say what it says."""
    made = BlockMask.of(mask, table.shape[0] * 64, keys)
    return BlockMask(made.program, (*made.captured[:-1], table[None, None].to(torch.uint8)))


def test_the_mask_is_not_asked_in_empty_and_full_tiles() -> None:
    """Seen by a table that lies: kernels believe it, and look at partial tiles only."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 1, size, 8, generator=generator) for size in (192, 384, 384))
    table = torch.tensor([[2, 0, 1], [0, 2, 0], [1, 1, 2]])
    ids = torch.arange(384) % 3
    mask = masks.document(ids, ids[:192])
    seen = table.repeat_interleave(64, 0).repeat_interleave(128, 1)
    expected = (seen == 2) | ((seen == 1) & (ids[:192, None] == ids))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    found = tilewise.attention(*leaves, mask=_with_table(mask, table, 384))
    others = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = tilewise.attention(*others, mask=expected)
    assert_same_bits(found.detach(), plain.detach(), "out")
    found.backward(torch.ones_like(found))
    plain.backward(torch.ones_like(plain))
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(leaf.grad, other.grad)


def test_empty_tiles_are_never_read(target: Target) -> None:  # noqa: F811
    """Documents that take turns: only evaluation shows that a tile is empty. It holds NaN."""
    ids = torch.arange(512) // 128 % 2 + 2 * (torch.arange(512) % 2)
    other = torch.where(torch.arange(512) < 256, ids, ids + 7)
    inputs = build(Case("empty", 1, 2, 2, 256, 512, 16, 16))
    mask = masks.document(other, ids[:256])
    inputs = tabled(inputs._replace(mask=mask))
    assert isinstance(inputs.mask, BlockMask)
    assert inputs.mask.covers[0, 0, :, 2:].sum() == 0
    sent = send(inputs)
    clean = attend(inputs, target.backend, sent)
    with torch.no_grad():
        inputs.k[:, :, 256:] = torch.nan
        inputs.v[:, :, 256:] = torch.nan
    got = attend(inputs, target.backend, sent)
    assert_same_bits(got.out, clean.out, "out")
    for leaf, grad in clean.grads.items():
        assert_same_bits(got.grads[leaf], grad, leaf)


QKV = [torch.zeros(2, 4, 100, 8) for _ in range(3)]
WAVE: Callable[..., Any] = lambda b, h, m, n: torch.sin(m - n + 0.5) > 0  # noqa: E731
FITTING = BlockMask.of(masks.causal(), 100)
REFUSED: list[tuple[str, Callable[[], Any], str]] = [
    ("keys", lambda: BlockMask.of(masks.causal(), 100, 101), "made for|one for M = 100, N = 101"),
    ("queries", lambda: BlockMask.of(masks.causal(), 30, 100), "got a table"),
    ("edge", lambda: BlockMask.of(masks.causal(), 99, 100), "M = 99, N = 100; required: M = 100"),
    ("heads", lambda: BlockMask.of(lambda b, h, m, n: m > h, 100, heads=1), "one for Hq = 1"),
    ("heads-2", lambda: BlockMask.of(lambda b, h, m, n: m > h, 100, heads=2), "1 or 4"),
    ("batch", lambda: BlockMask.of(lambda b, h, m, n: m > b, 100, batch=1), "one for B = 1"),
    ("floats", lambda: BlockMask.of(WAVE, 100, dtype=torch.float64), "other floats"),
    ("layout", lambda: BlockMask.from_layout(torch.ones(3, 3) > 0), r"\[1 or 2, 1 or 4, 2, 1\]"),
    (
        "packed",
        lambda: BlockMask.of(
            masks.causal(), cu_seqlens_q=torch.tensor([0, 100]), cu_seqlens_k=torch.tensor([0, 100])
        ),
        "variable-length",
    ),
]


@pytest.mark.parametrize(
    ("make", "says"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED]
)
def test_for_another_call(make: Callable[[], Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        tilewise.attention(*QKV, mask=make())


def test_for_other_sequences() -> None:
    q = torch.zeros(20, 1, 8)
    cu, other = torch.tensor([0, 12, 20]), torch.tensor([0, 11, 20])
    mask = BlockMask.of(masks.causal(), cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert tilewise.attention_varlen(q, q, q, cu, cu, mask=mask).shape == q.shape
    with pytest.raises(InvalidArgument, match=r"sequences of \[12, 8\] queries"):
        tilewise.attention_varlen(q, q, q, other, cu, mask=mask)
    with pytest.raises(InvalidArgument, match=r"sequences of \[12, 8\] keys"):
        tilewise.attention_varlen(q, q, q, cu, other, mask=mask)
    with pytest.raises(InvalidArgument, match="one for sequences of one length"):
        tilewise.attention_varlen(q, q, q, cu, cu, mask=BlockMask.of(masks.causal(), 12))


def test_where_one_serves_all_it_serves_any() -> None:
    """The same table for other batches and numbers of heads."""
    for batch, heads in ((1, 1), (3, 2)):
        q = torch.zeros(batch, heads, 100, 8)
        assert tilewise.attention(q, q, q, mask=FITTING).shape == q.shape


def test_plan_and_explain() -> None:
    plan = tilewise.plan(*QKV, mask=FITTING)
    assert "tiles(64,128" in repr(plan)
    assert "a table of tiles of 64 x 128" in str(tilewise.explain(*QKV, mask=FITTING))
    assert torch.equal(
        tilewise.attention(*QKV, mask=FITTING, plan=plan), tilewise.attention(*QKV, mask=FITTING)
    )


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_compiled() -> None:
    """One graph, made outside or passed in; a table of another size makes a new one."""

    def f(x: Tensor, mask: Mask) -> Any:
        return tilewise.attention(x, x, x, mask=mask, score=scores.softcap(5.0))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    ids = torch.arange(100) // 30
    for mask in (FITTING, BlockMask.of(masks.document(ids), 100), BlockMask.of(masks.causal(), 90)):
        x = torch.randn(1, 2, int(mask.queries or 0), 8)
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        found, expected = compiled(one, mask), f(other, mask)
        assert_same_bits(found.detach(), expected.detach(), "out")
        found.sum().backward()
        expected.sum().backward()
        assert one.grad is not None
        assert other.grad is not None
        assert_same_bits(one.grad, other.grad, "grad")


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_explain_says_how_dense_the_table_is(backend: str) -> None:
    """Of every backend; of a layout too; first what is known of the mask, then what of its way."""
    of = BlockMask.of(lambda b, h, m, n: n * n <= m * m, 100, block=(50, 50))
    layout = BlockMask.from_layout(torch.tensor([[[True, False]]] * 4), (100, 50))
    for mask, said in (
        (of, "2 x 2 tiles of 50 x 50, density 0.750: 1 empty, 2 partial, 1 full"),
        (layout, "1 x 4 x 1 x 2 tiles of 100 x 50, density 0.500: 4 empty, 0 partial, 4 full"),
    ):
        explanation = tilewise.explain(*QKV, mask=mask, backend=backend)
        assert explanation.notes[0] == ("table", said)
        assert f"\ntable     {said}\n" in str(explanation)
        functions = [("functions", "interpreted")] if mask is of and backend == "cpu" else []
        assert [(name, text[:11]) for name, text in explanation.notes[1:]] == functions
    assert tilewise.explain(*QKV, mask=FITTING.to_mask(), backend=backend).notes == ()


def test_in_a_module() -> None:
    """One table for the layer, narrowed by a call's own mask; a line of its representation."""
    x = torch.randn(2, 100, 16)
    layer = tilewise.nn.Attention(16, 2, mask=FITTING)
    state = layer.state_dict()
    plain = tilewise.nn.Attention(16, 2, mask=masks.causal())
    plain.load_state_dict(state)
    assert torch.equal(layer(x), plain(x))
    near = masks.window(30, None)
    assert torch.equal(layer(x, mask=near), plain(x, mask=near))
    assert "\n" not in layer.extra_repr()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_second_derivatives_and_forward_mode() -> None:
    """The roads beside the kernels read a mask with a table as they read the mask."""
    ids = torch.arange(100) // 30
    mask = BlockMask.of(lambda b, h, m, n: (ids[m] == ids[n]) & (n <= m), 100)
    q, k, v = (torch.randn(1, 1, 100, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    found = []
    for each in (mask, mask.to_mask(), BlockMask.from_layout(mask.covers > 0) & mask):
        tangent = torch.func.jvp(
            lambda x, each=each: tilewise.attention(x, k.detach(), v.detach(), mask=each),
            (q.detach(),),
            (torch.ones_like(q),),
        )[1]
        out = tilewise.attention(q, k, v, mask=each)
        (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append((tangent, *torch.autograd.grad(grad.square().sum(), (q, k, v))))
    for other in found[1:]:
        assert_all_same_bits(other, found[0], "second order")
