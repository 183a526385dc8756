"""The built-in scores, public as ``tilewise.scores``: how a score changes before the softmax.

Every score works on s = scale * q.k in natural units; ``score=`` takes one, or a sequence that is
applied in order (``[softcap(50.0), bias(b)]`` caps first and then adds).
"""

import math

from torch import Tensor

from tilewise.errors import InvalidArgument, InvalidType
from tilewise.variants.program import Instr
from tilewise.variants.values import Score

__all__ = ["Score", "alibi", "bias", "softcap"]


def alibi(slopes: Tensor) -> Score:
    """ALiBi: s - slope[h] * |m + (N - M) - n|, a linear penalty on distance.

    Args:
        slopes: floating [Hq] or [B, Hq], one slope per query head, no gradient.

    Raises:
        InvalidArgument, InvalidType: not a floating tensor of one or two dimensions.

    Source: Press et al., Train Short, Test Long (2022), section 3; positions are aligned to the
    bottom right as in flash-attention.
    """
    _check_floating("slopes", slopes)
    if slopes.dim() not in (1, 2):
        raise InvalidArgument("slopes", f"shape {tuple(slopes.shape)}", "[Hq] or [B, Hq]")
    return Score((Instr("alibi", (), (0,)),), (slopes,))


def softcap(cap: float) -> Score:
    """Soft capping: cap * tanh(s / cap), which keeps scores inside (-cap, cap).

    Args:
        cap: a finite number above 0.

    Raises:
        InvalidArgument, InvalidType: any other value.

    Source: Gemma 2 technical report (2024), section 2 (logit soft-capping).
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise InvalidType("cap", f"a {type(cap).__name__}", "a finite number above 0")
    if not (math.isfinite(cap) and cap > 0):
        raise InvalidArgument("cap", str(cap), "a finite number above 0")
    return Score((Instr("softcap", (float(cap),)),))


def bias(tensor: Tensor) -> Score:
    """An additive term: s + tensor[b, h, m, n]. -inf excludes a pair. Its gradient is defined.

    Args:
        tensor: floating, broadcastable to [B, Hq, M, N]; its gradient is summed over every
            dimension that was broadcast.

    Raises:
        InvalidArgument, InvalidType: not a floating tensor of at most four dimensions.
    """
    _check_floating("tensor", tensor, "A boolean mask is mask=tensor.")
    if tensor.dim() > 4:
        raise InvalidArgument(
            "tensor", f"shape {tuple(tensor.shape)}", "broadcastable to [B, Hq, M, N]"
        )
    return Score((Instr("bias", (), (0,)),), (tensor,))


def _check_floating(name: str, tensor: object, fix: str = "") -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidType(name, f"a {type(tensor).__name__}", "a floating tensor", fix)
    if not tensor.dtype.is_floating_point:
        raise InvalidArgument(name, f"a tensor of {tensor.dtype}", "a floating tensor", fix)
