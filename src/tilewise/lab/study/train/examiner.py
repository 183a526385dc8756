"""The held-out loss of a run's weights: the same windows whatever the arm."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilewise.lab.study.choices import optimizers
from tilewise.lab.study.data.evaluate import evaluate, word_perplexity
from tilewise.lab.study.data.order import evaluation_windows, strided
from tilewise.lab.study.data.tokens import Tokens
from tilewise.lab.study.train.trainer import Trainer

__all__ = ["Examiner", "Held"]


class Held(NamedTuple):
    """What the held-out text costs; see ``records.Evaluation``."""

    loss: float
    bits_per_byte: float
    word_perplexity: float | None


class Examiner:
    """Evaluates the weights of a trainer, and leaves no trace in its state.

    Args:
        trainer: whose weights, in whose precision.
        tokens: whose held-out text.

    Raises:
        InvalidArgument: the text is too short for the context.
    """

    def __init__(self, trainer: Trainer, tokens: Tokens) -> None:
        evaluation, context = trainer.config.evaluation, trainer.config.model.context
        self._trainer, self._tokens = trainer, tokens
        self._sample = evaluation_windows(tokens.held_out, context, evaluation.windows)
        self._whole = self._sample
        if evaluation.final_stride:
            self._whole = strided(tokens.held_out, context, evaluation.final_stride)

    def held_out(self, whole: bool) -> Held:
        """The loss now; an optimizer that averages is evaluated at its average.

        Args:
            whole: after the last step: all of the text, where the config asks for it.
        """
        trainer = self._trainer
        dtype = trainer.dtype
        optimizers.evaluation_mode(trainer.optimizer)
        try:
            score = evaluate(
                trainer.model,
                self._whole if whole else self._sample,
                self._tokens,
                None if dtype == torch.float32 else dtype,
            )
        finally:
            optimizers.training_mode(trainer.optimizer)
        return Held(score.loss, score.bits_per_byte, word_perplexity(score, self._tokens))
