"""Masks and scores that are Python functions: eager, compiled, planned, packed, in modules."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import tilewise
from tests.engine.samples import qkv
from tilewise import attention, masks, scores
from tilewise.engine.call import build_operands, build_problem, draw_seed, read_keywords, read_seed
from tilewise.errors import InvalidArgument, TilewiseError, Unsupported
from tilewise.problem import Operands, Problem
from tilewise.reference.philox import keep_mask
from tilewise.validation import dense_problem
from tilewise.variants.outside import checked

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


# ---- The eager autograd: which gradients there are, in which shapes, and which are refused.


@pytest.mark.parametrize("shape", [(7,), (5, 1), (4, 1, 7), (2, 1, 5, 7), (1, 4, 1, 1), ()])
def test_a_bias_gets_its_gradient_in_its_own_shape(shape: tuple[int, ...], backend: str) -> None:
    q, k, v = qkv(dtype=torch.float64)
    bias = torch.linspace(-1, 1, 280, dtype=torch.float64)[: torch.Size(shape).numel()]
    bias = bias.reshape(shape).requires_grad_()

    def call(bias: Tensor) -> Any:
        return tilewise.attention(q, k, v, score=scores.bias(bias), backend=backend).sin()

    assert torch.autograd.gradcheck(call, (bias,), fast_mode=True)


@pytest.mark.parametrize("wanted", range(3))
def test_one_input_may_want_its_gradient_alone(wanted: int, backend: str) -> None:
    everything = qkv()
    expected = torch.autograd.grad(
        tilewise.attention(*everything, backend=backend).sum(), everything
    )[wanted]
    alone = qkv(grad=False)
    alone[wanted].requires_grad_()
    out = tilewise.attention(*alone, backend=backend)
    out.sum().backward()
    assert [tensor.grad is not None for tensor in alone] == [i == wanted for i in range(3)]
    torch.testing.assert_close(alone[wanted].grad, expected)


def test_only_sinks_may_want_a_gradient(backend: str) -> None:
    sinks = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    tilewise.attention(*qkv(False), sinks=sinks, backend=backend).sum().backward()
    assert sinks.grad is not None
    assert (sinks.grad.shape, sinks.grad.dtype) == ((4,), torch.bfloat16)


def test_one_tensor_as_q_k_and_v_collects_all_three(backend: str) -> None:
    x = qkv()[0]
    twins = [x.detach().clone().requires_grad_() for _ in range(3)]
    tilewise.attention(x, x, x, backend=backend).sum().backward()
    tilewise.attention(*twins, backend=backend).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, sum(twin.grad for twin in twins))


def test_which_statistics_have_a_gradient(backend: str) -> None:
    result = tilewise.attention(*qkv(), return_stats="top1", backend=backend)
    assert result.lse is None
    assert [x.requires_grad for x in result.stats] == [False, True, True, False]


def test_the_second_derivative_of_the_entropy_is_refused(backend: str) -> None:
    q, k, v = qkv()
    stats = tilewise.attention(q, k, v, return_stats=True, backend=backend).stats
    with pytest.raises(Unsupported, match="no second derivative and no batched gradient"):
        torch.autograd.grad(stats.entropy.sum(), q, create_graph=True)


def test_changing_an_input_in_place_is_noticed(backend: str) -> None:
    q, k, v = qkv()
    doubled = k * 2
    out = tilewise.attention(q, doubled, v, backend=backend)
    doubled.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_without_gradients_no_graph_is_built(backend: str) -> None:
    with torch.no_grad():
        assert not tilewise.attention(*qkv(), backend=backend).requires_grad
    assert not tilewise.attention(*qkv(False), backend=backend).requires_grad


def test_the_sign_flag_of_a_conjugate_is_seen(backend: str) -> None:
    q, k, v = qkv(False)
    flagged = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert flagged.is_neg()
    out = tilewise.attention(flagged, k, v, backend=backend)
    assert torch.equal(out, tilewise.attention(q, k, v, backend=backend))


def test_gradients_that_are_expanded_or_transposed_are_read_right(backend: str) -> None:
    q, k, v = qkv()
    out = tilewise.attention(q, k, v, backend=backend)
    weights = torch.randn(out.transpose(2, 3).shape).transpose(2, 3)
    for grad in (torch.ones(()).expand(out.shape), weights):
        found = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        wanted = torch.autograd.grad(out, (q, k, v), grad.contiguous(), retain_graph=True)
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_may_be_torchs_zeros_without_memory(again: bool, backend: str) -> None:
    """The derivative of torch.sgn; also where the gradients have derivatives too."""
    leaves = qkv()
    out, lse, stats = tilewise.attention(
        *leaves, return_lse=True, return_stats=not again, backend=backend
    )
    for x in (out, lse) if again else (out, lse, stats.entropy):
        found = torch.autograd.grad(x.sgn().sum(), leaves, retain_graph=True, create_graph=again)
        assert not any(grad.any() for grad in found)
    transformed = torch.func.grad(lambda q: attention(q, *leaves[1:], backend=backend).sgn().sum())
    assert not transformed(leaves[0]).any()


@pytest.mark.parametrize("again", [False, True])
def test_a_gradient_that_wraps_others_is_refused(again: bool, backend: str) -> None:
    """It has no memory that a kernel could read."""
    leaves = qkv()
    out = tilewise.attention(*leaves, backend=backend)
    loss = (out * TwoTensor(torch.ones_like(out), torch.ones_like(out))).sum()
    with pytest.raises(Unsupported, match="gradient of an eager call from a TwoTensor"):
        torch.autograd.grad(loss, leaves, create_graph=again)


@pytest.mark.parametrize("name", ["bias", "slopes", "mask", "sinks"])
def test_a_captured_tensor_may_wrap_others(name: str, backend: str) -> None:
    """The torch op reaches what is inside."""

    def two(x: Tensor) -> Tensor:
        return TwoTensor(x, x)

    every: dict[str, dict[str, Any]] = {
        "bias": {"score": scores.bias(two(torch.rand(5, 7)))},
        "slopes": {"score": scores.alibi(two(torch.rand(4)))},
        "mask": {"mask": two(torch.rand(5, 7) < 0.5)},
        "sinks": {"sinks": two(torch.zeros(4))},
    }
    assert isinstance(attention(*qkv(False), backend=backend, **every[name]), TwoTensor)


@pytest.mark.parametrize("what", ["function", "bias"])
def test_a_sparse_tensor_is_refused(what: str, backend: str) -> None:
    q, k, v = qkv(grad=False)
    table = torch.ones(k.shape[2]).to_sparse()
    scored: dict[str, Any] = {
        "function": lambda: lambda s, b, h, m, n: s * table[n],
        "bias": lambda: scores.bias(table),
    }
    with pytest.raises(InvalidArgument, match=r"torch.sparse_coo; .*to_dense"):
        tilewise.attention(q, k, v, score=scored[what](), backend=backend)


def test_another_default_device_changes_nothing(backend: str) -> None:
    """The tensors that the backend makes lie with those of the call."""
    leaves = [x.detach()[:, :, 1:].requires_grad_() for x in qkv()]  # sizes of no other test

    def call() -> tuple[Tensor, ...]:
        out, _, stats = attention(*leaves, return_stats=True, backend=backend)
        return (out, *torch.autograd.grad(out.sum() + stats.entropy.sum(), leaves))

    with torch.device("meta"):  # first: what a plan keeps may not lie there
        found = call()
    for x, wanted in zip(found, call(), strict=True):
        assert torch.equal(x, wanted)


# ---- What stays on its device, unread on the way to a kernel: lengths, captured tensors, seeds.


def _packed(device: str, dtype: torch.dtype = torch.int32) -> tuple[Tensor, ...]:
    q, k, v = (torch.empty(9, 2, 4, device=device) for _ in range(3))
    cu = torch.tensor([0, 4, 9], dtype=dtype).to(device)
    return q, k, v, cu


def _operands(device: str, **keywords: Any) -> Operands:
    q, k, v, cu = _packed(device)
    mask = masks.document(torch.zeros(2, 5, dtype=torch.int64, device=device)) & masks.lengths(
        torch.tensor([1, 2]).to(device)
    )
    score = scores.bias(torch.zeros(5, 5, device=device))
    backend = keywords.get("backend")
    read = read_keywords(mask, score, None, 0.0, None, backend, (cu, cu))
    return build_operands(build_problem(q, k, v, read), q, k, v, read, None)


def test_cu_seqlens_of_a_device_stay_there_unread() -> None:
    """Meta tensors have no values: reading one would fail."""
    operands = _operands("meta")
    for cu in (operands.cu_seqlens_q, operands.cu_seqlens_k):
        assert cu is not None
        assert (cu.device.type, cu.dtype, cu.shape) == ("meta", torch.int64, (3,))
    assert [tensor.device.type for tensor in operands.mask_tensors] == ["meta"] * 3


def test_the_reference_reads_them() -> None:
    """It needs them on the CPU, wherever the tensors are."""
    with pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta", backend="tiled")


def test_checked_mode_reads_them() -> None:
    """What is asked for is done: cu_seqlens that are wrong are named."""
    with checked(), pytest.raises((RuntimeError, NotImplementedError)):
        _operands("meta")


def test_on_the_cpu_they_are_checked_as_ever() -> None:
    """A wrong end is an error."""
    q, k, v, cu = _packed("cpu")
    read = read_keywords(None, None, None, 0.0, None, "gpu", (cu, cu - 1))
    problem = build_problem(q, k, v, read)
    with pytest.raises(InvalidArgument, match="cu_seqlens_k"):
        build_operands(problem, q, k, v, read, None)
    assert issubclass(InvalidArgument, TilewiseError)


META, CPU = torch.device("meta"), torch.device("cpu")


def _problem(**changed: object) -> Problem:
    q = torch.empty(1, 2, 8, 64)
    problem = dense_problem(q, q, q, mask=(), score=(), scale=None, dropout_p=0.5, sinks=None)
    return problem._replace(**changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "seed", [None, 5, 2**64 - 1, torch.empty((), dtype=torch.int64, device=META)]
)
def test_a_device_keeps_its_seed(seed: int | torch.Tensor | None) -> None:
    """A meta tensor raises where its value is read."""
    got = read_seed(seed, _problem(device="cuda:0"), META, on_device=True)
    assert isinstance(got, torch.Tensor)
    assert (got.device, got.dtype, got.shape) == (META, torch.int64, ())
    assert got is not seed


def test_the_core_gets_a_number_from_the_generator_of_the_cpu() -> None:
    torch.manual_seed(2)
    due = int(torch.randint(0, 2**63 - 1, ()))
    torch.manual_seed(2)
    assert read_seed(None, _problem(), CPU, on_device=False) == due
    assert read_seed(torch.tensor([-1]), _problem(), CPU, on_device=False) == 2**64 - 1
    assert draw_seed(META).device == META


def test_a_tensor_of_the_host_is_refused_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its value would be part of the graph, and every replay would drop the same pairs."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    words = "seed: got a tensor on cpu while a CUDA graph is captured"
    with pytest.raises(InvalidArgument, match=re.escape(words)):
        read_seed(
            torch.tensor(5), _problem(device="cuda:0"), torch.device("cuda:0"), on_device=True
        )


@pytest.mark.parametrize("seed", [0, 5, 2**64 - 3, -(2**63)])
def test_a_tensor_of_a_seed_drops_what_its_number_drops(seed: int) -> None:
    ranges = {"batches": range(2), "heads": range(3), "queries": range(4), "keys": range(3, 40)}
    signed = torch.tensor(seed - 2**64 if seed >= 2**63 else seed)
    assert torch.equal(keep_mask(signed, 0.3, **ranges), keep_mask(seed, 0.3, **ranges))
    on_device = keep_mask(signed.to(META), 0.3, **ranges)
    assert on_device.device == META
