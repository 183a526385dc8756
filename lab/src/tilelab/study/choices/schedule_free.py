"""Schedule-free AdamW, from the package schedulefree: imported by the runs that use it alone."""

from __future__ import annotations

from schedulefree import AdamWScheduleFree  # type: ignore[import-untyped]
from torch import Tensor


class ScheduleFree(AdamWScheduleFree):  # type: ignore[misc]
    """Schedule-free AdamW: trains at y, and is evaluated at the average x.

    The package goes from y to x and back by interpolation, which rounds. Here ``train`` after
    ``eval`` puts back the very bits of y, so that how often a run is evaluated does not matter.

    Source: Defazio et al., The Road Less Scheduled (2024), algorithm 1.
    """

    _kept: list[list[Tensor]] | None = None

    def eval(self) -> None:
        """Put the average x into the weights."""
        if self.param_groups[0]["train_mode"]:
            self._kept = [
                [each.detach().clone() for each in g["params"]] for g in self.param_groups
            ]
        super().eval()

    def train(self) -> None:
        """Put y, where gradients are taken, into the weights."""
        super().train()
        if self._kept is not None:
            for group, kept in zip(self.param_groups, self._kept, strict=True):
                for parameter, bits in zip(group["params"], kept, strict=True):
                    parameter.detach().copy_(bits)
            self._kept = None
