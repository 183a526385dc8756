"""compat.sdpa: torch's scaled_dot_product_attention, its numbers, shapes, gradients and errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.compat.extended import attend
from tests.contract import assert_exact
from tilewise.compat.sdpa import scaled_dot_product_attention
from tilewise.compat.sdpa_call import TORCH
from tilewise.errors import Unsupported

sdpa: Any = scaled_dot_product_attention
Shape = tuple[int, ...]


class Case(NamedTuple):
    """Shapes of query, key, value and attn_mask, and the other arguments."""

    q: Shape
    k: Shape
    v: Shape
    mask: Shape | None = None
    kind: str = "float"
    keywords: Any = MappingProxyType({})


def plain(*args: Any, **keywords: Any) -> Tensor:
    """Torch's plain path."""
    with sdpa_kernel(SDPBackend.MATH):
        return TORCH(*args, **keywords)


CASES = {
    "four": Case((2, 4, 33, 16), (2, 4, 70, 16), (2, 4, 70, 16)),
    "causal": Case((2, 3, 65, 8), (2, 3, 65, 8), (2, 3, 65, 8), keywords={"is_causal": True}),
    "causal-wide": Case((1, 2, 9, 8), (1, 2, 30, 8), (1, 2, 30, 8), keywords={"is_causal": True}),
    "causal-tall": Case((1, 2, 30, 8), (1, 2, 9, 8), (1, 2, 9, 8), keywords={"is_causal": True}),
    "scale": Case((1, 2, 9, 8), (1, 2, 30, 8), (1, 2, 30, 8), keywords={"scale": 0.7}),
    "negative-scale": Case((1, 2, 9, 8), (1, 2, 30, 8), (1, 2, 30, 8), keywords={"scale": -0.3}),
    "widths": Case((1, 2, 9, 8), (1, 2, 30, 8), (1, 2, 30, 5)),
    "gqa": Case((2, 6, 9, 8), (2, 2, 30, 8), (2, 2, 30, 8), keywords={"enable_gqa": True}),
    "gqa-apart": Case((2, 6, 9, 8), (2, 2, 30, 8), (2, 3, 30, 8), keywords={"enable_gqa": True}),
    "gqa-mask": Case(
        (2, 6, 9, 8),
        (1, 2, 30, 8),
        (2, 2, 30, 8),
        (2, 6, 9, 30),
        "bool",
        {"enable_gqa": True},
    ),
    "three": Case((6, 9, 8), (6, 30, 8), (6, 30, 7)),
    "three-mask": Case((6, 9, 8), (6, 30, 8), (6, 30, 8), (6, 9, 30)),
    "three-gqa": Case((6, 9, 8), (3, 30, 8), (3, 30, 8), keywords={"enable_gqa": True}),
    "two": Case((9, 8), (30, 8), (30, 4), (9, 30)),
    "five": Case((2, 3, 4, 9, 8), (2, 3, 4, 11, 8), (2, 3, 4, 11, 8)),
    "five-broadcast": Case((2, 1, 4, 9, 8), (1, 3, 4, 11, 8), (3, 1, 11, 8), (3, 1, 1, 11), "bool"),
    "five-mask": Case((2, 3, 4, 9, 8), (2, 3, 4, 11, 8), (2, 3, 4, 11, 8), (2, 1, 4, 9, 11)),
    "five-mask-one": Case((2, 3, 4, 9, 8), (2, 3, 4, 11, 8), (2, 3, 4, 11, 8), (1, 1, 4, 9, 1)),
    "batch-of-values": Case((1, 2, 9, 8), (1, 2, 11, 8), (3, 2, 11, 8)),
    "batch-of-keys": Case((1, 2, 9, 8), (3, 2, 11, 8), (1, 2, 11, 8), (3, 1, 9, 1)),
    "one-key-head": Case((2, 4, 9, 8), (2, 1, 11, 8), (2, 1, 11, 8)),
    "one-query-head": Case((2, 1, 9, 8), (2, 4, 11, 8), (2, 4, 11, 8)),
    "one-value-head": Case((2, 4, 9, 8), (2, 4, 11, 8), (2, 1, 11, 8)),
    "ranks": Case((9, 8), (2, 11, 8), (3, 2, 11, 8)),
    "bool": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (33, 70), "bool"),
    "padding": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (2, 1, 1, 70), "bool"),
    "float": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (33, 70)),
    "float-heads": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (3, 33, 70)),
    "float-keys": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (1, 70)),
    "float-one": Case((2, 3, 9, 8), (2, 3, 11, 8), (2, 3, 11, 8), (11,)),
    "float-none": Case((2, 3, 9, 8), (2, 3, 11, 8), (2, 3, 11, 8), ()),
    "float-inf": Case((2, 3, 33, 8), (2, 3, 70, 8), (2, 3, 70, 8), (2, 1, 33, 70), "inf"),
}


# Draws of a mask of one number, which are judged together. The gradients of scores sum to 0 in each
# row. So the mask's own is nothing but rounding, and in one draw torch's may be 0 by luck.
DRAWS = 16


def build(case: Case, dtype: torch.dtype, seed: int = 11) -> tuple[list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    draw: Callable[[Shape], Tensor] = lambda shape: torch.randn(  # noqa: E731
        shape, generator=generator, dtype=torch.float64
    )
    qkv = [draw(shape).to(dtype).requires_grad_() for shape in case[:3]]
    if case.mask is None:
        return qkv, None
    drawn = draw(case.mask)
    if case.kind == "bool":
        drawn = drawn > -0.7
        drawn[..., drawn.shape[-2] // 2, :] = False  # a row that sees nothing
        return qkv, drawn
    if case.kind == "inf":
        drawn = drawn.masked_fill(drawn < -0.7, -math.inf)
        if drawn.dim() > 1:
            drawn[..., drawn.shape[-2] // 2, :] = -math.inf
    return qkv, drawn.to(dtype).requires_grad_()


def outcome(
    function: Callable[..., Tensor], case: Case, qkv: list[Tensor], mask: Tensor | None
) -> list[Tensor]:
    """The output and the gradients of everything that wants one."""
    leaves = [x for x in (*qkv, mask) if x is not None and x.requires_grad]
    out = function(*qkv, attn_mask=mask, **case.keywords)
    # Where there is nothing to compute, torch's output may not depend on its inputs.
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, leaves)]
    grads = torch.autograd.grad(
        out, leaves, weights_of(out), allow_unused=True, materialize_grads=True
    )
    return [out, *grads]


def weights_of(out: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)


def compare(
    case: Case,
    *draws: tuple[list[Tensor], Tensor | None],
    reference: Callable[..., Tensor] = plain,
) -> None:
    """The exactness contract, against torch's plain path and extended precision."""
    same = [outcome(reference, case, *each) for each in draws]
    ours = [outcome(sdpa, case, *each) for each in draws]
    truth = [
        attend(*each, weights_of(got[0]), case.keywords)
        for each, got in zip(draws, ours, strict=True)
    ]
    for name, got, theirs, exact in zip(
        ("out", "query", "key", "value", "attn_mask"),
        *(zip(*each, strict=True) for each in (ours, same, truth)),
        strict=False,  # not every case has a mask that wants a gradient
    ):
        for one, other in zip(got, theirs, strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
        assert_exact(torch.stack(got), torch.stack(theirs), np.stack(exact), name)


def check(case: Case, dtype: torch.dtype) -> None:
    alone = case.mask is not None and math.prod(case.mask) == 1
    compare(case, *(build(case, dtype, 11 + i) for i in range(DRAWS if alone else 1)))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_torchs_numbers(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


@pytest.mark.parametrize("name", ["causal", "gqa-mask", "float-inf", "five-broadcast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_numbers_in_few_bits(name: str, dtype: torch.dtype) -> None:
    check(CASES[name], dtype)


def narrow(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor) -> Tensor:
    """Attention whose products are all of q's dtype; torch's plain path computes in float32."""
    scores = (q @ k.mT).float() / math.sqrt(q.shape[-1]) + attn_mask
    return scores.softmax(-1).to(q.dtype) @ v


def test_a_wide_mask_of_narrow_queries() -> None:
    qkv, mask = build(CASES["float"], torch.bfloat16)
    assert mask is not None
    mask = mask.detach().float().requires_grad_()
    assert sdpa(*qkv, mask).dtype == torch.bfloat16
    compare(CASES["float"], (qkv, mask), reference=narrow)


@st.composite
def drawn(draw: Any) -> Case:
    """Shapes that torch's plain path takes, sizes of 1 and 0 among them.

    Of tensors without elements torch does not broadcast the batch: then all have all of it.
    """
    empty = draw(st.booleans())
    small = st.integers(0 if empty else 1, 3)
    lead = [draw(small) for _ in range(draw(st.integers(0, 3)))]
    rows, keys, width, value_width = (draw(small) for _ in range(4))

    def part(of: list[int]) -> Shape:
        kept = of if empty else of[draw(st.integers(0, len(of))) :]
        return tuple(1 if not empty and draw(st.booleans()) else size for size in kept)

    q = (*part(lead), rows, width)
    k = (*part(lead), keys, width)
    v = (*part(lead), keys, value_width)
    if draw(st.booleans()):
        return Case(q, k, v, keywords={"is_causal": draw(st.booleans())})
    whole = torch.broadcast_shapes(q[:-2], k[:-2])
    mask = (*part(list(whole)), *part([rows, keys]))
    return Case(q, k, v, mask, "float" if empty else draw(st.sampled_from(["float", "inf"])))


@settings(max_examples=60)
@given(case=drawn())
def test_any_shapes(case: Case) -> None:
    check(case, torch.float64)


def test_dropout_is_repeated_by_the_seed_and_keeps_the_mean() -> None:
    q, k, v = (torch.randn(2, 3, 40, 8) for _ in range(3))
    ones = torch.ones_like(v)
    torch.manual_seed(3)
    first = sdpa(q, k, ones, dropout_p=0.25)
    second = sdpa(q, k, ones, dropout_p=0.25)
    torch.manual_seed(3)
    assert torch.equal(first, sdpa(q, k, ones, dropout_p=0.25))
    assert not torch.equal(first, second)
    assert abs(float(first.mean()) - 1) < 0.03
    assert float(first.std()) > 0.03
    q.requires_grad_()
    mask = torch.randn(40, 40, requires_grad=True)
    nothing = sdpa(q, k, v, mask, dropout_p=1.0)
    assert torch.equal(nothing, TORCH(q, k, v, mask, dropout_p=1.0))
    for grad in torch.autograd.grad(nothing.sum(), (q, mask)):
        assert not grad.any()


def test_nan_stands_where_torch_has_it() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 6, 8, generator=generator) for _ in range(3))
    for tensor, at in ((q, 1), (k, 2), (v, 5)):
        broken = tensor.clone()
        broken[0, 0, at, 3] = math.nan
        args = [broken if x is tensor else x for x in (q, k, v)]
        assert torch.equal(sdpa(*args).isnan(), plain(*args).isnan())
        if tensor is not k:  # torch's paths differ: the docstring says what is chosen
            mask = torch.ones(6, 6).tril().bool()
            for keywords in ({"is_causal": True}, {"attn_mask": mask}):
                got = sdpa(*args, **keywords)
                assert torch.equal(got.isnan(), plain(*args, **keywords).isnan())


def test_under_autocast() -> None:
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        assert sdpa(q, k.bfloat16(), v).dtype == torch.bfloat16
        assert sdpa(q, k, v, torch.zeros(6, 6).half()).dtype == torch.bfloat16
        wide_ones = sdpa(q.double(), k.double(), v.double())
        assert wide_ones.dtype == torch.float64


def test_compiled() -> None:
    case = CASES["five-broadcast"]
    qkv, mask = build(case, torch.float32)
    compiled = torch.compile(sdpa, fullgraph=True, backend="aot_eager")
    want = outcome(sdpa, case, qkv, mask)
    torch.testing.assert_close(outcome(compiled, case, qkv, mask), want)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


FOUR = zeros(1, 2, 3, 4)
MISTAKES: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "dtype": ((FOUR, FOUR.double(), FOUR), {}),
    "integers": ((FOUR.long(), FOUR.long(), FOUR.long()), {}),
    "booleans": ((FOUR.bool(), FOUR.bool(), FOUR.bool()), {}),
    "complex": ((FOUR.to(torch.complex64), FOUR.to(torch.complex64), FOUR.to(torch.complex64)), {}),
    "device": ((FOUR, FOUR.to("meta"), FOUR), {}),
    "rank": ((zeros(4), zeros(3, 4), zeros(3, 4)), {}),
    "width": ((FOUR, zeros(1, 2, 3, 5), FOUR), {}),
    "keys": ((FOUR, FOUR, zeros(1, 2, 5, 4)), {}),
    "batch": ((zeros(2, 2, 3, 4), zeros(3, 2, 3, 4), zeros(3, 2, 3, 4)), {}),
    "batch of value": ((FOUR, zeros(2, 2, 3, 4), zeros(3, 2, 3, 4)), {}),
    "heads": ((zeros(1, 4, 3, 4), FOUR, FOUR), {}),
    "groups": ((zeros(1, 3, 3, 4), FOUR, FOUR), {"enable_gqa": True}),
    "more key heads": ((FOUR, zeros(1, 4, 3, 4), zeros(1, 4, 3, 4)), {"enable_gqa": True}),
    "groups of two dimensions": ((zeros(3, 4),) * 3, {"enable_gqa": True}),
    "mask and causal": ((FOUR, FOUR, FOUR, zeros(3, 3)), {"is_causal": True}),
    "mask of doubles": ((FOUR, FOUR, FOUR, zeros(3, 3, dtype=torch.float64)), {}),
    "mask of integers": ((FOUR, FOUR, FOUR, zeros(3, 3, dtype=torch.int64)), {}),
    "mask of other keys": ((FOUR, FOUR, FOUR, zeros(3, 7)), {}),
    "bool mask of other keys": ((FOUR, FOUR, FOUR, zeros(3, 7, dtype=torch.bool)), {}),
    "mask of more batch": ((FOUR, FOUR, FOUR, zeros(5, 2, 3, 3)), {}),
    "mask of higher rank": ((FOUR, FOUR, FOUR, zeros(1, 1, 2, 3, 3)), {}),
    "dropout": ((FOUR, FOUR, FOUR), {"dropout_p": 1.5}),
    "no tensor": (("a", FOUR, FOUR), {}),
    "no mask": ((FOUR, FOUR, FOUR, 3), {}),
    "no scale": ((FOUR, FOUR, FOUR), {"scale": "x"}),
    "no rate": ((FOUR, FOUR, FOUR), {"dropout_p": "x"}),
    "no flag": ((FOUR, FOUR, FOUR), {"is_causal": "x"}),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_torchs_errors(name: str) -> None:
    args, keywords = MISTAKES[name]
    with pytest.raises(Exception) as theirs:  # noqa: PT011  whatever torch raises
        plain(*args, **keywords)
    with pytest.raises(theirs.type) as ours:
        sdpa(*args, **keywords)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("rate", [-1.0, math.nan])
def test_a_rate_below_zero(rate: float) -> None:
    """The error of torch's plain path, which a kernel of torch may hide behind another one."""
    with pytest.raises(RuntimeError, match="dropout probability has to be between 0 and 1"):
        sdpa(FOUR, FOUR, FOUR, dropout_p=rate)


def test_what_torch_computes_and_we_do_not() -> None:
    with pytest.raises(Unsupported, match="a scale that is not finite"):
        sdpa(FOUR, FOUR, FOUR, scale=math.inf)
    with pytest.raises(Unsupported, match="attn_mask on another device"):
        sdpa(FOUR, FOUR, FOUR, torch.zeros(3, 3, device="meta"))
    broad = zeros(1, 1, 2, 600)
    with pytest.raises(Unsupported, match="D = 600 is over its limit"):
        sdpa(broad, broad, broad)
