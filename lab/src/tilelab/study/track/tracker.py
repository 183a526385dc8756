"""The base of trackers: places that show the curves of runs, such as TensorBoard or MLflow.

A study needs none: its records are the truth, and a tracker is filled from them. A tracker gets
nothing twice and may be late: it says itself what it has already (``begin``), and gets the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.

    Args:
        study: name and hash of its study, the name of its folder.
        name: in the study, ``experiment/arm/seed-0``; with ``study`` it is the run's identity.
        parameters: its seed and everything of its config by dotted path, e.g. ``optimizer.lr``.
    """

    study: str
    name: str
    parameters: Mapping[str, str | int | float | bool]


class Point(NamedTuple):
    """One number of a curve.

    Args:
        metric: the curve, e.g. ``"train/loss"``, ``"held_out/loss"``, ``"by_tokens/train/loss"``.
        step: where it is on the axis: optimizer steps, or tokens for the curves ``by_tokens/...``.
        value: finite.
        time_s: when, seconds since 1970.
    """

    metric: str
    step: int
    value: float
    time_s: float


class AbstractTracker(ABC):
    """Keeps runs somewhere. The study reports whatever it raises to the user, and goes on."""

    @abstractmethod
    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        """Find the run where the tracker keeps runs, or make it, with its parameters.

        Returns:
            for each curve that it has already, the largest step on it; points up to there will not
            be sent again.
        """

    @abstractmethod
    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """Add points to a run that was begun; those of one curve come in order."""

    @abstractmethod
    def end(self, run: TrackedRun, status: Literal["done", "diverged"]) -> None:
        """The run is over, and all its points were added. It may be said of one more than once."""

    @abstractmethod
    def close(self) -> None:
        """The study stops here: write out what is held back, for runs that are not over too."""
