"""The tiled torch reference as a backend: exact, O(N) memory, any device, and slow."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from tilewise.kernels import Backend, Prepared, raw_reasons
from tilewise.plan import Tiles
from tilewise.problem import Problem
from tilewise.reference import tiled
from tilewise.reference.blocks import WALK


class TiledBackend(Backend):
    """Runs ``tilewise.reference.tiled``, which mirrors the kernels in plain torch."""

    name: ClassVar[str] = "tiled"
    last_resort: ClassVar[bool] = True

    def why_not(self, problem: Problem) -> list[str]:
        """Only what is Triton code: the reference does all else that passes validation."""
        return raw_reasons(problem)

    def tiles(self, problem: Problem) -> Tiles:
        """Return the blocks of the reference."""
        return Tiles(WALK.query_tile, WALK.key_tile)

    def prepare(self, problem: Problem) -> Prepared:
        """Return the passes of ``reference.tiled``."""

        def bound(run: Callable[..., Any]) -> Callable[..., Any]:
            def plain(*arguments: Any) -> Any:
                # Autocast has chosen the operands' dtype; it must not touch the arithmetic inside.
                with torch.autocast(problem.device, enabled=False):
                    return run(problem, *arguments)

            return plain

        return Prepared(bound(tiled.forward), bound(tiled.backward))
