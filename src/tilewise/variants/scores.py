"""The built-in scores, public as ``tilewise.scores``: how a score changes before the softmax.

Every score works on s = scale * q.k in natural units; ``score=`` takes one, or a sequence that is
applied in order (``[softcap(50.0), bias(b)]`` caps first and then adds).

Each is a function in the language of ``masks.function``, like a user's own.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tilewise.checks import FLOATING, check_tensor, named
from tilewise.errors import InvalidArgument, InvalidType
from tilewise.torch_private import constant_while_compiling
from tilewise.variants.program import RAW, Instr, Program, fitted
from tilewise.variants.raw import register_triton, registered
from tilewise.variants.values import Score, score_of

__all__ = ["Score", "alibi", "bias", "function", "raw", "register_triton", "softcap"]


@constant_while_compiling
def _softcap(cap: float) -> Program:
    return score_of(lambda s, b, h, m, n: cap * torch.tanh(s / cap)).program


_kept_softcap = lru_cache(_softcap)
_SLOPES, _FULL = torch.zeros(1, 1), torch.zeros(1, 1, 1, 1)
_ALIBI = fitted(
    score_of(lambda s, b, h, m, n: s - _SLOPES[b, h] * abs(m + (n.length - m.length) - n)).program
)
_BIAS = fitted(score_of(lambda s, b, h, m, n: s + _FULL[b, h, m, n]).program)


def function(f: Callable[..., Any]) -> Score:
    """Return the score of ``f(s, b, h, m, n) -> s``, as it is now; ``score=f`` says the same.

    Args:
        f: as for ``masks.function``, over the score s too. Gradients are defined for s and for
            every floating tensor that it indexes.

    Raises:
        InvalidArgument, InvalidType: it does something that is not in the language.
    """
    return score_of(f)


def alibi(slopes: Tensor) -> Score:
    """ALiBi: ``s - slope[h] * |m + (N - M) - n|``, a linear penalty on distance.

    Args:
        slopes: floating [Hq] or [B, Hq], one slope per query head, no gradient.

    Raises:
        InvalidArgument, InvalidType: not a floating tensor of one or two dimensions.

    Source: Press et al., Train Short, Test Long (2022), section 3; positions are aligned to the
    bottom right as in flash-attention.
    """
    check_tensor("slopes", slopes, "a floating tensor", FLOATING)
    if slopes.dim() not in (1, 2):
        raise InvalidArgument("slopes", f"shape {tuple(slopes.shape)}", "[Hq] or [B, Hq]")
    return Score(_ALIBI, (slopes,))


def softcap(cap: float) -> Score:
    """Soft capping: cap * tanh(s / cap), which keeps scores inside (-cap, cap).

    Args:
        cap: a finite number above 0.

    Raises:
        InvalidArgument, InvalidType: any other value.

    Source: Gemma 2 technical report (2024), section 2 (logit soft-capping).
    """
    if isinstance(cap, bool) or not isinstance(cap, (int, float)):
        raise InvalidType("cap", named(cap), "a finite number above 0")
    if not (math.isfinite(cap) and cap > 0):
        raise InvalidArgument("cap", str(cap), "a finite number above 0")
    number = float(cap).__float__()  # for torch.compile: of a number that varies, that of now
    return Score(_softcap(number) if torch.compiler.is_compiling() else _kept_softcap(number))


def bias(tensor: Tensor) -> Score:
    """An additive term: s + tensor[b, h, m, n]. -inf excludes a pair. Its gradient is defined.

    Args:
        tensor: floating, broadcastable to [B, Hq, M, N]; its gradient is summed over every
            dimension that was broadcast.

    Raises:
        InvalidArgument, InvalidType: not a floating tensor of at most four dimensions.
    """
    fix = "A boolean mask is mask=tensor."
    check_tensor("tensor", tensor, "a floating tensor", FLOATING, fix=fix)
    if tensor.dim() > 4:
        raise InvalidArgument(
            "tensor", f"shape {tuple(tensor.shape)}", "broadcastable to [B, Hq, M, N]"
        )
    return Score(_BIAS, (tensor,))


@constant_while_compiling
def _raw(name: str, count: int) -> Program:
    registered(name)
    return (Instr(RAW, (name,), tuple(range(count))),)


def raw(name: str, *tensors: Tensor) -> Score:
    """Return a score that is Triton code: the pair of jit functions registered as ``name``.

    It composes with other scores and with every mask, and runs on the GPU backend only. Gradients
    are defined for s, and for nothing that it is given; there is no second derivative.

    Args:
        name: said to ``register_triton`` in this process.
        tensors: what the functions read, in their order: as they are, with any shapes [...] and
            strides.

    Raises:
        InvalidArgument, InvalidType: the name is not registered, or something is no tensor.
    """
    if not isinstance(name, str):
        raise InvalidType("name", named(name), "the name of a registered score")
    for index, tensor in enumerate(tensors):
        check_tensor(f"tensors[{index}]", tensor, "a tensor")
    return Score(_raw(name, len(tensors)), tensors)
