"""Keys in pages on the CPU: to the bit what the same keys give one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tilewise
from tests.cases import FLOATS, Case
from tests.contract import assert_same_bits
from tests.inputs import build
from tests.kernels.targets import Target, pairs
from tests.oracle import assert_same, attend, outcome_of
from tests.paged import in_pages, sequences_of
from tests.test_paged import CASES, keywords_of, paged_of
from tilewise import BlockMask, masks, scores

GQA: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 24, "value_dim": 20}
LONG = ((1, 700), (70, 600), (8, 130), (9, 260), (0, 3), (3, 0), (130, 130))
EVERY = [
    *CASES,
    Case("long", **GQA, sequences=LONG, mask=("causal",), sinks=True),
    Case("odd", heads=3, kv_heads=1, head_dim=31, value_dim=33, sequences=LONG),
]
PAGES = (1, 3, 16, 17, 64, 128, 200)
EVERY_DTYPE = [case.of(dtype) for dtype in FLOATS for case in EVERY]


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


def test_a_table_of_tiles() -> None:
    """A BlockMask of the lengths."""
    case = Case("table", **GQA, sequences=((64, 300), (4, 133), (9, 0)))
    inputs = build(case).detached()
    assert inputs.cu_seqlens is not None
    cu_q, cu_k = inputs.cu_seqlens
    paged = in_pages(*sequences_of(inputs), 16, spare=4)
    window = masks.window(70, 0)
    table = BlockMask.of(window, block=(16, 16), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    expected = tilewise.attention_paged(inputs.q, *paged, cu_q, mask=window, backend="cpu")
    found = tilewise.attention_paged(inputs.q, *paged, cu_q, mask=table, backend="cpu")
    torch.testing.assert_close(found, expected)


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
