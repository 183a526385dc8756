"""float16 and float32 in matrix tiles (AMX), by bfloat16 pieces, beside AVX-512's kernels.

The tests of every dtype have float16 in tiles already. float32 is there only where it is asked for,
so the case table runs here once more. The rest is about what pieces alone can get wrong: numbers
that are not finite, long sums, bits of rows beside others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import LENGTHS, TABLE, WIDTHS, Case
from tests.contract import assert_exact
from tests.kernels.targets import Target, forced
from tests.oracle import assert_same, attend, check, refer_cached
from tilewise import masks, scores
from tilewise.errors import InvalidArgument

TILES = Target("cpu", "avx512_amx", 0)
VECTORS = Target("cpu", "avx512", 0)
BOTH = (torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def in_tiles() -> Iterator[None]:
    """Float32 in tiles during a test."""
    before = tilewise.get_float32()
    tilewise.set_float32("tiles")
    yield
    tilewise.set_float32(before)


@pytest.fixture
def both() -> None:
    """Skip where the processor has no matrix tiles."""
    from tilewise import _core

    if TILES.isa not in _core.isa_available():
        pytest.skip("needs matrix tiles (AMX)")


def _inputs(
    dtype: torch.dtype, queries: int = 75, keys: int = 333, width: int = 64, heads: int = 2
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries + keys + width)
    sizes = ((1, 2 * heads, queries, width), (1, heads, keys, width), (1, heads, keys, width))
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def _run(target: Target, *operands: Tensor, **keywords: Any) -> Any:
    with forced(target):
        return tilewise.attention(*operands, **keywords)


def _plain(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if hidden is not None:
        s = s.masked_fill(hidden, -math.inf)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def _cases() -> list[Case]:
    cases = list(TABLE)
    causal = Case("width", batch=1, queries=35, keys=67, mask=("causal",))
    for width, other in zip(WIDTHS, reversed(WIDTHS), strict=True):
        cases.append(replace(causal, name=f"width-{width}", head_dim=width, value_dim=other))
    for queries, keys in zip(LENGTHS, (*LENGTHS[5:], *LENGTHS[:5]), strict=True):
        cases.append(Case(f"length-{queries}", queries=queries, keys=keys, head_dim=17))
    return [case.of(torch.float32) for case in cases]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_case_table(both: None, case: Case) -> None:
    inputs, reference = refer_cached(case)
    with forced(TILES):
        trained = attend(inputs, "cpu", reference.sent)
        with torch.no_grad():
            served = attend(inputs, "cpu")
            told = attend(inputs, "cpu", statistics="top1")
    for each in (trained, served, told):
        check(each, reference, str(case))
    assert_same(served, told._replace(max_logit=None, entropy=None, top1=None))


@pytest.mark.parametrize("amplitude", [1, 4, 30])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "width"), [(75, 333, 64), (32, 64, 32), (130, 130, 80), (9, 500, 7)]
)
def test_float32_is_exact(
    both: None, queries: int, keys: int, width: int, causal: bool, amplitude: float
) -> None:
    q, k, v = _inputs(torch.float32, queries, keys, width)
    q = q * amplitude
    hidden = torch.ones(queries, keys).triu(keys - queries + 1).bool() if causal else None
    mask = masks.causal() if causal else None
    got = _run(TILES, q, k, v, mask=mask, return_lse=True)
    right = _plain(q.double(), k.double(), v.double(), hidden)
    for mine, plain, true, name in zip(
        (got.out, got.lse), _plain(q, k, v, hidden), right, ("out", "lse"), strict=True
    ):
        assert_exact(mine, plain, true, name)


def test_sums_of_many_keys_lose_no_digits(both: None) -> None:
    q, k, v = _inputs(torch.float32, 40, 20000, 32, 1)
    v = v + 1
    got = _run(TILES, q, k, v).double()
    right = _plain(q.double(), k.double(), v.double(), None)[0]
    assert (got - right).abs().max() < 3e-6
    assert (got - right).square().mean().sqrt() < 6e-7


@pytest.mark.parametrize(
    ("queries", "keys", "most"),
    [(9000, 20, (2e-7, 2e-7, 1.5e-7)), (20, 9000, (3e-7, 2.5e-7, 1e-7))],
)
def test_gradients_of_many_rows_lose_no_digits(
    both: None, queries: int, keys: int, most: tuple[float, ...]
) -> None:
    # Of a value, whose terms have one sign, and of a query. Tiles that added to what is there
    # already would have 4.9e-7 and 3.5e-7.
    operands = _inputs(torch.float32, queries, keys, 32, 1)
    sent = torch.ones_like(operands[0])
    leaves = [x.double().requires_grad_() for x in operands]
    q, k, v = leaves
    _plain(q, k, v, None)[0].backward(sent.double())
    for mine, leaf, limit in zip(_gradients(TILES, operands, sent), leaves, most, strict=True):
        assert leaf.grad is not None
        error = (mine - leaf.grad).square().mean().sqrt() / leaf.grad.square().mean().sqrt()
        assert error < limit


def _gradients(target: Target, operands: Sequence[Tensor], sent: Tensor, **keywords: Any) -> Any:
    leaves = [x.clone().requires_grad_() for x in operands]
    with forced(target):
        tilewise.attention(*leaves, **keywords).backward(sent)
    return [x.grad for x in leaves]


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["q", "k", "v", "gradient"])
def test_gradients_of_numbers_that_are_not_finite(
    both: None, dtype: torch.dtype, number: float, place: str
) -> None:
    operands = [*_inputs(dtype), _inputs(dtype)[0].flip(-1)]
    changed = [x.clone() for x in operands]
    changed[["q", "k", "v", "gradient"].index(place)][0, 1, 17, 5] = number
    mask = masks.causal()
    got, expected, clean = (
        _gradients(target, each[:3], each[3], mask=mask)
        for target, each in ((TILES, changed), (VECTORS, changed), (TILES, operands))
    )
    for mine, right, before in zip(got, expected, clean, strict=True):
        torch.testing.assert_close(mine, right, rtol=4e-3, atol=4e-3, equal_nan=True)
        assert not mine.isfinite().all() or place in ("v", "gradient")
        if place in ("q", "gradient"):  # of head 1 of four, which has the first head of keys
            others = slice(2, None) if mine.shape[1] == 4 else slice(1, None)
            assert torch.equal(mine[:, others], before[:, others])
    if place in ("q", "gradient"):  # other rows of their vector keep their bits
        neighbours = [m for m in range(75) if m != 17]
        assert torch.equal(got[0][:, 1, neighbours], clean[0][:, 1, neighbours])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["q", "k", "v"])
def test_numbers_that_are_not_finite(
    both: None, dtype: torch.dtype, number: float, place: str
) -> None:
    operands = _inputs(dtype)
    changed = [x.clone() for x in operands]
    changed["qkv".index(place)][0, 1, 17, 5] = number
    got, expected, clean = (
        _run(TILES, *changed, return_lse=True),
        _run(VECTORS, *changed, return_lse=True),
        _run(TILES, *operands, return_lse=True),
    )
    for mine, right, before in zip(got[:2], expected[:2], clean[:2], strict=True):
        torch.testing.assert_close(mine, right, rtol=2e-3, atol=2e-3, equal_nan=True)
        # Neighbours keep their bits.
        kept = mine.isfinite() & ((mine - before).abs() < 1e-7)
        assert kept.float().mean() >= (0.7 if place == "q" else 0.45)
        assert torch.equal(mine[:, :1], before[:, :1])
    if place == "q":
        others = [m for m in range(75) if m != 17]
        assert torch.equal(got[0][:, :, others], clean[0][:, :, others])


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_infinities_of_both_signs(both: None, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype)
    v[0, 0, 3, 2] = math.inf
    v[0, 0, 300, 2] = -math.inf  # in another block: their sum is NaN
    v[0, 0, 200, 9] = -math.inf
    v[0, 1, 77] = math.inf
    k[0, 0, 5, 0] = -math.inf
    q[0, 0, :, 0] = q[0, 0, :, 0].abs()  # of this key all scores are -inf
    got, expected = _run(TILES, q, k, v), _run(VECTORS, q, k, v)
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3, equal_nan=True)
    assert got[0, 0, :, 2].isnan().all()
    assert (got[0, 0, :, 9] == -math.inf).all()


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_what_a_mask_hides_may_be_anything(both: None, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype, keys=400)
    mask = masks.lengths(torch.tensor([333]))
    before = _run(TILES, q, k, v, mask=mask)
    for number in (math.inf, math.nan):
        k[:, :, 333:] = number
        v[:, :, 333:] = number
        assert torch.equal(_run(TILES, q, k, v, mask=mask), before)


@pytest.mark.parametrize("width", [8, 64, 80, 128])
def test_a_row_of_float32_has_the_same_bits_beside_others(both: None, width: int) -> None:
    q, k, v = _inputs(torch.float32, 100, 700, width, 1)
    calm = _run(TILES, q, k, v, return_lse=True)
    grown = q.clone()
    grown[:, :, [3, 40, 99]] *= 50  # their references grow, block after block
    got = _run(TILES, grown, k, v, return_lse=True)
    others = [m for m in range(100) if m not in (3, 40, 99)]
    assert torch.equal(got.out[:, :, others], calm.out[:, :, others])
    assert torch.equal(got.lse[:, :, others], calm.lse[:, :, others])
    alone = _run(TILES, q[:, 1:], k, v)
    assert torch.equal(alone, calm.out[:, 1:])


def test_float32_with_masks_and_scores(both: None) -> None:
    q, k, v = _inputs(torch.float32, 300, 300)
    keywords = {
        "mask": masks.causal() & masks.window(100),
        "score": scores.softcap(5.0),
        "return_lse": True,
    }
    got, expected = _run(TILES, q, k, v, **keywords), _run(VECTORS, q, k, v, **keywords)
    torch.testing.assert_close(got.out, expected.out, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(got.lse, expected.lse, rtol=3e-6, atol=3e-6)
    sliced = _run(TILES, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)))
    assert torch.equal(sliced, _run(TILES, q, k, v))


def test_float32_is_in_tiles_where_it_was_asked_for_and_nowhere_else(both: None) -> None:
    q, k, v = _inputs(torch.float32)
    in_tiles = _run(TILES, q, k, v)
    few = _run(TILES, q[:, :, :8], k, v)
    leaf = q.clone().requires_grad_()
    trained = _run(TILES, leaf, k, v).detach()
    vectors = _run(VECTORS, q, k, v)
    assert not torch.equal(in_tiles, vectors)
    assert torch.equal(trained, in_tiles)
    assert torch.equal(few, _run(VECTORS, q[:, :, :8], k, v))
    tilewise.set_float32("exact")
    assert torch.equal(_run(TILES, q, k, v), vectors)


def test_float32_is_in_tiles_as_torch_is_set(both: None) -> None:
    q, k, v = _inputs(torch.float32)
    in_tiles, vectors = _run(TILES, q, k, v), _run(VECTORS, q, k, v)
    backends: Any = torch.backends
    before = backends.mkldnn.matmul.fp32_precision
    tilewise.set_float32("torch")
    try:
        for precision, right in (("bf16", in_tiles), ("ieee", vectors), ("tf32", in_tiles)):
            backends.mkldnn.matmul.fp32_precision = precision
            assert torch.equal(_run(TILES, q, k, v), right)
            assert torch.equal(_run(TILES, q, k, v, return_lse=True).out, right)
    finally:
        backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize("dtype", BOTH, ids=str)
def test_dropout_leaves_the_same_pairs(both: None, dtype: torch.dtype) -> None:
    q, k, v = _inputs(dtype)
    with torch.no_grad():
        got, expected = (
            _run(each, q, k, v, mask=masks.causal(), dropout_p=0.3, seed=5)
            for each in (TILES, VECTORS)
        )
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=2e-3 if dtype.itemsize == 2 else 2e-6)


@pytest.mark.parametrize("amplitude", [1, 20])
def test_statistics_of_float32(both: None, amplitude: float) -> None:
    q, k, v = _inputs(torch.float32)
    q = q * amplitude
    mask = masks.causal()
    got, expected = (
        _run(each, q, k, v, mask=mask, return_lse=True, return_stats="top1")
        for each in (TILES, VECTORS)
    )
    for mine, right in zip(got.stats, expected.stats, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.out, _run(TILES, q, k, v, mask=mask))


def test_explain_says_whether_float32_is_in_tiles() -> None:
    q, k, v = _inputs(torch.float32)
    assert "float32" in dict(tilewise.explain(q, k, v).notes)
    tilewise.set_float32("exact")
    assert "float32" not in dict(tilewise.explain(q, k, v).notes)


def test_other_words_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"way.*'fast'.*'exact' or 'tiles'"):
        tilewise.set_float32("fast")
    assert tilewise.get_float32() == "tiles"
