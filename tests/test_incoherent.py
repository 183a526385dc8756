"""``tilewise.float8``: incoherent processing, rounding with scales, and the error that stays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import float8_error
from torch import Tensor

import tilewise
from tests.contract import assert_exact, assert_same_bits
from tilewise import float8, masks, scores
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.float8 import FLOAT8

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gpu.md"
TILED: dict[str, Any] = {"backend": "tiled"}


@pytest.mark.parametrize("width", [8, 16, 64, 80, 96, 128, 192, 256, 512, 576])
def test_it_is_orthogonal(width: int) -> None:
    """Blocks of the largest power of two that divides the width; all entries of one size."""
    matrix = float8.incoherent(torch.eye(width, dtype=torch.float64), seed=5)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(width).double(), rtol=0, atol=1e-14)
    block = width & -width
    blocks = matrix.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
    outside = ~torch.eye(width // block, dtype=torch.bool)
    assert not blocks[outside].any()
    assert bool((blocks[~outside].abs() - block**-0.5).abs().max() < 1e-15)


def test_the_seed_and_the_width_decide() -> None:
    """Half of the signs are negative, and other seeds have others; a draw never changes."""
    of = [float8.incoherent(torch.eye(256), seed=seed)[:, 0].sign() for seed in range(8)]
    shares = torch.stack(of)
    assert bool((shares.mean(1).abs() < 0.2).all())
    products = shares @ shares.T / 256
    assert bool((products - torch.eye(8)).abs().max() < 0.2)
    assert_same_bits(float8.incoherent(torch.eye(256), seed=3)[:, 0].sign(), of[3], "signs")
    first = float8.incoherent(torch.eye(16), seed=1)[:, 0].sign()
    assert first.tolist() == FIRST


FIRST = [1.0, -1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_stay(dtype: torch.dtype) -> None:
    """To the rounding of q R and k R, whose sums are float32 at least; in any layout."""
    q, k = torch.randn(2, 7, 4, 128, dtype=dtype), torch.randn(2, 9, 2, 128, dtype=dtype)
    turned = [float8.incoherent(x).transpose(1, 2).double() for x in (q, k)]
    for x, y in zip(turned, (q, k), strict=True):
        other = float8.incoherent(y.transpose(1, 2))
        assert other.stride() == y.transpose(1, 2).stride()
        assert_same_bits(x, other.double(), "another layout")
    q, k = q.transpose(1, 2).double(), k.transpose(1, 2).double()
    due = q @ k.repeat_interleave(2, 1).mT
    found = turned[0] @ turned[1].repeat_interleave(2, 1).mT
    # Each of 128 terms of sizes about 1 errs by eps, or, where sums have no more bits, by several.
    several = 2 if dtype.itemsize == 2 else 8
    found_error = float((found - due).square().mean().sqrt())
    assert found_error < several * 128**0.5 * torch.finfo(dtype).eps


def test_gradients_go_through() -> None:
    """That of x is the incoming one times R^T; through attention they are those without it."""
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: float8.incoherent(x, seed=2), x)
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (5, 7, 7))
    sent = torch.randn(1, 2, 5, 16)
    plain = torch.autograd.grad(tilewise.attention(q, k, v), (q, k, v), sent)
    out = tilewise.attention(float8.incoherent(q), float8.incoherent(k), v)
    for one, other in zip(plain, torch.autograd.grad(out, (q, k, v), sent), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_results_stay_in_bfloat16() -> None:
    """By the 2x rule, of a call with a mask and a score."""
    q, k, v = (torch.randn(2, 2, n, 64, dtype=torch.bfloat16) for n in (33, 45, 45))
    call: dict[str, Any] = {"mask": masks.causal(), "score": scores.softcap(5.0)}
    plain = tilewise.attention(q, k, v, **call)
    oracle = tilewise.attention(q.double(), k.double(), v.double(), **call, backend="tiled")
    turned = float8.incoherent(q), float8.incoherent(k)
    assert_exact(tilewise.attention(*turned, v, **call), plain, oracle, "out")


def _qkv(rows: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(2, h, rows, d) for h, d in ((4, 64), (2, 64), (2, 24)))
    return q, k, v


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rounding(packed: bool, spread: bool) -> None:
    """A head's largest number becomes 448; no number errs by more than a 16th."""
    given = _qkv()
    if packed:
        given = tuple(x[0].transpose(0, 1) for x in given)  # type: ignore[assignment]
    found = float8.quantised(*given, incoherent_qk=spread, seed=4)
    heads = [x.shape[1:2] if packed else x.shape[:2] for x in given]
    assert [scale.shape for scale in found[3:]] == heads
    for x, rounded, scale, turned in zip(given, found[:3], found[3:], (1, 1, 0), strict=True):
        due = float8.incoherent(x, seed=4) if spread and turned else x
        shape = (1, -1, 1) if packed else (*scale.shape, 1, 1)
        stands = rounded.float() * scale.view(shape)
        assert rounded.dtype is FLOAT8
        assert rounded.stride() == x.stride()
        assert float(rounded.float().abs().max()) == 448.0
        assert bool(((stands - due).abs() <= due.abs() / 16 + scale.view(shape) / 1024).all())


def test_heads_without_numbers() -> None:
    """Zeros stay zeros, a NaN makes its head NaN alone, and no rows are no error."""
    q, k, v = _qkv()
    k[0, 1] = 0
    v[1, 0, 3, 5] = torch.nan
    found = float8.quantised(q, k, v)
    assert float(found.k_scale[0, 1]) == 1.0
    assert not found.k[0, 1].float().any()
    assert found.v_scale.isnan().tolist() == [[False, False], [True, False]]
    out = tilewise.attention(**found._asdict(), **TILED)
    assert bool(out[1, :2].isnan().all())
    assert not out[0].isnan().any()
    assert not out[1, 2:].isnan().any()
    none = float8.quantised(q[:, :, :0], k, v, incoherent_qk=True)
    assert tilewise.attention(**none._asdict(), **TILED).shape == (2, 4, 0, 24)


@pytest.mark.parametrize("width", [0, 4, 12, 100])
def test_widths_that_spread_little_are_refused(width: int) -> None:
    x = torch.randn(1, 1, 3, width)
    said = rf"x: got shape \(1, 1, 3, {width}\), width {width}; required: .* multiple of 8"
    with pytest.raises(InvalidArgument, match=said):
        float8.incoherent(x)
    with pytest.raises(InvalidArgument, match=r"^k: .*Pad q and k with columns of 0"):
        float8.quantised(torch.randn(1, 1, 3, 8), x, x, incoherent_qk=True)


def test_what_is_no_tensor_of_floats() -> None:
    with pytest.raises(InvalidType, match=r"^x: got a list; required: a floating tensor"):
        float8.incoherent([1.0] * 8)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"^x: got a tensor of torch\.int64"):
        float8.incoherent(torch.arange(8))
    x = torch.randn(1, 1, 3, 8)
    with pytest.raises(InvalidArgument, match=r"^v: got shape \(3, 8\); required: .*packed rows"):
        float8.quantised(x, x, x[0, 0])


def test_autocast_leaves_it_alone() -> None:
    """Its sums would be those of 16 bits."""
    q, k, v = _qkv()
    expected = float8.quantised(q, k, v, incoherent_qk=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = float8.quantised(q, k, v, incoherent_qk=True)
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one.float(), other.float(), "within autocast")


def test_compiled_equals_eager() -> None:
    torch._dynamo.reset()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = float8.quantised(q, k, v, incoherent_qk=True)
        return tilewise.attention(**found._asdict(), **TILED)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    given = _qkv()
    assert_same_bits(compiled(*given), call(*given), "out")


@pytest.mark.parametrize("width", [64, pytest.param(128, marks=pytest.mark.thorough),
                                   pytest.param(256, marks=pytest.mark.thorough)])  # fmt: skip
def test_the_table_of_the_page(width: int) -> None:
    """The error falls with outliers by what docs/gpu.md says, and stays without them."""
    told = {
        (entries, int(of)): (float(plain) / 100, float(spread) / 100, float(ratio))
        for entries, of, plain, spread, ratio in re.findall(
            r"^\| (normal|with outliers) \| (\d+) \| ([\d.]+)% \| ([\d.]+)% \| ([\d.]+) \|$",
            PAGE.read_text(),
            re.MULTILINE,
        )
    }
    assert {of for _, of in told} == set(float8_error.WIDTHS)
    for row in float8_error.measured((width,)):
        plain, spread, ratio = told[row.entries, width]
        assert abs(row.plain - plain) < 0.001
        assert abs(row.incoherent - spread) < 0.001
        assert abs(row.plain / row.incoherent - ratio) < 0.03
        assert ratio > (1.35 if row.entries == "with outliers" else 0.97)
