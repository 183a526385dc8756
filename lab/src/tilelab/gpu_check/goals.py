"""The goals for an H200, in bfloat16 unless it says otherwise."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FLEX", "Goal", "goal_for"]

FLEX = "flex"  # as the peers are named


class Goal(NamedTuple):
    """The goals of a case; None where there is no goal.

    Args:
        rate: TFLOP/s; of decoding TB/s.
        over_flex: times the speed of compiled FlexAttention, at least. The firm goal.
    """

    rate: float | None = None
    over_flex: float | None = None


_LEAST_LENGTH = 8192  # shorter problems have no goal
_RATES = {
    ("forward", "full", 64): 400.0,
    ("forward", "full", 128): 450.0,
    ("forward", "full", 256): 400.0,
    ("forward", "causal", 64): 350.0,
    ("forward", "causal", 128): 400.0,
    ("forward", "causal", 256): 330.0,
    ("forward", "fp8", 128): 600.0,
    ("forward", "decode", 128): 3.6,
    ("backward", "full", 64): 270.0,
    ("backward", "full", 128): 320.0,
    ("backward", "full", 256): 250.0,
    ("backward", "causal", 64): 230.0,
    ("backward", "causal", 128): 290.0,
}
_VARIANTS = ("alibi", "document", "window")


def goal_for(direction: str, kind: str, head_dim: int, length: int) -> Goal:
    """Return the goal of a speed case.

    Args:
        direction: ``"forward"`` or ``"backward"``.
        kind: of the mask or score, e.g. ``"causal"``.
        head_dim: D.
        length: keys of a sequence.
    """
    if length < _LEAST_LENGTH:
        return Goal()
    firm = kind in _VARIANTS or (direction == "backward" and kind in ("full", "causal"))
    return Goal(_RATES.get((direction, kind, head_dim)), 1.0 if firm else None)
