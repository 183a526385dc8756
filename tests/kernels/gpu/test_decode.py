"""Decoding in Triton's interpreter: exactness, leaks, and bits that depend on a sequence alone."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import Case, Inputs, build
from tests.contract import assert_same_bits
from tests.kernels.gpu.passes import (
    GQA,
    HALVES,
    NAN,
    check_case,
    check_hidden,
    check_statistics,
    decode,
    on_meta,
    variant,
)
from tests.oracle import check_case as check_call
from tests.oracle import problem_of
from tests.paged import in_pages
from tilewise import BlockMask, masks, scores
from tilewise.kernels.gpu.backend import GpuBackend, empty_result
from tilewise.kernels.gpu.config import FAMILIES, Config, Splitting, config_for, decodes
from tilewise.kernels.gpu.forward import Forward
from tilewise.kernels.gpu.forward import decode as decoding
from tilewise.kernels.gpu.forward.decode import decode_launches, empty_partials
from tilewise.variants.program import Instr

SMALL: dict[str, Any] = {"batch": 1, "queries": 1, "keys": 77, "head_dim": 16, "value_dim": 16}
SHORT = Splitting(32, 4)  # 96 keys are three splits, and so are 130, twice as long ones


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits so short that small problems have several."""
    monkeypatch.setattr(Config, "splitting", lambda _: SHORT)


CASES = [
    Case("plain", **SMALL),
    Case("one-split", **{**SMALL, "keys": 31}),
    Case("even", **{**SMALL, "keys": 96, "queries": 16}),
    Case("growing", **{**SMALL, "keys": 130}, mask=("causal",)),
    Case("one-key", **{**SMALL, "keys": 1, "queries": 3}),
    Case("no-rows", **{**SMALL, "queries": 0}),
    Case("no-keys", **{**SMALL, "keys": 0, "queries": 2}, sinks=True),
    Case("no-batch", **{**SMALL, "batch": 0}),
    Case("narrow", **{**SMALL, "head_dim": 3, "value_dim": 33, "queries": 5}, **GQA),
    Case("wide", **{**SMALL, "head_dim": 130, "value_dim": 256}, mask=("causal",)),
    Case("causal", **{**SMALL, "batch": 2, "queries": 7}, **GQA, mask=("causal",), layout="bshd"),
    Case("causal-top", **{**SMALL, "queries": 9}, mask=("causal_top",), layout="strided"),
    Case("dead", **{**SMALL, "queries": 16, "keys": 9}, mask=("causal",), sinks=True),
    Case("window", **{**SMALL, "queries": 4}, **GQA, mask=("window",), layout="sliced"),
    Case("lengths", **{**SMALL, "batch": 3}, mask=("lengths", "causal", "and"), sinks=True),
    Case("document", **{**SMALL, "batch": 2, "queries": 3}, **GQA, mask=("document_each",)),
    Case("heads", **{**SMALL, "queries": 5}, **GQA, mask=("bool",), score=("bias_heads",)),
    Case("rows", **{**SMALL, "queries": 5}, **GQA, mask=("bool_rows",), score=("bias_rows",)),
    Case("nothing", **{**SMALL, "queries": 2}, mask=("nothing",)),
    Case("scored", **SMALL, heads=6, kv_heads=2, score=("softcap_tight", "alibi"), sinks=True),
    Case("holes", **{**SMALL, "queries": 6}, score=("bias_inf",), mask=("causal",)),
    Case("negative", **SMALL, scale=-0.7, layout="expanded"),
    Case("zero", **SMALL, scale=0.0, **GQA),
    Case("dropout", **{**SMALL, "queries": 3}, heads=8, kv_heads=1, dropout_p=0.4, sinks=True),
    Case("steep", **{**SMALL, "batch": 4}, **GQA, gain=3.0),
]


def some(cases: list[Case], step: int) -> list[Any]:
    """All of them as parameters, of which one in so many is quick."""
    slow = pytest.mark.slow
    return [
        pytest.param(case, marks=() if at % step == 0 else slow) for at, case in enumerate(cases)
    ]


def _check(case: Case, keys: int) -> None:
    check_case(case, partial(decode, keys=keys))


@pytest.mark.parametrize("case", some(CASES, 2), ids=str)
def test_the_2x_rule(case: Case) -> None:
    """Whole splits, short ones, one and none, with every kind of mask and score."""
    _check(case, (16, 32)[CASES.index(case) % 2])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES[::6], ids=lambda case: case.name)
def test_the_2x_rule_of_halves(case: Case, dtype: torch.dtype) -> None:
    """A sample of the same in 16 bits."""
    _check(case.of(dtype), 16)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_2x_rule_everywhere(case: Case, dtype: torch.dtype, keys: int) -> None:
    """All of them in all dtypes and blocks."""
    _check(case.of(dtype), keys)


@pytest.mark.parametrize(
    ("group", "queries"),
    [
        pytest.param(
            group,
            queries,
            marks=() if (group, queries) in ((1, 1), (2, 2), (3, 5), (8, 16)) else pytest.mark.slow,
        )
        for group in range(1, 9)
        for queries in range(1, 17)
    ],
)
def test_groups_and_queries(group: int, queries: int) -> None:
    """Rows fill a block, share it with other heads, or need several."""
    shape = {**SMALL, "queries": queries, "head_dim": 8, "value_dim": 8}
    words: dict[str, Any] = {"mask": ("causal",), "score": ("alibi",)}
    _check(Case("group", **shape, heads=2 * group, kv_heads=2, **words), 16)


@pytest.mark.parametrize("case", some(CASES, 4), ids=str)
def test_statistics(case: Case) -> None:
    check_statistics(*problem_of(build(case).detached()), decode)


def test_the_first_of_equal_keys_is_the_top_one() -> None:
    """Wherever the split begins that has it."""
    q, k, v = torch.ones(1, 1, 2, 16), torch.ones(1, 1, 90, 16), torch.ones(1, 1, 90, 16)
    for first in (0, 40, 89):
        k[:, :, :first] = 0.5
        keywords: dict[str, Any] = {"return_stats": "top1", "backend": "gpu"}
        assert bool((tilewise.attention(q, k, v, **keywords).stats.top1 == first).all())


def test_keys_that_are_excluded_may_be_nan() -> None:
    """Beyond a length, in a split of nothing, in a block that a document or a table leaves out."""
    qkv = [torch.randn(2, 2, n, 16) for n in (3, 130, 130)]
    ids = (torch.arange(130) >= 32).long()  # the first split has a block of either
    table = BlockMask.of(masks.document(ids, ids[:3]), 3, 130, block=(16, 32))
    for mask, where in (
        (masks.lengths(torch.tensor([41, 130])), (0, slice(None), slice(41, None))),
        (masks.lengths(torch.tensor([0, 130])), (0, slice(None), slice(None))),
        (masks.window(20, 0), (slice(None), slice(None), slice(0, 96))),
        (masks.causal(align="top_left"), (slice(None), slice(None), slice(3, None))),
        (masks.document(ids, ids[:3]), (slice(None), slice(None), slice(32, None))),
        (table, (slice(None), slice(None), slice(32, None))),
    ):
        check_hidden(mask, qkv, where)


def test_a_visible_nan_is_seen() -> None:
    """In whatever split: it reaches the rows that see it, and no other."""
    q, k, v = (torch.randn(1, 2, n, 16) for n in (2, 130, 130))
    good = tilewise.attention(q, k, v, backend="gpu", return_lse=True)
    for at in (0, 70, 129):
        bad = k.clone()
        bad[:, 1, at] = NAN
        out, lse, _ = tilewise.attention(q, bad, v, backend="gpu", return_lse=True)
        assert bool(out[:, 1].isnan().all() & lse[:, 1].isnan().all())
        assert_same_bits(out[:, 0], good.out[:, 0], "the other head")


def test_scratch_may_hold_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a split does not write is not read: of a hidden split, a dead row, a block's rest."""

    def poisoned(*given: Any) -> Any:
        partials = empty_partials(*given)
        partials.out.fill_(NAN)
        partials.numbers.fill_(NAN)
        return partials

    monkeypatch.setattr(decoding, "empty_partials", poisoned)
    for case in (CASES[10], CASES[14], CASES[18], CASES[20]):
        _check(case, 16)


def _alone(inputs: Inputs, item: int, heads: slice, kv_heads: slice) -> Tensor:
    """The output of some heads of a batch item, called by themselves."""
    q, k, v = inputs.q[item, heads], inputs.k[item, kv_heads], inputs.v[item, kv_heads]
    score = scores.bias(inputs.score.captured[0][:, heads]) if inputs.score else None
    out: Tensor = tilewise.attention(
        q[None].clone(), k[None].clone(), v[None].clone(), mask=masks.causal(), score=score,
        backend="gpu",
    )  # fmt: skip
    return out[0]


@pytest.mark.parametrize("queries", [1, 5, 16])
def test_rows_keep_their_bits_in_any_company(queries: int) -> None:
    """Of batch items, of heads, and of the group that shares the keys."""
    shape = {**SMALL, "batch": 3, "queries": queries, "keys": 70, "head_dim": 8}
    case = Case("company", **shape, heads=6, kv_heads=2, mask=("causal",), score=("bias_heads",))
    inputs = build(case).detached()
    keywords: dict[str, Any] = {"mask": inputs.mask, "score": inputs.score, "backend": "gpu"}
    whole = tilewise.attention(inputs.q, inputs.k, inputs.v, **keywords)
    for item, heads, kv_heads in (
        (0, slice(0, 6), slice(0, 2)),
        (1, slice(3, 6), slice(1, 2)),
        (2, slice(4, 5), slice(1, 2)),
    ):
        got = _alone(inputs, item, heads, kv_heads)
        assert_same_bits(got, whole[item, heads], f"item {item}, heads {heads}")


@pytest.mark.parametrize("page", [8, pytest.param(48, marks=pytest.mark.slow), 64])
def test_pages(page: int) -> None:
    """Sequences of all lengths, pages in any order: the bits of the same keys side by side."""
    generator = torch.Generator().manual_seed(page)
    lengths = (0, 20, 50, 130)  # of one split and of several
    keys, values = ([torch.randn(2, n, 16, generator=generator) for n in lengths] for _ in "kv")
    q = torch.randn(len(lengths), 4, 3, 16, generator=generator)
    keywords: dict[str, Any] = {"mask": masks.causal(), "backend": "gpu"}
    keywords |= {"return_lse": True, "return_stats": "top1"}
    got = tilewise.attention_paged(q, *in_pages(keys, values, page), **keywords)
    for b, (k, v) in enumerate(zip(keys, values, strict=True)):
        alone = tilewise.attention(q[b : b + 1], k[None], v[None], **keywords)
        for name in ("out", "lse"):
            assert_same_bits(getattr(got, name)[b], getattr(alone, name)[0], f"{name} of {b}")
        for name, mine, theirs in zip(got.stats._fields, got.stats, alone.stats, strict=True):
            assert_same_bits(mine[b], theirs[0], f"{name} of {b}")


@pytest.mark.parametrize("case", [CASES[at] for at in (10, 12, 19)], ids=str)
def test_backward(case: Case) -> None:
    """Gradients after a decoding forward pass: the public call, by the 2x rule."""
    check_call(case, "gpu")


def test_who_decodes() -> None:
    """Up to 16 queries, whatever the heads; no packed call, which does not say; no raw score."""
    few, _ = problem_of(build(Case("few", queries=16, heads=8, kv_heads=1)).detached())
    assert decodes(few)
    assert not decodes(few._replace(queries=17))
    packed = build(Case("packed", sequences=((1, 9), (2, 30)))).detached()
    assert not decodes(problem_of(packed)[0])
    assert not decodes(few._replace(score=(Instr("raw", ("mine",)),)))
    tiles = GpuBackend().tiles(few._replace(keys=130))
    assert tuple(tiles) == (16, 32, 3)
    assert GpuBackend().tiles(few._replace(queries=17)).splits == 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "interpreter"])
def test_launches_need_no_values(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, for every chip: a program for each split, and one launch where one does."""
    monkeypatch.setattr(Config, "splitting", lambda _: Splitting(256, 64))
    case = Case("meta", **{**SMALL, "keys": 1000}, **GQA, mask=("lengths",), score=("bias",))
    problem, operands = problem_of(build(case).detached())
    own, meta = variant(problem, operands), on_meta(operands)
    result = empty_result(problem, meta.q, "top1")
    call = Forward(problem, meta, result, config_for(family), own)
    todo = decode_launches(call)
    assert [launch.kernel.__name__ for launch in todo] == [
        "attend_split",
        "merge_splits",
        "describe",
    ]
    assert [launch.grid for launch in todo] == [(4 * 2,), (4,), (4,)]
    assert todo[0].constants["FORM"].BM == todo[2].constants["FORM"].BM == 16
    short = problem._replace(keys=256)
    assert len(decode_launches(call._replace(problem=short))) == 2
