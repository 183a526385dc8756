"""What a run's weights are worth: the held-out loss, on the same windows whatever the arm."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch

from tilewise.lab.study.choices import optimizers
from tilewise.lab.study.data.evaluate import evaluate, word_perplexity
from tilewise.lab.study.data.order import evaluation_windows, strided
from tilewise.lab.study.data.tokenizers import tokenizer
from tilewise.lab.study.data.tokens import Tokens
from tilewise.lab.study.records import Sample
from tilewise.lab.study.train.sampler import PROMPT_TOKENS, printable, sample
from tilewise.lab.study.train.trainer import Trainer

__all__ = ["Examiner", "Held"]

_T = TypeVar("_T")


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
        self._windows = evaluation_windows(tokens.held_out, context, evaluation.windows)
        self._whole = self._windows
        if evaluation.final_stride:
            self._whole = strided(tokens.held_out, context, evaluation.final_stride)

    def held_out(self, whole: bool) -> Held:
        """The loss now.

        Args:
            whole: after the last step: all of the text, where the config asks for it.
        """
        windows = self._whole if whole else self._windows
        model, tokens = self._trainer.model, self._tokens
        score = self._examined(lambda: evaluate(model, windows, tokens, self._autocast))
        return Held(score.loss, score.bits_per_byte, word_perplexity(score, tokens))

    def sample(self) -> Sample:
        """How the model goes on with the held-out text; arms draw the same random numbers."""
        trainer, count = self._trainer, self._trainer.config.evaluation.sample_tokens
        decode = tokenizer(trainer.config.data.tokenizer).decode
        prompt = self._tokens.held_out[: min(PROMPT_TOKENS, trainer.config.model.context)].tolist()
        written = self._examined(
            lambda: sample(trainer.model, prompt, count, trainer.run.seed, self._autocast)
        )
        return Sample(printable(decode(prompt)), printable(decode(written)))

    @property
    def _autocast(self) -> torch.dtype | None:
        dtype = self._trainer.dtype
        return None if dtype == torch.float32 else dtype

    def _examined(self, look: Callable[[], _T]) -> _T:
        """What is seen of the weights; an optimizer that averages shows its average."""
        optimizers.evaluation_mode(self._trainer.optimizer)
        try:
            return look()
        finally:
            optimizers.training_mode(self._trainer.optimizer)
