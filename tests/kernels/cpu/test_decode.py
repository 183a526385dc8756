"""Few queries on the CPU: keys that are split, heads that share them, and the same bits however."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.cases import FLOATS, Case, build
from tests.contract import assert_same_bits
from tests.kernels.targets import Target, only_cpu, pairs
from tests.oracle import assert_same, attend, check, outcome_of, refer_cached
from tests.paged import in_pages
from tests.test_paged import CASES as PAGED
from tests.test_paged import keywords_of, paged_of
from tilewise import masks, scores

GQA: dict[str, Any] = {"heads": 6, "kv_heads": 2}
# Splits hold 512 keys or more.
CASES = [
    Case("one", queries=1, keys=1300, **GQA, head_dim=64, value_dim=64),
    Case("alone", queries=1, keys=700, head_dim=128, value_dim=96),
    Case("few", queries=3, keys=1030, **GQA, mask=("causal",), sinks=True),
    Case("most", queries=8, keys=1100, **GQA, head_dim=40, value_dim=17, mask=("window",)),
    Case("lengths", batch=4, queries=2, keys=1200, **GQA, mask=("lengths", "causal", "and")),
    Case("bool", queries=4, keys=900, **GQA, mask=("bool",), score=("softcap", "bias")),
    Case("alibi", queries=1, keys=900, **GQA, mask=("causal",), score=("alibi",)),
    Case("dropout", queries=2, keys=600, **GQA, dropout_p=0.2, score=("bias_keys",)),
    Case("strided", queries=5, keys=700, **GQA, layout="strided", mask=("document",)),
    Case("many-rows", batch=1, heads=80, kv_heads=1, queries=1, keys=530, head_dim=16),
    Case("packed", sequences=((1, 1200), (70, 90), (8, 600), (9, 600), (0, 4), (2, 0)), **GQA),
]
# In float64 the gradients of so few rows with dropout are near what the rule allows, on either
# side of it, by the ordinary forward too: the backward's own rounding, which is not tested here.
EVERY = [
    case.of(dtype)
    for dtype in FLOATS
    for case in CASES
    if not (case.name == "dropout" and dtype is torch.float64)
]
ON_CPU = [each for each in pairs(EVERY, 3) if each.values[0].backend == "cpu"]


@pytest.mark.parametrize(("target", "case"), ON_CPU, indirect=["target"])
def test_the_2x_rule(target: Target, case: Case) -> None:
    """Values, by the kernel of few queries, which no call takes that wants gradients."""
    inputs, reference = refer_cached(case)
    check(attend(inputs.detached(), "cpu"), reference, str(case))


@pytest.mark.parametrize(("target", "case"), ON_CPU, indirect=["target"])
def test_threads_change_no_bit(target: Target, case: Case) -> None:
    """Splits one after the other, and each a task of its own."""
    inputs = build(case).detached()
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(attend(inputs, "cpu", statistics="top1"))
    for other in found[1:]:
        assert_same(other, found[0])


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_neither_the_group_nor_the_batch_changes_a_bit(target: Target, dtype: torch.dtype) -> None:
    """A head alone, among the heads that share its keys, and in a batch.

    In AMX tiles a head that shares its keys with none has other bits (docs/serving.md), so there
    are two.
    """
    own = 2 if dtype == torch.bfloat16 and target.isa == "avx512_amx" else 1
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(3, heads, rows, 48, generator=generator).to(dtype)
        for heads, rows in ((7, 2), (1, 1400), (1, 1400))
    )
    options: dict[str, Any] = {"mask": masks.causal(), "backend": "cpu"}
    whole = tilewise.attention(q, k, v, **options)
    for b, h in ((0, 0), (1, 3), (2, 7 - own)):
        entry, heads = slice(b, b + 1), slice(h, h + own)
        alone = tilewise.attention(q[entry, heads], k[entry], v[entry], **options)
        assert_same_bits(alone, whole[entry, heads], f"head {h} of {b}")


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("heads", [2, 6])
def test_neither_shorter_nor_longer_neighbours_change_a_bit(
    target: Target, dtype: torch.dtype, heads: int
) -> None:
    """Sequences of one split and of several, which may have kernels of their own."""
    queries, keys = (1, 3, 1, 2, 8, 1), (1200, 60, 575, 576, 33, 640)
    generator = torch.Generator().manual_seed(6)
    q, k, v = (
        torch.randn(sum(rows), count, 64, generator=generator).to(dtype)
        for rows, count in ((queries, heads), (keys, 2), (keys, 2))
    )
    offsets = [torch.tensor((0, *lengths)).cumsum(0) for lengths in (queries, keys)]
    options: dict[str, Any] = {"mask": masks.causal(), "backend": "cpu"}
    whole = tilewise.attention_varlen(q, k, v, *offsets, **options)
    for i, (m, n) in enumerate(zip(queries, keys, strict=True)):
        rows, seen = (slice(int(cu[i]), int(cu[i + 1])) for cu in offsets)
        alone = tilewise.attention_varlen(
            *(q[rows], k[seen], v[seen], torch.tensor([0, m]), torch.tensor([0, n])), **options
        )
        assert_same_bits(alone, whole[rows], f"{m} queries and {n} keys")


@only_cpu
def test_a_head_that_sees_no_key_of_a_block_takes_none_of_its_nans(target: Target) -> None:
    """Heads share the loads of a key, and not what they see."""
    q, k = torch.randn(1, 2, 1, 16), torch.randn(1, 1, 600, 16)
    v = k.clone()
    v[:, :, 128:256] = torch.nan
    seen = torch.ones(1, 2, 1, 600).bool()
    seen[:, 1, :, 128:256] = False
    out = tilewise.attention(q, k, v, mask=masks.dense(seen), backend="cpu")
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()


@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinite_values_are_not_spoilt_by_what_pads_a_pair(
    target: Target, dtype: torch.dtype
) -> None:
    """The last of an odd number of keys is infinite: so is the output, as in torch."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 1, 33, 16), torch.ones(1, 1, 33, 16)
    v[:, :, 32] = torch.inf
    out = tilewise.attention(q.to(dtype), k.to(dtype), v.to(dtype), backend="cpu")
    assert (out == torch.inf).all()


# ---- Keys in pages on the CPU: to the bit what the same keys give one after the other.


GROUPS: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 24, "value_dim": 20}
LONG = ((1, 700), (70, 600), (8, 130), (9, 260), (0, 3), (3, 0), (130, 130))
PACKED = [
    *PAGED,
    Case("long", **GROUPS, sequences=LONG, mask=("causal",), sinks=True),
    Case("odd", heads=3, kv_heads=1, head_dim=31, value_dim=33, sequences=LONG),
]
PAGES = (1, 3, 16, 17, 64, 128, 200)
EVERY_DTYPE = [case.of(dtype) for dtype in FLOATS for case in PACKED]


@pytest.mark.parametrize(("target", "case"), pairs(EVERY_DTYPE, 4), indirect=["target"])
def test_it_is_attention_over_sequences(target: Target, case: Case) -> None:
    """Packed queries, few and many of them; pages of every size in both memory orders."""
    inputs = build(case).detached()
    assert inputs.cu_seqlens is not None
    expected = attend(inputs, target.backend, statistics="top1")
    options = {**keywords_of(inputs), "backend": target.backend}
    options |= {"return_lse": True, "return_stats": "top1"}
    for page_size in PAGES:
        paged = paged_of(inputs, page_size, rows_first=page_size % 2 == 0)
        got = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **options)
        assert_same(outcome_of(got), expected, f"pages of {page_size}")


@pytest.mark.parametrize("queries", [1, 8, 9, 65])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dense_queries(target: Target, queries: int, dtype: torch.dtype) -> None:
    """Each batch item has the bits of a call of its own, in any memory order, on many threads."""
    generator = torch.Generator().manual_seed(queries)
    keys, values = (
        [torch.randn(2, n, 24, generator=generator).to(dtype) for n in (700, 9, 0, 260)]
        for _ in range(2)
    )
    rows = torch.randn(4, queries, 6, 24, generator=generator).to(dtype)
    bias = torch.randn(6, 1, 700, generator=generator).to(dtype)
    options: dict[str, Any] = {"mask": masks.causal(), "backend": target.backend}
    options |= {"sinks": torch.randn(6, generator=generator), "return_lse": True}
    for q, pages in (
        (rows.transpose(1, 2), in_pages(keys, values, 16, spare=3)),
        (rows.transpose(1, 2).contiguous(), in_pages(keys, values, 48, seed=1)),
    ):
        got = tilewise.attention_paged(q, *pages, **options, score=scores.bias(bias))
        assert got.out.stride() == q.stride()
        torch.set_num_threads(3)
        for b, (k, v) in enumerate(zip(keys, values, strict=True)):
            score = scores.bias(bias[..., : k.shape[1]])
            alone = tilewise.attention(q[b : b + 1], k[None], v[None], **options, score=score)
            assert_same_bits(got.out[b : b + 1], alone.out, f"out {b}")
            assert_same_bits(got.lse[b : b + 1], alone.lse, f"lse {b}")


def test_pages_whose_elements_lie_apart() -> None:
    """Any strides, few queries and many."""
    keys, values = ([torch.randn(2, n, 8) for n in (300, 40)] for _ in range(2))
    paged = in_pages(keys, values, 32)
    apart = [torch.full((*pool.shape, 3), torch.nan) for pool in paged[:2]]
    for wide, pool in zip(apart, paged[:2], strict=True):
        wide[..., 1] = pool
    pools = [wide[..., 1] for wide in apart]
    for queries in (2, 20):
        q = torch.randn(2, 4, queries, 8)
        expected = tilewise.attention_paged(q, *paged, backend="cpu")
        found = tilewise.attention_paged(q, pools[0], pools[1], *paged[2:], backend="cpu")
        assert_same_bits(found, expected, f"{queries} queries")


def test_functions_over_pages() -> None:
    """A mask and a score of one's own count within sequences."""
    keys, values = ([torch.randn(2, n, 8) for n in (300, 40, 90)] for _ in range(2))
    paged = in_pages(keys, values, 16)
    offsets = torch.tensor([3, 5, 7])
    for queries in (2, 30):
        q = torch.randn(3, 4, queries, 8)
        options: dict[str, Any] = {
            "mask": lambda b, h, m, n: (n + m) % offsets[b] != 0,
            "score": lambda s, b, h, m, n: s + (n % 4) * 0.25 * (h + 1),
        }
        found = tilewise.attention_paged(q, *paged, **options, backend="cpu")
        expected = tilewise.attention_paged(q, *paged, **options, backend="tiled")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_it_is_chosen_by_itself() -> None:
    """Where the core is there, nobody has to ask for it."""
    keys, values = ([torch.randn(2, n, 8) for n in (5, 9)] for _ in range(2))
    paged = in_pages(keys, values, 4)
    q = torch.randn(2, 4, 3, 8)
    tables: dict[str, Any] = {"block_table": paged.block_table, "key_lengths": paged.key_lengths}
    plan = tilewise.plan(q, *paged[:2], **tables)
    assert plan.backend == "cpu"
    assert "pages     of 4 keys" in str(tilewise.explain(q, *paged[:2], **tables))
    expected = tilewise.attention_paged(q, *paged, backend="cpu")
    assert_same_bits(tilewise.attention_paged(q, *paged), expected, "out")
    assert_same_bits(tilewise.attention_paged(q, *paged, plan=plan), expected, "out, held")
