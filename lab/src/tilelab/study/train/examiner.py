"""The held-out evaluation of a run's weights, on the same data for every arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from tilelab.study.choices import optimizers
from tilelab.study.records.events import Sample
from tilelab.study.tasks.task import Held, Prepared
from tilelab.study.train.trainer import Trainer

__all__ = ["Examiner"]

_T = TypeVar("_T")


class Examiner:
    """Evaluates the weights of a trainer, and leaves no trace in its state.

    Args:
        trainer: whose weights, in whose precision.
        data: whose held-out part.

    Raises:
        InvalidArgument: there is too little of it.
    """

    def __init__(self, trainer: Trainer, data: Prepared) -> None:
        self._trainer = trainer
        self._examination = trainer.task.examination(trainer.config, data)

    def held_out(self, whole: bool) -> Held:
        """Return the loss and the metrics now.

        Args:
            whole: after the last step, where a task may look at more.
        """
        model = self._trainer.model
        return self._examined(lambda: self._examination.held_out(model, whole, self._autocast))

    def sample(self) -> Sample:
        """Return a text that the model writes; arms draw the same random numbers."""
        trainer, count = self._trainer, self._trainer.config.evaluation.sample_tokens
        seed = trainer.run.seed
        return self._examined(
            lambda: self._examination.sample(trainer.model, count, seed, self._autocast)
        )

    @property
    def _autocast(self) -> torch.dtype | None:
        dtype = self._trainer.dtype
        return None if dtype == torch.float32 else dtype

    def _examined(self, look: Callable[[], _T]) -> _T:
        """Look at the weights; an optimizer that averages shows its average."""
        optimizers.evaluation_mode(self._trainer.optimizer)
        try:
            return look()
        finally:
            optimizers.training_mode(self._trainer.optimizer)
