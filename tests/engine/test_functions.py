"""Masks and scores that are Python functions: eager, compiled, planned, packed, in modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise import attention, attention_varlen, masks, scores
from tilewise.errors import Unsupported

B, H, M, N, D = 2, 4, 37, 53, 16


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(B, heads, length, D, dtype=dtype, generator=generator, requires_grad=True)
        for heads, length in ((H, M), (2, N), (2, N))
    )


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any] | None, score: Callable[..., Any]
) -> Tensor:
    """The same formula in plain torch, the function called with tensors of positions."""
    b, h, m, n = (
        torch.arange(size).view([-1 if at == dim else 1 for at in range(4)])
        for dim, size in enumerate((B, H, M, N))
    )
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    s = score(q @ k.transpose(-1, -2) / math.sqrt(D), b, h, m, n)
    if mask is not None:
        s = s.masked_fill(~mask(b, h, m, n), -math.inf)
    out: Tensor = torch.softmax(s, -1) @ v
    return out


def test_a_learned_table_gets_its_gradient() -> None:
    q, k, v = operands()
    table = torch.randn(H, M + N, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(H, dtype=torch.float64, requires_grad=True)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + table[h, n - m + M] - slopes[h] * abs(m - n)

    def mask(b: Any, h: Any, m: Any, n: Any) -> Any:
        return (m + n) % 3 != 0

    out = attention(q, k, v, mask=mask, score=score)
    expected = by_hand(q, k, v, mask, score)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    weights = torch.randn_like(out)
    inputs = (q, k, v, table, slopes)
    found = torch.autograd.grad(out, inputs, weights)
    for mine, theirs in zip(found, torch.autograd.grad(expected, inputs, weights), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)


def test_a_fresh_function_with_the_same_meaning_has_the_same_plan() -> None:
    q, k, v = operands()

    def planned(width: int) -> tilewise.Plan:
        return tilewise.plan(q, k, v, mask=lambda b, h, m, n: (m - n) % width == 0)

    assert planned(3).problem == planned(3).problem
    assert planned(3).problem != planned(4).problem
    held = planned(3)
    out = attention(q, k, v, mask=lambda b, h, m, n: (m - n) % 3 == 0, plan=held)
    assert torch.equal(out, attention(q, k, v, mask=lambda b, h, m, n: (m - n) % 3 == 0))
    with pytest.raises(tilewise.errors.InvalidArgument, match="plan"):
        attention(q, k, v, mask=lambda b, h, m, n: (m - n) % 4 == 0, plan=held)


class Model(nn.Module):
    """Attends with functions that read a parameter, a buffer and a number of its own."""

    table: Tensor
    document: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(H, M + N))
        self.register_buffer("document", torch.arange(max(M, N)) // 9)
        self.factor = 1.5

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attention(
            q,
            k,
            v,
            mask=lambda b, h, m, n: (self.document[m] == self.document[n]) | (n < 2),
            score=[
                lambda s, b, h, m, n: self.factor * s + self.table[h, n - m + M],
                scores.softcap(5.0),
            ],
        )
        return out


@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=pytest.mark.slow), True])
def test_functions_train_under_torch_compile(dynamic: bool | None) -> None:
    torch._dynamo.reset()
    q, k, v = operands(torch.float32)
    model = Model()
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for factor in (1.5, 2.5):  # a changed number is not a stale one
        model.factor = factor
        expected, out = model(q, k, v), compiled(q, k, v)
        assert torch.equal(out, expected)
        inputs = (q, k, v, model.table)
        weights = torch.randn_like(out)
        mine = torch.autograd.grad(out, inputs, weights)
        for one, other in zip(mine, torch.autograd.grad(expected, inputs, weights), strict=True):
            assert torch.equal(one, other)


def test_a_module_reads_its_function_anew_in_every_call() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slope = nn.Parameter(torch.tensor(0.5))

        def forward(self, s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
            return s - self.slope * abs(m - n)

    torch.manual_seed(0)
    layer = tilewise.nn.Attention(32, 4, mask=lambda b, h, m, n: n <= m, score=Penalty())
    assert "score.slope" in dict(layer.named_parameters())
    x = torch.randn(2, 9, 32)
    before = layer(x)
    before.sum().backward()
    slope = layer.get_parameter("score.slope")
    assert slope.grad is not None
    assert slope.grad != 0
    with torch.no_grad():
        slope.fill_(2.0)
    assert not torch.equal(layer(x), before)
    layer.implementation = "plain"
    torch.testing.assert_close(layer(x), by_plain(layer, x), rtol=1e-5, atol=1e-6)


def by_plain(layer: tilewise.nn.Attention, x: Tensor) -> Tensor:
    layer.implementation = "tilewise"
    out: Tensor = layer(x)
    return out


def test_packed_sequences_count_within_themselves() -> None:
    q = torch.randn(11, 2, D, dtype=torch.float64)
    starts = torch.tensor([0, 4, 4, 11])
    factors = torch.tensor([1.0, 5.0, -2.0], dtype=torch.float64)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s * factors[b] + (m - n) * (h + 1) / n.length

    out = attention_varlen(q, q, q, starts, starts, mask=masks.causal(), score=score)
    for index, (begin, end) in enumerate(((0, 4), (4, 4), (4, 11))):
        if begin == end:
            continue
        one = q[begin:end].transpose(0, 1)[None]
        alone = attention(
            one,
            one,
            one,
            mask=masks.causal(),
            score=lambda s, b, h, m, n, i=index: (
                s * float(factors[i]) + (m - n) * (h + 1) / n.length
            ),
        )
        torch.testing.assert_close(out[begin:end].transpose(0, 1)[None], alone)


def test_autocast_and_half_precision_read_the_same_table() -> None:
    q, k, v = operands(torch.float32)
    table = torch.randn(H, M + N, requires_grad=True)

    def score(s: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
        return s + table[h, n - m + M]

    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, score=score)
    assert out.dtype is torch.bfloat16
    (grad,) = torch.autograd.grad(out.float().square().sum(), table)
    (exact,) = torch.autograd.grad(attention(q, k, v, score=score).square().sum(), table)
    assert grad.dtype is torch.float32
    assert (grad - exact).norm() < 0.02 * exact.norm()


def test_what_explains_a_plan_shows_the_function() -> None:
    q, k, v = operands()
    said = str(tilewise.explain(q, k, v, score=lambda s, b, h, m, n: s * (m + 1)))
    assert "expr{s;m;const_int:1;add(1,2);to_float(3);mul(0,4)}" in said


def test_sdpa_has_no_score_functions() -> None:
    layer = tilewise.nn.Attention(8, 2, score=lambda s, b, h, m, n: s * 2, implementation="sdpa")
    with pytest.raises(Unsupported, match="score function"):
        layer(torch.randn(1, 3, 8))
