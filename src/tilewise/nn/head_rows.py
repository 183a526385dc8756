"""Heads on their way into attention: rows normalised over their channels, then turned by angles.

Plain code goes over queries and keys some ten times, and makes float32 copies of rows in 16 bits.
The compiled core goes over them once. It takes eager calls on a CPU; all others (GPUs,
torch.compile, torch.func transforms, angles with a gradient, second derivatives) take operations
of torch, which a compiler fuses.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor
from tilewise.engine.run import road
from tilewise.errors import InvalidArgument
from tilewise.kernels.cpu.core import absence
from tilewise.kernels.cpu.cross_entropy import DTYPES
from tilewise.kernels.cpu.head_rows import head_rows


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
        """Raise InvalidArgument or InvalidType where this is no norm for heads [B, H, S, D]."""
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


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, norm: HeadNorm | None = None
) -> Tensor:
    """Normalise heads, [B, H, S, D], and turn the first R of their channels by pairs.

    Pairs are the halves of these R channels; interleaved, those with even and with odd numbers.

    Args:
        x: the heads.
        cos: [S, R/2] or [B, S, R/2], in float32 or float64, as ``sin``: the arithmetic's dtype.
        sin: of the same shape.
        interleaved: which channels are pairs.
        norm: None for none.
    """
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    how = _How(None if norm is None else norm.kind, 0.0 if norm is None else norm.eps, interleaved)
    in_core = (
        x.device.type == "cpu"
        and x.dtype in DTYPES
        and road(x, x if weight is None else weight, x if bias is None else bias) == "eager"
        and not (torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad))
        and absence() is None
    )
    if in_core:
        return _HeadRows.apply(x, weight, bias, cos, sin, how)  # type: ignore[no-any-return, no-untyped-call]
    return _by_torch(x, weight, bias, cos, sin, how)


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


class _How(NamedTuple):
    """What is done to the rows, beside the tensors."""

    kind: str | None  # of the norm
    eps: float
    interleaved: bool


def _by_torch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, cos: Tensor, sin: Tensor, how: _How
) -> Tensor:
    rows = x
    if how.kind is not None:
        rows = x.to(cos.dtype)
        if how.kind == "layer":
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + how.eps)
        if weight is not None:
            rows = rows * weight.to(cos.dtype).unsqueeze(-2)
        if bias is not None:
            rows = rows + bias.to(cos.dtype).unsqueeze(-2)
    return turned_pairs(rows, cos[:, None], sin[:, None], how.interleaved).to(x.dtype)


class _HeadRows(torch.autograd.Function):
    """The rows by the core."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        how: _How,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, bias, cos, sin)
        ctx.how = how
        return _run(x, None, weight, bias, cos, sin, how)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, cos, sin = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # a derivative of the gradients is wanted: torch has one
            again = _by_torch(x, weight, bias, cos, sin, ctx.how)
            leaves = [each for each, this in zip((x, weight, bias), wanted, strict=True) if this]
            found = iter(torch.autograd.grad(again, leaves, grad, create_graph=True))
            return (*(next(found) if this else None for this in wanted), None, None, None)
        of_weight = of_bias = None
        if wanted[1] or wanted[2]:
            shape = _of_heads(weight if weight is not None else bias).shape
            of_weight, of_bias = torch.zeros(2, *shape, dtype=torch.float64).unbind()
        of_x = _run(x, grad, weight, bias, cos, sin, ctx.how, of_weight, of_bias)
        return (
            of_x if wanted[0] else None,
            _like(of_weight, weight if wanted[1] else None),
            _like(of_bias, bias if wanted[2] else None),
            None,
            None,
            None,
        )


def _run(
    x: Tensor,
    grad: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    how: _How,
    grad_weight: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> Tensor:
    wide = cos.dtype
    if how.interleaved:
        cos, sin = cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)
    return head_rows(
        _near(x),
        None if grad is None else _near(grad),
        None if weight is None else _of_heads(weight).to(wide).contiguous(),
        None if bias is None else _of_heads(bias).to(wide).contiguous(),
        cos.contiguous(),
        sin.contiguous(),
        grad_weight,
        grad_bias,
        kind=how.kind,
        eps=how.eps,
        interleaved=how.interleaved,
    )


def _of_heads(tensor: Tensor) -> Tensor:
    """Return [H or 1, D] of weights [D] or [H, D]."""
    return tensor if tensor.dim() == 2 else tensor[None]


def _like(total: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if total is None or tensor is None else total.view(tensor.shape).to(tensor.dtype)


def _near(x: Tensor) -> Tensor:
    """Return ``x`` with the channels of a row one after the other, and its sign in its numbers."""
    x = x.resolve_neg()
    return x if x.stride(-1) == 1 else x.contiguous()
