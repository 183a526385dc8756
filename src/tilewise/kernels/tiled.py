"""The tiled torch reference as a backend: exact, O(N) memory, any device, and slow."""

from typing import ClassVar

import torch
from torch import Tensor

from tilewise.kernels.base import Backend, Needs, Tiles, raw_reasons
from tilewise.problem import Grads, Operands, Problem, Result, Statistics
from tilewise.reference import tiled


class TiledBackend(Backend):
    """Runs ``tilewise.reference.tiled``, which mirrors the kernels in plain torch."""

    name: ClassVar[str] = "tiled"
    last_resort: ClassVar[bool] = True

    def why_not(self, problem: Problem) -> list[str]:
        """Only what is Triton code: the reference does all else that passes validation."""
        return raw_reasons(problem)

    def tiles(self, problem: Problem) -> Tiles:
        """Return the blocks of the reference."""
        return Tiles(tiled.WALK.query_tile, tiled.WALK.key_tile)

    def forward(self, problem: Problem, operands: Operands, statistics: Statistics = "") -> Result:
        """Run the forward pass (see ``reference.tiled.forward``)."""
        with _plain_arithmetic(problem):
            return tiled.forward(problem, operands, statistics)

    def backward(
        self,
        problem: Problem,
        operands: Operands,
        result: Result,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        needs: Needs,
        grad_entropy: Tensor | None = None,
    ) -> Grads:
        """Run the backward pass (see ``reference.tiled.backward``)."""
        with _plain_arithmetic(problem):
            return tiled.backward(
                problem, operands, result, grad_out, grad_lse, needs, grad_entropy
            )


def _plain_arithmetic(problem: Problem) -> torch.autocast:
    """Autocast has already chosen the operands' dtype; it must not touch the arithmetic inside."""
    return torch.autocast(problem.device, enabled=False)
