"""Norm and rotation of heads in one pass: exact on every instruction set, forward and backward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.conftest import ran
from tests.contract import assert_all_same_bits, assert_exact, assert_same_bits
from tests.kernels.targets import CPU_TARGETS, Target, forced
from tilewise import head_rows as module
from tilewise.errors import TilewiseError
from tilewise.head_rows import normed_and_turned
from tilewise.nn import Attention, DynamicNtkScaling, HeadNorm, Rotary, rotary

EPS = 1e-3
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def plain(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kind: str,
    interleaved: bool,
) -> Tensor:
    """The formulas in the dtype of ``x``."""
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    x = x if weight is None else x * weight.reshape(-1, 1, x.shape[-1])
    x = x if bias is None else x + bias.reshape(-1, 1, x.shape[-1])
    cos, sin = cos.to(x.dtype)[..., None, :, :], sin.to(x.dtype)[..., None, :, :]
    pairs = 2 * cos.shape[-1]
    places = torch.arange(pairs)
    order = places.view(-1, 2).T if interleaved else places.view(2, -1)
    one, two = x[..., order[0]], x[..., order[1]]
    out = x.clone()
    out[..., order[0]] = one * cos - two * sin
    out[..., order[1]] = two * cos + one * sin
    return out


def drawn(dtype: torch.dtype, width: int, rotated: int, *, heads: bool) -> list[Tensor]:
    """x in the layout of a joint projection, weight, bias, cosines and sines."""
    torch.manual_seed(3)
    x = torch.randn(2, 70, 3, 4, width).to(dtype)[:, :, 1].transpose(1, 2)
    shape = (4, width) if heads else (width,)
    weight, bias = (torch.randn(2, *shape) + 1).to(dtype).unbind()
    angles = torch.randn(2, 70, rotated // 2) * 9
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return [x, weight, bias, angles.to(wide).cos(), angles.to(wide).sin()]


def with_gradients(call: Callable[..., Tensor], operands: list[Tensor | None]) -> list[Tensor]:
    """The result, and the gradients of x and of the weights that are there."""
    leaves = [None if each is None else each.detach().requires_grad_() for each in operands[:3]]
    out = call(*leaves, *operands[3:])
    grad = torch.linspace(-1, 1, out.numel()).view(out.shape).sin().to(out.dtype)
    wanted = [each for each in leaves if each is not None]
    return [out.detach(), *torch.autograd.grad(out, wanted, grad)]


@pytest.mark.parametrize("target", CPU_TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kind", "width", "rotated", "interleaved", "weights"),
    [
        ("rms", 64, 64, False, "weight"),
        ("rms", 64, 64, True, "weight"),
        ("rms", 37, 10, False, "both of heads"),
        ("layer", 37, 22, True, "both"),
        ("layer", 80, 80, False, "both of heads"),
        ("layer", 5, 2, False, "bias"),
        ("rms", 24, 18, True, ""),
    ],
)
def test_results_and_gradients(
    target: Target,
    dtype: torch.dtype,
    kind: Any,
    width: int,
    rotated: int,
    interleaved: bool,
    weights: str,
) -> None:
    """By the 2x rule, in widths that are no multiple of a vector."""
    operands: list[Any] = list(drawn(dtype, width, rotated, heads="heads" in weights))
    operands[1] = operands[1] if weights.startswith(("weight", "both")) else None
    operands[2] = operands[2] if weights.startswith(("bias", "both")) else None

    def ours(x: Tensor, weight: Any, bias: Any, cos: Tensor, sin: Tensor) -> Tensor:
        return normed_and_turned(x, HeadNorm(weight, bias, EPS, kind), cos, sin, interleaved)

    def theirs(x: Tensor, weight: Any, bias: Any, cos: Tensor, sin: Tensor) -> Tensor:
        return plain(x, weight, bias, cos, sin, kind, interleaved)

    with forced(target):
        found = with_gradients(ours, operands)
    assert found[0].stride() == torch.empty_like(operands[0]).stride()
    in_dtype = with_gradients(theirs, operands)
    wide = [None if each is None else each.double() for each in operands]
    truth = with_gradients(theirs, wide)
    names = ("out", "grad of x", "grad of the first weight", "grad of the second")
    for name, *three in zip(names, found, in_dtype, truth, strict=False):
        assert_exact(three[0], three[1], three[2], name)


def test_threads_change_no_bit() -> None:
    """Sums for the weights are cut into tasks of as many rows, whoever takes them."""
    operands: list[Any] = list(drawn(torch.float32, 64, 64, heads=False))

    def ours(x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return normed_and_turned(x, HeadNorm(weight, bias), cos, sin)

    found = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found.append(with_gradients(ours, operands))
    assert_all_same_bits(found[0], found[1], "of 1 and 3 threads")


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch's own, in the rules of its operations
def test_it_is_the_core_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eager call does not take operations of torch; a transform does, with the same result."""
    x, weight, bias, cos, sin = drawn(torch.float64, 16, 16, heads=False)

    def call(x: Tensor) -> Tensor:
        return normed_and_turned(x, HeadNorm(weight, bias, kind="layer"), cos, sin, True)

    expected = call(x)
    torch.testing.assert_close(torch.func.vmap(call)(x[None])[0], expected)
    primal, tangent, *_ = torch.func.jvp(call, (x,), (torch.ones_like(x),))
    torch.testing.assert_close(primal, expected)
    assert tangent.abs().max() < 20

    def fail(*_: Any) -> Tensor:
        raise AssertionError("operations of torch")

    monkeypatch.setattr(module, "_by_torch", fail)
    call(x)


@pytest.mark.parametrize("weights", ["weight", "both", ""])
def test_compiled_code_runs_the_core_too(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a torch op in one graph, with the bits of the eager call, gradients too."""
    operands: list[Any] = list(drawn(torch.bfloat16, 24, 16, heads=True))
    operands[1] = operands[1] if weights else None
    operands[2] = operands[2] if weights == "both" else None

    def call(x: Tensor, weight: Any, bias: Any, cos: Tensor, sin: Tensor) -> Tensor:
        return normed_and_turned(x, HeadNorm(weight, bias), cos, sin)

    expected = with_gradients(call, operands)

    def fail(*_: Any) -> Tensor:
        raise AssertionError("operations of torch")

    monkeypatch.setattr(module, "_by_torch", fail)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_all_same_bits(with_gradients(compiled, operands), expected, "compiled")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's
def test_the_torch_op_keeps_torchs_rules() -> None:
    """Of a layout that is not dense, with and without weights."""
    x, weight, bias, cos, sin = drawn(torch.float64, 12, 8, heads=False)
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias)]
    op = torch.ops.tilewise.head_rows
    for some in (leaves, [leaves[0], None, None]):
        torch.library.opcheck(op, (*some, cos, sin, True, 1e-6, False))


def test_an_exported_layer_needs_no_layers_to_load(tmp_path: Path) -> None:
    """A program with the op, saved here, runs in a process that imports tilewise alone."""
    layer = Attention(16, 2, rotary=Rotary(8), qk_norm=True).eval()
    x = torch.randn(1, 5, 16)
    program = torch.export.export(layer, (x,))
    assert "tilewise.head_rows" in program.graph_module.code
    torch.export.save(program, tmp_path / "layer.pt2")
    torch.save((x, layer(x)), tmp_path / "both.pt")
    check = (
        "import sys, torch, tilewise\n"
        "x, expected = torch.load('both.pt')\n"
        "torch.testing.assert_close(torch.export.load('layer.pt2').module()(x), expected)\n"
        "assert 'tilewise.nn' not in sys.modules"
    )
    ran(sys.executable, "-c", check, cwd=tmp_path)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_first_and_second_derivatives(kind: Any) -> None:
    """Of x, weight and bias, against differences."""
    x, weight, bias, cos, sin = drawn(torch.float64, 6, 4, heads=True)
    leaves = tuple(each.detach().requires_grad_() for each in (x[:1, :, :3], weight, bias))

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return normed_and_turned(x, HeadNorm(weight, bias, kind=kind), cos[:1, :3], sin[:1, :3])

    assert torch.autograd.gradcheck(call, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, leaves)


def test_a_gradient_may_be_torchs_zeros_without_memory() -> None:
    """The derivative of torch.sgn."""
    x, weight, bias, cos, sin = drawn(torch.float32, 6, 4, heads=True)
    leaves = tuple(each.detach().requires_grad_() for each in (x, weight, bias))
    out = normed_and_turned(leaves[0], HeadNorm(leaves[1], leaves[2]), cos, sin)
    assert not any(each.any() for each in torch.autograd.grad(out.sgn().sum(), leaves))


def test_positions_have_gradients() -> None:
    """Floating positions are differentiated, as they are without the core."""
    x = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    positions = torch.tensor([0.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda at: rotary(x, at), positions)


def test_positions_on_several_axes() -> None:
    """M-RoPE: each pair turns by the position on its own axis."""
    x = torch.randn(2, 3, 7, 12, dtype=torch.float64)
    positions = torch.randint(0, 90, (3, 2, 7))
    axes = [0, 0, 1, 2, 2, 1]
    found = rotary(x, positions, axes=axes)
    for pair, axis in enumerate(axes):
        alone = rotary(x, positions[axis])
        channels = [pair, pair + 6]
        torch.testing.assert_close(found[..., channels], alone[..., channels])
    text = torch.arange(7).expand(3, 7)
    torch.testing.assert_close(rotary(x, text, axes=axes), rotary(x, torch.arange(7)))


def test_a_layer_takes_axes_and_pairs() -> None:
    """For text, positions are the same on all axes; they are made where none are given."""
    torch.manual_seed(0)
    several = Attention(16, 2, qk_norm=True, rotary=Rotary(axes=(0, 1, 2, 2), interleaved=True))
    one = Attention(16, 2, qk_norm=True, rotary=Rotary(interleaved=True))
    one.load_state_dict(several.state_dict())
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(several(x), one(x))


def test_a_layer_normalises_and_turns_at_once() -> None:
    """In the core; by its modules where these have hooks or are others by now."""
    torch.manual_seed(0)
    layer = Attention(32, 2, qk_norm=True, rotary=Rotary())
    assert layer.query_norm is not None
    torch.nn.init.uniform_(layer.query_norm.weight, 0.5, 2)
    x = torch.randn(2, 9, 32)
    # Without acc_events torch 2.12 warns that it forgets what came before.
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        at_once = layer(x)
    assert not [each.key for each in profile.key_averages() if "rms_norm" in each.key]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x), at_once, "compiled")
    seen = []
    handle = layer.query_norm.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(layer(x), at_once)
    assert seen
    handle.remove()
    handle = layer.query_norm.register_full_backward_hook(lambda *_: seen.clear())
    layer(x).sum().backward()
    assert not seen
    handle.remove()

    class Doubled(torch.nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    other = Doubled(16, eps=1e-6)
    other.weight.data.copy_(layer.query_norm.weight / 2)
    layer.query_norm = other
    torch.testing.assert_close(layer(x), at_once)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("norm.kind.*'rms' or 'layer'", lambda x: HeadNorm(kind="batch").check(x)),  # type: ignore[arg-type]
        ("norm.eps.*0 or more", lambda x: HeadNorm(eps=-1.0).check(x)),
        (r"norm.weight.*\[8\] or \[3, 8\]", lambda x: HeadNorm(torch.ones(4)).check(x)),
        (
            r"norm.bias.*shape \[3, 8\]",
            lambda x: HeadNorm(torch.ones(8), torch.ones(3, 8)).check(x),
        ),
        ("axes.*4 numbers from 0 to 2", lambda x: rotary(x, torch.zeros(3, 5), axes=[0, 1, 2, 3])),
        ("axes.*4 numbers", lambda x: rotary(x, torch.zeros(3, 5), axes=[0, 1, 2])),
        (r"positions.*\[A, S\]", lambda x: rotary(x, torch.arange(5), axes=[0, 0, 0, 0])),
        (
            "scaling.*beside axes",
            lambda x: rotary(
                x, torch.zeros(1, 5), axes=[0] * 4, scaling=DynamicNtkScaling(2.0, 512)
            ),
        ),
    ],
)
def test_what_is_refused(message: str, call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(TilewiseError, match=message):
        call(torch.randn(2, 3, 5, 8))
