"""Operands in 8 bits: which ones there are, and the scales that they stand for numbers by.

A float8 number in q, k or v stands for itself times the scale of its head. In pages of 8 bits
beside wider queries, a number stands for itself times the scale of its row. The scales are float32
tensors whose values are never read by the host.
"""

from collections.abc import Iterable
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType, Unsupported

FLOAT8 = torch.float8_e4m3fn
STORED = (torch.int8, FLOAT8)  # of pages beside wider queries
_NAMES = ("q_scale", "k_scale", "v_scale")


class Scales(NamedTuple):
    """The scales of a call's q, k and v; None stands for 1.

    Args:
        q: floating of one element, [Hq] or [B, Hq].
        k: floating of one element, [Hk] or [B, Hk]; of pages in 8 bits [pages, Hk, page_size].
        v: as k.
    """

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


NO_SCALES = Scales()


def scales_of(q_scale: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> Scales:
    """Return the scales as one value; always the same one where there are none.

    The arguments are those of ``Scales``: floating of one element, [heads] or [B, heads], or None;
    k_scale and v_scale of pages in 8 bits are [pages, Hk, page_size].
    """
    if q_scale is None and k_scale is None and v_scale is None:
        return NO_SCALES
    return Scales(q_scale, k_scale, v_scale)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the output for operands of ``dtype``: bfloat16 for float8, else their own."""
    return torch.bfloat16 if dtype is FLOAT8 else dtype


def fix_for(dtype: torch.dtype) -> str:
    """Return what to do with operands of a dtype that no call takes; "" where nothing special is.

    Raises:
        Unsupported: float8 with the number format of AMD's older chips.
    """
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        raise Unsupported(
            f"tilewise does not compute {dtype}: it is another number format, of the chips of "
            "gfx942 alone, whose matrix units know no other float8",
            fix=f"convert it: x.float().to({FLOAT8}) (gfx942 multiplies it as float16)",
        )
    if dtype is torch.float8_e5m2:
        return f"Two bits of fraction are too few for q, k and v: quantise them to {FLOAT8}."
    return ""


def check_scales(
    scales: Scales, dtype: torch.dtype, batch: int, heads: tuple[int, int, int], device: str
) -> None:
    """The types, shapes, dtypes and devices of scales.

    Raises:
        InvalidArgument, InvalidType: naming the one that is wrong.
    """
    for name, letter, scale, count in zip(_NAMES, "qkv", scales, heads, strict=True):
        if scale is None:
            continue
        required = f"a floating tensor of one element, [{count}] (heads) or [{batch}, {count}]"
        _check_tensor(name, scale, required, device)
        if dtype is not FLOAT8:
            fix = f"Multiply {letter} by it, or quantise: ({letter} / {name}).to({FLOAT8})."
            raise InvalidArgument(name, f"a scale for {letter} of {dtype}", f"{FLOAT8}", fix)
        if not _fits(scale, batch, count):
            raise InvalidArgument(name, f"shape {tuple(scale.shape)}", required)


def check_row_scales(scales: Scales, heads: int, page_size: int, device: str) -> None:
    """As ``check_scales``, of pages in 8 bits: scales of keys and values, one for each row."""
    if scales.q is not None:
        raise InvalidArgument("q_scale", "one with pages in 8 bits", "none: q is wider")
    for name, scale in zip(_NAMES[1:], scales[1:], strict=True):
        if scale is None:
            continue
        required = f"a floating tensor [pages, {heads}, {page_size}], a number for each row"
        _check_tensor(name, scale, required, device)
        if scale.dim() != 3 or scale.shape[1] != heads or scale.shape[2] != page_size:
            fix = f"For one number a page and head: {name}.view(-1, {heads}, 1)"
            fix += f".expand(-1, -1, {page_size})."
            raise InvalidArgument(name, f"shape {tuple(scale.shape)}", required, fix)


def _check_tensor(name: str, scale: object, required: str, device: str) -> None:
    if not isinstance(scale, Tensor):
        came = f"a {type(scale).__name__}"
        raise InvalidType(name, came, required, "Say torch.tensor(scale, device=q.device).")
    if not scale.dtype.is_floating_point or scale.dtype.itemsize < 2:
        raise InvalidArgument(name, f"a tensor of {scale.dtype}", required)
    if scale.device.type != device:
        raise InvalidArgument(name, f"device {scale.device}", f"q's device, {device}")


def _fits(scale: Tensor, batch: int, heads: int) -> bool:
    """Return whether a scale has one of the shapes; one by one, as torch.compile traces them."""
    if scale.dim() == 1 and scale.shape[0] == heads:
        return True
    if scale.dim() == 2 and scale.shape[0] == batch and scale.shape[1] == heads:
        return True
    return scale.numel() == 1


def lower_scales(scales: Scales, batch: int, heads: tuple[int, int, int]) -> Scales:
    """Scales as kernels read them: contiguous float32 [batch, heads of the operand]."""
    return Scales(
        *[
            None if scale is None else _lowered(scale, batch, count)
            for scale, count in zip(scales, heads, strict=True)
        ]
    )


def _lowered(scale: Tensor, batch: int, heads: int) -> Tensor:
    wide = scale.to(torch.float32).resolve_neg()
    if wide.numel() == 1:
        wide = wide.reshape(1, 1)
    return wide.expand(batch, heads).contiguous()


def refuse_gradients(tensors: Iterable[Tensor | None]) -> None:
    """Refuse a call of float8 of which a gradient may be wanted.

    Raises:
        Unsupported: one of the call's tensors requires a gradient, and torch records them.
    """
    wanted = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if wanted and torch.is_grad_enabled():
        refuse_backward()


def refuse_backward() -> NoReturn:
    """Raise Unsupported: the backward pass of float8."""
    raise Unsupported(
        "tilewise computes float8 forward only: there are no gradients, and a tensor of this call "
        "requires one",
        fix="call it under torch.no_grad(), or detach() the tensors; to train, compute in bfloat16",
    )
