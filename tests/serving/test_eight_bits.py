"""Pages in 8 bits: how far off they are, and that rows keep what they have."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.cases import drawn
from tests.contract import assert_exact, assert_same_bits
from tests.plain import attend
from tilewise import masks
from tilewise.errors import InvalidArgument
from tilewise.serving import PagedKVCache, cascade_attention
from tilewise.serving.pages import quantised

STORAGES = pytest.mark.parametrize("storage", [torch.int8, torch.float8_e4m3fn], ids=str)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def allowed(x: Tensor, storage: torch.dtype, dtype: torch.dtype) -> Tensor:
    """The most that each element of rows may be off, as ``quantised`` says."""
    wide = x.double()
    eps = torch.finfo(torch.float32).eps * 4
    scales = (wide.abs().amax(-1, keepdim=True) / (127 if storage is torch.int8 else 448)) * (
        1 + eps
    )
    rounding = wide.abs() * (torch.finfo(dtype).eps + eps) + torch.finfo(dtype).tiny
    if storage is torch.int8:
        return scales * (0.5 + 127 * eps) + rounding
    return torch.maximum(wide.abs() / 16, scales / 1024) * (1 + eps) + 2 * rounding


def back(x: Tensor, storage: torch.dtype) -> Tensor:
    """Rows after they were stored."""
    values, scales = quantised(x, storage)
    return (values.float() * scales[..., None]).to(x.dtype)


def assert_rule(
    found: Tensor, q: Tensor, k: Tensor, v: Tensor, storage: torch.dtype, window: int = 1 << 20
) -> None:
    """The 2x rule for what the rows stand for, each number of 8 bits times its scale."""
    stored = []
    for x in (k, v):
        values, scales = quantised(x, storage)
        stored.append(values.double() * scales.double()[..., None])
    before = k.shape[2] - q.shape[2]

    def mask(b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        return (n <= m + before) & (n > m + before - window)

    plain = attend(q, *[x.to(q.dtype) for x in stored], mask=mask).out
    assert_exact(found, plain, attend(q.double(), *stored, mask=mask).out, "rows as stored")


def cache_of(storage: torch.dtype | None, **more: Any) -> PagedKVCache:
    sizes = {"pages": 60, "page_size": 16, "kv_heads": 2, "head_dim": 16, **more}
    return PagedKVCache(**sizes, storage=storage)


@STORAGES
@DTYPES
def test_how_far_a_row_is_off(dtype: torch.dtype, storage: torch.dtype) -> None:
    rows = drawn(200, 32, seed=1) * torch.logspace(-4, 3, 200)[:, None]
    rows *= torch.logspace(-6, 0, 32)  # elements far below the row's largest
    rows[0] = 0.0
    x = rows.to(dtype)
    error = (back(x, storage).double() - x.double()).abs()
    assert bool((error <= allowed(x, storage, dtype)).all())
    largest = x.abs().argmax(-1)
    own = error.gather(1, largest[:, None])[1:, 0]
    assert bool((own <= 2 * torch.finfo(dtype).eps * x.double().abs().amax(-1)[1:]).all())
    assert bool((back(x, storage)[0] == 0).all())


@STORAGES
def test_rows_that_are_no_numbers(storage: torch.dtype) -> None:
    x = drawn(4, 8, seed=1)
    x[1, 3], x[2, 0] = math.nan, -math.inf
    found = back(x, storage)
    assert bool(found[1:3].isnan().all())
    assert bool(found[[0, 3]].isfinite().all())


def filled(cache: PagedKVCache, lengths: list[int], dtype: torch.dtype) -> tuple[Any, ...]:
    """Sequences of a cache, and their keys and values."""
    chosen, keys, values = [], [], []
    for i, length in enumerate(lengths):
        chosen.append(cache.add())
        keys.append(drawn(1, 2, length, 16, seed=i, dtype=dtype))
        values.append(drawn(1, 2, length, 16, seed=50 + i, dtype=dtype))
        cache.append([chosen[-1]], keys[-1], values[-1])
    return chosen, keys, values


@STORAGES
@DTYPES
def test_against_float_pages(dtype: torch.dtype, storage: torch.dtype) -> None:
    """Exact for the rows as they are stored; and near attention over the rows that went in.

    Scores that are off by d at most make probabilities that are off by the factor exp(2 d) at most,
    so that an output is off by max |error of v| + (exp(2 d) - 1) max |v| at most.
    """
    cache = cache_of(storage, dtype=dtype)
    lengths = [1, 40, 133]
    chosen, keys, values = filled(cache, lengths, dtype)
    q = drawn(3, 4, 2, 16, seed=90, dtype=dtype) / 4
    q[0, :, 0] = 0  # that row sees no key
    together = cache.attend(chosen, q)
    for i in range(3):
        one = slice(i, i + 1)
        assert_rule(together[one], q[one], keys[i], values[i], storage)
        assert_same_bits(cache.attend([chosen[i]], q[one]), together[one], "alone")
        exact = tilewise.attention(
            q[one].double(), keys[i].double(), values[i].double(), mask=masks.causal()
        )
        k_off, v_off = (allowed(x, storage, dtype) for x in (keys[i], values[i]))
        d = 0.25 * (q[one].double().abs() @ k_off.repeat_interleave(2, 1).mT).amax()
        v_off = v_off.amax()
        most = v_off + torch.expm1(2 * d) * (values[i].double().abs().amax() + v_off)
        rounding = 8 * torch.finfo(dtype).eps * values[i].double().abs().amax()
        assert float((together[one].double() - exact).abs().max()) <= float(most + rounding)
        assert float(most) < 1.5  # of values up to 3: the bound says something


@STORAGES
def test_later_larger_rows_change_nothing(storage: torch.dtype) -> None:
    cache, other = cache_of(storage), cache_of(storage)
    first, second = cache.add(), other.add()
    rows = drawn(1, 2, 20, 16, seed=1) * torch.logspace(-3, 4, 20)[:, None]
    other.append([second], rows, -rows)
    for n in range(20):  # each larger than those before it in the page
        cache.append([first], rows[:, :, n : n + 1], -rows[:, :, n : n + 1])
    for one, two in ((cache.k_pages, other.k_pages), (cache.v_pages, other.v_pages)):
        found, due = (
            pool[c.tables([s])[0][0].long()].view(torch.uint8)
            for pool, c, s in ((one, cache, first), (two, other, second))
        )
        assert torch.equal(found[0], due[0])
        assert torch.equal(found[1, :, :4], due[1, :, :4])
    q = drawn(1, 4, 1, 16, seed=3) * 1e-4
    assert_same_bits(cache.attend([first], q), other.attend([second], q), "out")


@STORAGES
def test_forks_windows_and_cascades(storage: torch.dtype) -> None:
    cache = cache_of(storage)
    (origin,), (k,), (v,) = filled(cache, [40], torch.float32)
    fork = cache.fork(origin)
    more = drawn(2, 2, 30, 16, seed=7) * 5
    cache.append([fork, origin], more, more)  # the third page is copied, scales and all
    q = drawn(2, 4, 1, 16, seed=8)
    together = cache.attend([fork, origin], q)
    for i in range(2):
        keys, values = (torch.cat([x, more[i : i + 1]], 2) for x in (k, v))
        assert_rule(together[i : i + 1], q[i : i + 1], keys, values, storage)
    at_once = cache.attend([fork, origin], q, cascade=True)
    torch.testing.assert_close(at_once, together)
    tensors = cache.k_pages, cache.v_pages, *cache.tables([fork, origin])
    scales: dict[str, Any] = {"k_scale": cache.k_scales, "v_scale": cache.v_scales}
    assert_same_bits(at_once, cascade_attention(q, *tensors, 32, **scales), "two common pages")
    narrow = cache_of(storage, window=20)
    (sequence,), (k,), (v,) = filled(narrow, [100], torch.float32)
    assert narrow.free_pages == 53
    narrow.append([sequence], more[:1, :, :1], more[:1, :, :1])
    assert narrow.free_pages == 58
    keys, values = (torch.cat([x, more[:1, :, :1]], 2) for x in (k, v))
    assert_rule(narrow.attend([sequence], q[:1]), q[:1], keys, values, storage, window=20)


def test_the_sign_flag_of_scales_is_seen() -> None:
    torch.manual_seed(3)
    q, pages = torch.randn(1, 2, 9, 8), torch.randint(-127, 128, (3, 2, 4, 8), dtype=torch.int8)
    where = torch.tensor([[2, 0, 1]]), torch.tensor([9])
    scales = torch.rand(3, 2, 4)
    flagged = torch.complex(torch.zeros_like(scales), -scales).conj().imag
    assert flagged.is_neg()
    found, expected = (
        tilewise.attention_paged(q, pages, pages, *where, k_scale=each, v_scale=each)
        for each in (flagged, scales)
    )
    assert_same_bits(found, expected, "out")


def test_what_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"^storage: got torch.float8_e5m2; required: None,"):
        cache_of(torch.float8_e5m2)
    with pytest.raises(InvalidArgument, match=r"^dtype: got torch.int8 with storage=torch.int8"):
        cache_of(torch.int8, dtype=torch.int8)
    cache = cache_of(torch.int8)
    rows = torch.zeros(1, 2, 1, 16, dtype=torch.int8)
    with pytest.raises(InvalidArgument, match=r"^k: got torch.int8 on cpu; required: the cache's "):
        cache.append([cache.add()], rows, rows)
