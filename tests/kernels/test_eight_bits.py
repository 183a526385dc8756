"""Pages in 8 bits beside wider queries: exact for the numbers that they stand for."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tilewise
from tests.cases import FLOATS, Case, Inputs, build
from tests.contract import assert_exact, assert_same_bits
from tests.extended import extended
from tests.kernels.targets import Target, only_cpu, pairs
from tests.oracle import problem_of
from tests.paged import Paged, in_pages, sequences_of
from tests.test_paged import keywords_of
from tilelab.cases.dense import dense
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.serving.pages import quantised
from tilewise.variants.float8 import FLOAT8

STORAGES = pytest.mark.parametrize("storage", [torch.int8, FLOAT8], ids=str)
SIZES: dict[str, Any] = {"heads": 6, "kv_heads": 2, "head_dim": 40, "value_dim": 24}
LENGTHS = ((1, 700), (20, 300), (8, 130), (0, 5), (3, 0), (2, 65))
CASES = [
    Case("plain", **SIZES, sequences=LENGTHS),
    Case("causal", **SIZES, sequences=LENGTHS, mask=("causal",), sinks=True),
    Case(
        "window", **SIZES, sequences=LENGTHS, mask=("lengths", "window", "and"), score=("softcap",)
    ),
    Case("bias", **SIZES, sequences=LENGTHS, mask=("bool",), score=("bias", "alibi_each")),
    Case("wide", heads=2, kv_heads=2, head_dim=129, value_dim=65, sequences=LENGTHS),
]
EVERY = [case.of(dtype) for dtype in FLOATS for case in CASES]


class Narrow(NamedTuple):
    """The arguments of ``attention_paged`` after q, and the scales."""

    paged: Paged
    scales: dict[str, Any]


def narrow(paged: Paged, storage: torch.dtype) -> Narrow:
    """Pages in 8 bits. Rows that nobody has stay NaN, by their scales."""
    (k, k_scale), (v, v_scale) = (quantised(pool, storage) for pool in paged[:2])
    return Narrow(paged._replace(k_pages=k, v_pages=v), {"k_scale": k_scale, "v_scale": v_scale})


def stands_for(rows: Tensor, storage: torch.dtype) -> Tensor:
    """What rows [..., D] become, in float64: no bit of a number times its scale is lost."""
    values, scales = quantised(rows, storage)
    return values.double() * scales.double()[..., None]


def truths(inputs: Inputs, storage: torch.dtype) -> tuple[Any, Any]:
    """The plain implementation in the dtype of the call, and the oracle."""
    problem, operands = problem_of(inputs)
    k, v = (stands_for(rows, storage) for rows in (operands.k, operands.v))
    operands = operands._replace(k=k, v=v)
    wide = extended if inputs.q.dtype is torch.float64 else dense
    return dense(problem, operands, dtype=inputs.q.dtype), wide(problem, operands)


@STORAGES
@pytest.mark.parametrize(("target", "case"), pairs(EVERY, 5), indirect=["target"])
def test_the_rule_of_two(target: Target, case: Case, storage: torch.dtype) -> None:
    """Few queries and many, pages of odd and even sizes, every statistic."""
    inputs = build(case).detached()
    assert inputs.cu_seqlens is not None
    plain, oracle = truths(inputs, storage)
    options = {**keywords_of(inputs), "backend": target.backend, "return_lse": True}
    options["return_stats"] = "top1"
    for page_size in (13, 128):
        paged, scales = narrow(in_pages(*sequences_of(inputs), page_size), storage)
        asked = options | scales
        got = tilewise.attention_paged(inputs.q, *paged, inputs.cu_seqlens[0], **asked)
        assert got.out.dtype is inputs.q.dtype
        found = {"out": got.out, "lse": got.lse}
        found |= {name: getattr(got.stats, name) for name in ("max_logit", "entropy")}
        for name, actual in found.items():
            assert_exact(
                actual, getattr(plain, name), getattr(oracle, name), f"{name}, {page_size}"
            )


@STORAGES
@only_cpu
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_keeps_its_bits(target: Target, dtype: torch.dtype, storage: torch.dtype) -> None:
    """In any company, on any number of threads, in pages of any size, one query or several."""
    generator = torch.Generator().manual_seed(1)
    lengths = (900, 40, 0, 260)
    keys, values = ([torch.randn(2, n, 48, generator=generator) for n in lengths] for _ in range(2))
    q = torch.randn(4, 8, 5, 48, generator=generator).to(dtype)
    first, scales = narrow(in_pages(keys, values, 16), storage)
    together = tilewise.attention_paged(q, *first, **scales)
    torch.set_num_threads(3)
    other, others = narrow(in_pages(keys, values, 50, seed=4, rows_first=True), storage)
    for b in range(4):
        one = other._replace(
            block_table=other.block_table[b : b + 1], key_lengths=other.key_lengths[b : b + 1]
        )
        for m in range(5):
            found = tilewise.attention_paged(q[b : b + 1, :, m : m + 1], *one, **others)
            assert_same_bits(found, together[b : b + 1, :, m : m + 1], f"query {m} of {b}")


@STORAGES
def test_no_number_that_nobody_sees_is_read(storage: torch.dtype) -> None:
    """Rows behind a window may be NaN."""
    keys, values = ([torch.randn(2, 600, 16)] for _ in range(2))
    paged, scales = narrow(in_pages(keys, values, 16), storage)
    for queries in (1, 30):
        q = torch.randn(1, 2, queries, 16)
        mask = masks.window(40, 0)
        expected = tilewise.attention_paged(q, *paged, **scales, mask=mask)
        hidden = paged.block_table[0, :8].long()
        blank: dict[str, Any] = {name: scale.clone() for name, scale in scales.items()}
        for scale in blank.values():
            scale[hidden] = torch.nan
        found = tilewise.attention_paged(q, *paged, **blank, mask=mask)
        assert_same_bits(found, expected, f"{queries} queries")


@STORAGES
@pytest.mark.parametrize("queries", [1, 40])
def test_a_scale_may_be_that_of_a_block(storage: torch.dtype, queries: int) -> None:
    """It is expanded over the rows of a page, or over all that there are, without memory."""
    keys, values = ([torch.randn(2, 600, 24)] for _ in range(2))
    q = torch.randn(1, 4, queries, 24)
    paged, scales = narrow(in_pages(keys, values, 16), storage)
    for shape in ((*scales["k_scale"].shape[:2], 1), (1, 1, 1)):
        blocks = {name: 0.004 * torch.rand(shape) + 0.004 for name in scales}
        expanded: dict[str, Any] = {
            name: each.expand_as(scales[name]) for name, each in blocks.items()
        }
        found = tilewise.attention_paged(q, *paged, **expanded)
        copied: dict[str, Any] = {name: each.contiguous() for name, each in expanded.items()}
        assert_same_bits(found, tilewise.attention_paged(q, *paged, **copied), str(shape))
        k, v = (
            (pool.double() * each[..., None].double())[paged.block_table[0, :38].long()]
            .transpose(0, 1)
            .flatten(1, 2)[:, :600]
            for pool, each in zip(paged[:2], expanded.values(), strict=True)
        )
        due = torch.nn.functional.scaled_dot_product_attention(
            q.double(), k[None], v[None], enable_gqa=True
        )
        torch.testing.assert_close(found.double(), due, rtol=0, atol=4e-6)


def small(storage: torch.dtype = torch.int8, **changes: Any) -> dict[str, Any]:
    """Two sequences, as keywords."""
    keys, values = ([torch.randn(2, n, 8) for n in (5, 9)] for _ in range(2))
    paged, scales = narrow(in_pages(keys, values, 4), storage)
    return {"q": torch.randn(2, 4, 3, 8), **paged._asdict(), **scales, **changes}


@STORAGES
def test_what_traces_see(storage: torch.dtype) -> None:
    given = small(storage)

    def call(*tensors: Tensor) -> Any:
        named: dict[str, Any] = dict(zip(given, tensors, strict=True))
        return tilewise.attention_paged(**named)

    graph = make_fx(call)(*given.values())
    assert "attention_paged" in graph.code
    given = small(storage)
    assert_same_bits(graph(*given.values()), call(*given.values()), "other numbers")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no scale": ({"v_scale": None}, r"^v_scale: got None for pages of torch.int8; required: \["),
    "a scale for each page": (
        {"k_scale": torch.ones(6, 2)},
        r"^k_scale: got shape \(6, 2\); required: a floating tensor \[pages, 2, 4\]",
    ),
    "other pages": ({"k_scale": torch.ones(2, 2, 4)}, r"^k_scale: got shape \(2, 2, 4\) for pages"),
    "whole scales": (
        {"k_scale": torch.ones(6, 2, 4, dtype=torch.int32)},
        "a tensor of torch.int32",
    ),
    "a scale of q": ({"q_scale": torch.ones(4)}, "^q_scale: got one with pages in 8 bits"),
    "two dtypes": (
        {"v_pages": torch.zeros(6, 2, 4, 8).to(FLOAT8)},
        "required: the dtype of k_pages",
    ),
    "8 bits of keys alone": (
        {"v_pages": torch.zeros(6, 2, 4, 8)},
        "required: the dtype of k_pages",
    ),
    "columns apart": (
        {"k_pages": torch.zeros(6, 2, 8, 4, dtype=torch.int8).transpose(2, 3)},
        r"^k_pages: got stride 4 in its last dimension; required: 1",
    ),
    "queries in 8 bits": ({"q": torch.zeros(2, 4, 3, 8).to(FLOAT8)}, "^k_pages: got torch.int8; "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    changes, message = WRONG[name]
    for keys in (None, torch.zeros(2, 1, 3, 1, dtype=torch.int32)):
        if keys is None or name != "queries in 8 bits":  # no queries in float8 with lists at all
            with pytest.raises(InvalidArgument, match=message):
                tilewise.attention_paged(**small(keys=keys, **changes))


def test_what_explain_says() -> None:
    q, k, v, *tables = small().values()
    given: dict[str, Any] = {"block_table": tables[0], "key_lengths": tables[1]}
    told = "in int8, with a scale for each row"
    assert f"of 4 keys {told}" in str(tilewise.explain(q, k, v, **given))
    lists = torch.zeros(2, 1, 3, 1, dtype=torch.int32)
    assert f"pages     {told}" in str(tilewise.explain(q, k, v, **given, keys=lists))
