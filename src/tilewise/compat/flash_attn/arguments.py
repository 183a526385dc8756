"""The flags of flash-attn's calls, read as a mask and a score of tilewise."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import masks, scores
from tilewise.errors import InvalidArgument, InvalidType

__all__ = ["Asked", "as_flash_attn", "check_tensor", "is_local", "read"]


class Asked(NamedTuple):
    """What a call of flash-attn says beside its tensors.

    Args:
        mask: which pairs attend; None for all of them.
        cap: of the scores; 0 for none.
        slopes: of ALiBi, [H] or [B, H], or None.
        scale: of q.k; None for 1/sqrt(D).
        dropout_p: the probability of dropping a pair.
    """

    mask: masks.Mask | None
    cap: float
    slopes: Tensor | None
    scale: float | None
    dropout_p: float

    def score(self) -> list[scores.Score] | None:
        """The score: the cap first and then ALiBi."""
        steps = [scores.softcap(self.cap)] if self.cap > 0 else []
        if self.slopes is not None:
            steps.append(scores.alibi(self.slopes))
        return steps or None

    def keywords(self, seed: Tensor | None = None) -> dict[str, Any]:
        """The keywords of ``tilewise.attention``."""
        words = {"mask": self.mask, "score": self.score(), "scale": self.scale}
        return words if seed is None else {**words, "dropout_p": self.dropout_p, "seed": seed}


def read(
    sequences: int,
    heads: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> Asked:
    """The flags of a call with so many sequences and query heads.

    Raises:
        InvalidArgument, InvalidType: naming the argument that is wrong.
    """
    if softmax_scale is not None:
        _check_number("softmax_scale", softmax_scale, "a finite number, or None for 1/sqrt(D)")
    _check_number("dropout_p", dropout_p, "a probability in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidArgument("dropout_p", str(dropout_p), "a probability in [0, 1)")
    _check_number("softcap", softcap, "a number; 0 or less for none")
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, sequences, heads)
    mask = _mask(causal, window_size)
    return Asked(mask, float(softcap), alibi_slopes, softmax_scale, dropout_p)


def is_local(causal: bool, window_size: Sequence[int]) -> bool:
    """Whether rows differ in the keys that they see: flash-attn then rotates each at its place."""
    return causal or window_size[0] >= 0 or window_size[1] >= 0


def check_tensor(name: str, tensor: object, shape: str) -> None:
    """It is a tensor with as many dimensions as ``shape`` ("[B, S, H, D]") names.

    Raises:
        InvalidArgument, InvalidType: it is not.
    """
    if not isinstance(tensor, Tensor):
        raise InvalidType(name, f"a {type(tensor).__name__}", f"a tensor {shape}")
    if tensor.is_nested:
        raise InvalidArgument(name, "a nested tensor", shape, "Pack it for flash_attn_varlen_func.")
    if tensor.dim() != shape.count(",") + 1:
        raise InvalidArgument(name, f"shape {tuple(tensor.shape)}", shape)


def as_flash_attn(lse: Tensor | None) -> Tensor:
    """Lse as flash-attn 2 returns it: +inf for a row without keys."""
    assert lse is not None
    return torch.where(lse == -torch.inf, torch.inf, lse)


def _mask(causal: bool, window_size: Sequence[int]) -> masks.Mask | None:
    required = "two integers (left, right), each -1 for no bound"
    if not isinstance(window_size, Sequence) or isinstance(window_size, str):
        raise InvalidType("window_size", f"a {type(window_size).__name__}", required)
    if len(window_size) != 2:
        raise InvalidArgument("window_size", f"{len(window_size)} entries", required)
    for bound in window_size:
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise InvalidType("window_size", f"a {type(bound).__name__} in it", required)
    left = None if window_size[0] < 0 else window_size[0]
    right = 0 if causal else None if window_size[1] < 0 else window_size[1]
    if left is None:
        return None if right is None else masks.causal() if causal else masks.window(None, right)
    return masks.window(left, right)


def _check_number(name: str, value: object, required: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidType(name, f"a {type(value).__name__}", required)


def _check_slopes(slopes: object, sequences: int, heads: int) -> None:
    required = f"a floating tensor [{heads}] or [{sequences}, {heads}]"
    if not isinstance(slopes, Tensor):
        raise InvalidType("alibi_slopes", f"a {type(slopes).__name__}", required)
    if not slopes.dtype.is_floating_point:
        raise InvalidArgument("alibi_slopes", f"a tensor of {slopes.dtype}", required)
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise InvalidArgument("alibi_slopes", f"shape {tuple(slopes.shape)}", required)
