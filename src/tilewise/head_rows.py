"""Heads on their way into attention: rows normalised over their channels, then turned by angles.

Plain code goes over queries and keys some ten times, and makes float32 copies of rows in 16 bits.
The compiled core goes over them once. It takes calls on a CPU, in eager code at once and under
torch.compile as the torch op ``tilewise::head_rows``. All others (GPUs, torch.func transforms,
tensor subclasses, angles with a gradient, batched and second derivatives) take operations of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from tilewise.checks import FLOATING, check_tensor
from tilewise.engine.modes import readable
from tilewise.engine.ops import define, schema
from tilewise.engine.run import road
from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu import DTYPES, absence
from tilewise.kernels.cpu.rows import HeadRows, backward, forward, like
from tilewise.torch_private import FakeTensor, constant_while_compiling, has_batch

_BY_OP = frozenset((Tensor, Parameter, FakeTensor))  # what a torch op takes on any road


class HeadNorm(NamedTuple):
    """How the D channels of each head are normalised before they are rotated.

    With mean and mean square over the channels of a row, ``"rms"`` (RMSNorm) and ``"layer"``
    (LayerNorm) are::

        rms:    weight * x / sqrt(mean(x^2) + eps) + bias
        layer:  weight * (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) + bias

    Computed in float32 (float64 for float64), and rounded once, after the rotation.

    Args:
        weight: floating [D], or [H, D] with one row a head; None for 1.
        bias: of the same shapes; of weight's where both are given. None for 0.
        eps: 0 or more.
        kind: ``"rms"`` or ``"layer"``.

    Sources: Zhang and Sennrich, Root Mean Square Layer Normalization (2019); Ba et al., Layer
    Normalization (2016); of queries and keys: Henry et al. (2020).
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-6
    kind: Literal["rms", "layer"] = "rms"

    def check(self, x: Tensor) -> None:
        """Raise InvalidArgument or InvalidType where this is no norm for x [B, H, S, D]."""
        if self.kind not in ("rms", "layer"):
            raise InvalidArgument("norm.kind", repr(self.kind), "'rms' or 'layer'")
        if not 0 <= self.eps < float("inf"):
            raise InvalidArgument("norm.eps", str(self.eps), "a finite number, 0 or more")
        shapes: tuple[tuple[int, ...], ...] = ((x.shape[-1],), (x.shape[1], x.shape[-1]))
        for name, tensor in (("norm.weight", self.weight), ("norm.bias", self.bias)):
            if tensor is None:
                continue
            sizes = " or ".join(str(list(each)) for each in shapes)
            required = f"a floating tensor {sizes} on {x.device}"
            check_tensor(name, tensor, required, FLOATING, device=x.device.type)
            if tuple(tensor.shape) not in shapes:
                raise InvalidArgument(name, f"shape {list(tensor.shape)}", required)
            shapes = (tuple(tensor.shape),)  # of the other one


def normed_and_turned(
    x: Tensor, norm: HeadNorm, cos: Tensor, sin: Tensor, interleaved: bool = False
) -> Tensor:
    """Normalise heads, [B, H, S, D], and turn the first R of their channels by pairs.

    Pairs are the halves of these R channels; interleaved, those with even and with odd numbers.

    Args:
        x: the heads.
        norm: of their rows.
        cos: [S, R/2] or [B, S, R/2], in float32 or float64, as ``sin``: the arithmetic's dtype.
        sin: of the same shape.
        interleaved: which channels are pairs.
    """
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    weight, bias = norm.weight, norm.bias
    of = HeadRows(x, weight, bias, cos, sin, norm.kind == "layer", norm.eps, interleaved)
    tensors = (x, x if weight is None else weight, x if bias is None else bias)
    way = road(*tensors)
    if (
        x.device.type != "cpu"
        or x.dtype not in DTYPES
        or way not in ("eager", "watched")
        or (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        or (way == "watched" and not _BY_OP.issuperset(map(type, tensors)))
        or not _core_is_there()
    ):
        return _by_torch(of)
    out: Tensor
    out = _InCore.apply(*of) if way == "eager" else torch.ops.tilewise.head_rows(*of)  # type: ignore[no-untyped-call]
    return out


@constant_while_compiling
def _core_is_there() -> bool:
    return absence() is None


def turned_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Turn the first R channels of rows, [..., D], by angles, [..., R/2], with operations of torch.

    The result has the dtype of ``x``.
    """
    dim = 2 * cos.shape[-1]
    wide = x[..., :dim].to(cos.dtype)
    if interleaved:
        one, two = wide[..., 0::2], wide[..., 1::2]
    else:
        one, two = wide[..., : dim // 2], wide[..., dim // 2 :]
    pair = (one * cos - two * sin, two * cos + one * sin)
    both = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat([both.to(x.dtype), x[..., dim:]], dim=-1)


def _by_torch(of: HeadRows) -> Tensor:
    wide = of.cos.dtype
    rows = of.x.to(wide)
    if of.centred:
        rows = rows - rows.mean(-1, keepdim=True)
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + of.eps)
    if of.weight is not None:
        rows = rows * of.weight.to(wide).unsqueeze(-2)
    if of.bias is not None:
        rows = rows + of.bias.to(wide).unsqueeze(-2)
    return turned_pairs(rows, of.cos[:, None], of.sin[:, None], of.interleaved).to(of.x.dtype)


class _InCore(torch.autograd.Function):
    """The rows by the core; its arguments are those of ``HeadRows``."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        of = HeadRows(*given)
        ctx.save_for_backward(*of[:5])
        ctx.how = of[5:]
        return forward(of)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        of = HeadRows(*ctx.saved_tensors, *ctx.how)
        return _gradients(of, grad, ctx.needs_input_grad, _by_core)


def _gradients(
    of: HeadRows,
    grad: Tensor,
    needs: Sequence[bool],
    by_core: Callable[[HeadRows, Tensor], Sequence[Tensor | None]],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of all that ``of`` holds, as far as they are needed."""
    wanted, rest = needs[:3], (None,) * (len(of) - 3)
    again = torch.is_grad_enabled()
    if not again and not has_batch(grad):
        pairs = zip(by_core(of, grad), wanted, strict=True)
        return (*(each if this else None for each, this in pairs), *rest)
    # A derivative of the gradients is wanted, or many of them at once: torch has both.
    leaves = [x for x, this in zip(of[:3], wanted, strict=True) if x is not None and this]
    with torch.enable_grad():
        rows = _by_torch(of)
    derived = iter(torch.autograd.grad(rows, leaves, grad, create_graph=again))
    return (*(next(derived) if this else None for this in wanted), *rest)


def _op(*given: Any) -> Tensor:
    return forward(HeadRows(*given))


def _op_fake(x: Tensor, *_: Any) -> Tensor:
    return like(x)


class _Grad(NamedTuple):
    """The backward op's other arguments."""

    grad: Tensor


def _backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias; empty ones of what is not there."""
    by_x, *others = backward(HeadRows(*given[:-1]), given[-1])
    by_weight, by_bias = (by_x.new_empty(0) if each is None else each for each in others)
    return by_x, by_weight, by_bias


def _backward_fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    by_weight, by_bias = (
        x.new_empty(0) if each is None else torch.empty_like(each) for each in (weight, bias)
    )
    return like(x), by_weight, by_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.how = inputs[5:]


def _op_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    of = HeadRows(*ctx.saved_tensors, *ctx.how)
    return _gradients(of, grad, ctx.needs_input_grad, _by_op)


def _by_core(of: HeadRows, grad: Tensor) -> Sequence[Tensor | None]:
    return backward(of, readable(grad))


def _by_op(of: HeadRows, grad: Tensor) -> Sequence[Tensor]:
    found: Sequence[Tensor] = torch.ops.tilewise.head_rows_backward(*of, grad)
    return found


_GRADIENTS = schema("(Tensor, Tensor, Tensor)", HeadRows, _Grad)
define("head_rows", _op, _op_fake, schema("Tensor", HeadRows), backward=_op_backward, save=_save)
define("head_rows_backward", _backward, _backward_fake, _GRADIENTS)
