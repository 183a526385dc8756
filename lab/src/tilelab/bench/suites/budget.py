"""Limits of a run: minutes, and the available memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from tilelab.common.memory import available_bytes

__all__ = ["Budget"]

_ROOM = 0.7  # of what is free: others live here too


@dataclass
class Budget:
    """A time budget that starts when it is made, and how long calls took so far.

    Args:
        minutes: for everything.
        rounds: the fewest and the most rounds of a step.
        round_budget_s: about how long the rounds of one step may take.
    """

    minutes: float
    rounds: tuple[int, int] = (3, 15)
    round_budget_s: float = 2.0
    _began: float = field(default_factory=time.monotonic)
    _took: dict[tuple[str, ...], tuple[int, float, float]] = field(default_factory=dict)

    @property
    def left_s(self) -> float:
        """Seconds that are left; negative when it is over."""
        return self.minutes * 60 - (time.monotonic() - self._began)

    @property
    def spent_s(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def took(self, key: tuple[str, ...], length: int, seconds: float, once_s: float = 0.0) -> None:
        """A call of a method on a case took so long, and so long what is done once before."""
        self._took[key] = length, seconds, once_s

    def too_long(self, key: tuple[str, ...], length: int) -> str:
        """Why a method should not be tried at a greater length; empty if it may.

        A call is taken to grow with the square of the length; it is made to warm up, to compare
        and then in the fewest rounds.
        """
        if key not in self._took:
            return ""
        known, seconds, once_s = self._took[key]
        expected = once_s + seconds * max(1.0, length / known) ** 2 * (2 + self.rounds[0])
        if expected <= self.left_s:
            return ""
        return f"it would take about {expected:.0f} s, and {max(self.left_s, 0):.0f} s are left"

    def too_large(self, wanted: float, device: str) -> str:
        """Why so many bytes are too many; empty if they fit."""
        free = torch.cuda.mem_get_info()[0] if device == "cuda" else available_bytes()
        if free is None or wanted <= _ROOM * free:
            return ""
        return f"its matrices need about {wanted / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free"
