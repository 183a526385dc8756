"""A suite as a list of steps, and the settings that they are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tilelab.bench.suites.budget import Budget
from tilelab.bench.suites.point import Point

__all__ = ["LENGTHS", "QUICK_LENGTHS", "Settings", "Step"]

LENGTHS = tuple(2**power for power in range(7, 17))  # 128 to 64k
QUICK_LENGTHS = (128, 512)


class Step(NamedTuple):
    """A part of a suite.

    Args:
        name: for the progress.
        run: does it, and gives what was found.
    """

    name: str
    run: Callable[[Budget], Iterable[Point]]


@dataclass(frozen=True)
class Settings:
    """The settings that the user asked for.

    Args:
        device: "cpu" or "cuda".
        lengths: of the sweep, ascending.
        quick: few cases.
        dtypes: names of torch's.
        flex: whether FlexAttention, which compiles, takes part.
        models: names of well-known models.
    """

    device: str = "cpu"
    lengths: tuple[int, ...] = LENGTHS
    quick: bool = False
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    flex: bool = True
    models: tuple[str, ...] = ()

    @property
    def heads(self) -> int:
        """Heads of a sweep: few on a single CPU thread."""
        return 8 if self.device == "cuda" else 2

    @property
    def batch(self) -> int:
        """The same at every length, so that times can be compared along it."""
        return 2 if self.device == "cuda" else 1
