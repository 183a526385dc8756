"""Masks and scores that are Python functions: eager, compiled, planned, packed, in modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise import attention, masks, scores

B, H, M, N, D = 2, 4, 37, 53, 16


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(B, heads, length, D, dtype=dtype, generator=generator, requires_grad=True)
        for heads, length in ((H, M), (2, N), (2, N))
    )


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
        return attention(
            q,
            k,
            v,
            mask=lambda b, h, m, n: (self.document[m] == self.document[n]) | (n < 2),
            score=[
                lambda s, b, h, m, n: self.factor * s + self.table[h, n - m + M],
                scores.softcap(5.0),
            ],
        )


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


@pytest.mark.parametrize(
    "mask_of_size",
    [
        masks.window,
        masks.prefix,
        lambda size: lambda b, h, m, n: (m // size + n // size) % 2 == 0,
        lambda size: lambda b, h, m, n: m - n - size < 0,
    ],
    ids=["window", "prefix", "blocks", "distance"],
)
def test_a_changed_whole_number_is_not_a_stale_one(mask_of_size: Any) -> None:
    torch._dynamo.reset()
    q, k, v = operands(torch.float32)

    def attend(size: int) -> Tensor:
        return attention(q, k, v, mask=mask_of_size(size))

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for size in (8, 3, 5):  # from the second one on torch lets it vary
        assert torch.equal(compiled(size), attend(size))


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
    ours, layer.implementation = layer(x), "plain"
    torch.testing.assert_close(layer(x), ours, rtol=1e-5, atol=1e-6)


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
    assert "s * float(m + 1)" in said
