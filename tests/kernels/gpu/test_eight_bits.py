"""Pages in 8 bits beside wider queries, in Triton's interpreter: exactness, unread rows, bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

import tilewise
from tests.cases import Case, build
from tests.contract import assert_exact, assert_same_bits
from tests.kernels.gpu.passes import BLOCKS, forward, on_meta, prepare_forward
from tests.kernels.gpu.test_paged import paged_problem_of
from tests.kernels.test_eight_bits import STORAGES, narrow, truths
from tests.paged import in_pages, sequences_of
from tests.test_paged import keywords_of
from tilewise import masks
from tilewise.kernels.gpu.config import FAMILIES, Blocks, config_for
from tilewise.problem import Operands, Problem
from tilewise.variants.float8 import FLOAT8

SIZES: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 16, "value_dim": 24}
LENGTHS = ((1, 90), (20, 70), (8, 33), (0, 5), (3, 0), (2, 40))
FEW = ((1, 150), (1, 33), (1, 0))  # the kernel for decoding, with several splits
CASES = [
    Case("plain", **SIZES, sequences=LENGTHS),
    Case("causal", **SIZES, sequences=LENGTHS, mask=("causal",), sinks=True),
    Case("scored", **SIZES, sequences=LENGTHS, mask=("window",), score=("softcap", "bias")),
    Case("decode", **SIZES, sequences=FEW, sinks=True),
    Case("decode scored", **SIZES, sequences=FEW, mask=("lengths",), score=("alibi_each",)),
    Case("narrow", heads=2, kv_heads=1, head_dim=5, value_dim=33, sequences=LENGTHS, scale=-0.7),
]
DTYPES = (torch.float32, torch.float16)


@pytest.fixture(params=["numbers", "codes"])
def chip(request: pytest.FixtureRequest) -> Iterator[str]:
    """One that widens float8 by itself, and one that has no such type."""
    fp8 = "halves" if request.param == "codes" else "whole"
    with mock.patch.dict(FAMILIES, interpreter=FAMILIES["interpreter"]._replace(fp8=fp8)):
        yield request.param


@STORAGES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rule_of_two(case: Case, dtype: torch.dtype, storage: torch.dtype, chip: str) -> None:
    """Every statistic, pages that are a part of a block of keys and such as hold several."""
    inputs = build(case.of(dtype)).detached()
    assert inputs.cu_seqlens is not None
    plain, oracle = truths(inputs, storage)
    options: dict[str, Any] = {**keywords_of(inputs), "backend": "gpu", "return_lse": True}
    options["return_stats"] = "top1"
    page_size = (5, 16, 64)[(CASES.index(case) + (chip == "codes")) % 3]
    paged, scales = narrow(in_pages(*sequences_of(inputs), page_size), storage)
    asked = options | scales
    if case.sequences == FEW:  # one query each: dense, which decodes
        got = tilewise.attention_paged(inputs.q[:, :, None], *paged, **asked)
        out, lse = got.out[:, :, 0], got.lse[:, :, 0].T
    else:
        got = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **asked)
        out, lse = got.out, got.lse
    assert_exact(out, plain.out, oracle.out, "out")
    assert_exact(lse, plain.lse, oracle.lse, "lse")


@STORAGES
def test_key_lists(storage: torch.dtype) -> None:
    """Single keys, read in place; and blocks of them, copied where scales lie otherwise."""
    generator = torch.Generator().manual_seed(0)
    keys, values = ([torch.randn(1, 48, 16, generator=generator)] for _ in range(2))
    paged, scales = narrow(in_pages(keys, values, 16), storage)
    q = torch.randn(1, 2, 3, 16, generator=generator)
    few = {name: x.new_tensor(0.01).expand(x.shape) for name, x in scales.items()}
    for block, each in ((1, scales), (8, few)):
        indices = torch.randint(-1, 48 // block, (1, 1, 3, 24 // block), generator=generator)
        lists, mask = tilewise.KeyBlocks(indices, block), masks.window(30, 0)
        given: dict[str, Any] = {**each, "keys": lists, "mask": mask}
        got, plain, oracle = (
            tilewise.attention_paged(q.to(dtype), *paged, **given, backend=backend)
            for backend, dtype in (("gpu", q.dtype), ("tiled", q.dtype), ("tiled", torch.float64))
        )
        assert_exact(got, plain, oracle, f"blocks of {block}")


@STORAGES
@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda each: f"{each.queries}x{each.keys}")
def test_blocks_of_all_sizes(blocks: Blocks, storage: torch.dtype) -> None:
    inputs = build(CASES[1]).detached()
    plain, oracle = truths(inputs, storage)
    for page_size in (3, 32):
        problem, operands = stored(CASES[1], page_size, storage)
        found = forward(problem, operands, blocks)
        assert_exact(found.out, plain.out, oracle.out, f"out, pages of {page_size}")


def stored(case: Case, page_size: int, storage: torch.dtype) -> tuple[Problem, Operands]:
    """A case's problem and operands with keys in pages of 8 bits."""
    inputs = build(case).detached()
    paged = in_pages(*sequences_of(inputs), page_size)
    problem, operands = paged_problem_of(inputs, paged, False)
    pages, scales = narrow(paged, storage)
    return problem._replace(stored=storage), operands._replace(
        k=pages.k_pages, v=pages.v_pages, **scales
    )


@STORAGES
def test_a_row_keeps_its_bits(storage: torch.dtype) -> None:
    """In pages of any size, order and layout, alone and among others."""
    generator = torch.Generator().manual_seed(1)
    keys, values = ([torch.randn(2, n, 16, generator=generator) for n in (70, 9)] for _ in range(2))
    for queries in (1, 20):
        q = torch.randn(2, 4, queries, 16, generator=generator)
        first, scales = narrow(in_pages(keys, values, 16), storage)
        together = tilewise.attention_paged(q, *first, **scales, backend="gpu")
        other, others = narrow(in_pages(keys, values, 7, seed=4, rows_first=True), storage)
        for b in range(2):
            one = other._replace(
                block_table=other.block_table[b : b + 1], key_lengths=other.key_lengths[b : b + 1]
            )
            found = tilewise.attention_paged(q[b : b + 1], *one, **others, backend="gpu")
            assert_same_bits(found, together[b : b + 1], f"sequence {b}, {queries} queries")


@STORAGES
def test_no_number_that_nobody_sees_is_read(storage: torch.dtype) -> None:
    """Pages behind a window may have scales that are NaN."""
    keys, values = ([torch.randn(2, 150, 16)] for _ in range(2))
    paged, scales = narrow(in_pages(keys, values, 8), storage)
    hidden = paged.block_table[0, :8].long()
    blank: dict[str, Any] = {name: scale.clone() for name, scale in scales.items()}
    for scale in blank.values():
        scale[hidden] = torch.nan
    for queries in (1, 20):
        q, mask = torch.randn(1, 2, queries, 16), masks.window(30, 0)
        expected, found = (
            tilewise.attention_paged(q, *paged, **each, mask=mask, backend="gpu")
            for each in (scales, blank)
        )
        assert_same_bits(found, expected, f"{queries} queries")


def test_small_scales_in_float16() -> None:
    """Values of 1e-3, whose scales times a probability would be subnormal numbers."""
    inputs = build(CASES[0].of(torch.float16)).detached()
    inputs = inputs._replace(v=inputs.v * 1e-3)
    assert inputs.cu_seqlens is not None
    plain, oracle = truths(inputs, torch.int8)
    paged, scales = narrow(in_pages(*sequences_of(inputs), 16), torch.int8)
    asked: dict[str, Any] = {**scales, **keywords_of(inputs), "backend": "gpu"}
    found = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **asked)
    ours, theirs = ((each.double() - oracle.out).abs().max() for each in (found, plain.out))
    assert ours <= 2 * theirs  # without the floor of ``assert_exact``, which is for values of 1


@STORAGES
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "interpreter"])
def test_launches_need_no_values(family: str, storage: torch.dtype) -> None:
    """On meta tensors the host side makes the same launches, for every chip."""
    problem, operands = stored(CASES[0], 8, storage)
    found = prepare_forward(problem, on_meta(operands), config_for(family), "top1")[1]
    expected = prepare_forward(problem, operands, config_for(family), "top1")[1]
    by_codes = storage is FLOAT8 and FAMILIES[family].fp8 == "halves"
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.grid == theirs.grid
        assert mine.constants == theirs.constants
        assert ("codes" if by_codes else "numbers") == mine.constants["FORM"].STORED
