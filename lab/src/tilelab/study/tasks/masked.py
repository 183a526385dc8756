"""Masked language modelling: guess the tokens of a text that were hidden.

These are all the rules. Text is tokenized by WordPiece and cut into windows of context - 2 tokens,
as for language modelling (``data/order.py``). A window stands between ``[CLS]`` and ``[SEP]``.
Every token of a window is chosen by itself with the task's ``probability``; if none is chosen in a
micro-batch, its first one is. Among the chosen tokens, 80 % become ``[MASK]``, 10 % any ordinary
token (drawn from all words and pieces, evenly), and 10 % stay. The loss is over the chosen ones. In
training they are drawn anew for every step, from the run's seed; in evaluations they are the same
in every run. There is no second objective (next sentence).

Source: Devlin et al., BERT (2019), section 3.1 and appendix A.1.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilelab.models.bert import BERT, Head
from tilelab.models.layers import Packed, pack
from tilelab.study.ask.config import RunConfig
from tilelab.study.data import order
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.tokenizers import WordPiece, wordpiece
from tilelab.study.data.tokens import Tokens, prepare
from tilelab.study.tasks.families import bert_of
from tilelab.study.tasks.scores import evaluating, look
from tilelab.study.tasks.task import AbstractTask, Batch, Examination, Held

_MASKED, _OTHER = 0.8, 0.1  # of the chosen tokens; the rest stays
_STREAM = 0x6D61736B  # the draws are none of the windows' order
_EVALUATION_SEED = 0
_SPECIAL = 2  # tokens beside a window
_SHORTEST = 8
_ROWS = 8


class Masked(NamedTuple):
    """Windows with hidden tokens."""

    tokens: NDArray[np.int64]  # int64 [B, S], as the model sees them
    wanted: NDArray[np.int64]  # int64 [P], the chosen places, counted through all windows
    targets: NDArray[np.int64]  # int64 [P], what was there


def mask(
    tokens: NDArray[np.int64], pieces: WordPiece, probability: float, seed: int, index: int
) -> Masked:
    """Choose and hide tokens of windows, int64 [B, S]."""
    count = tokens.size
    random = order.drawn(seed ^ _STREAM, index, 3 * count).reshape(3, count)
    shares = (random[:2] >> np.uint64(11)) * 2.0**-53
    chosen = shares[0] < probability
    if not chosen.any():
        chosen[0] = True
    flat = tokens.flatten()
    ordinary = np.array(pieces.ordinary, np.int64)
    others = ordinary[(random[2] % np.uint64(len(ordinary))).astype(np.int64)]
    hidden = np.where(shares[1] < _MASKED, pieces.mask, flat)
    hidden = np.where((shares[1] >= _MASKED) & (shares[1] < _MASKED + _OTHER), others, hidden)
    wanted = np.flatnonzero(chosen)
    return Masked(np.where(chosen, hidden, flat).reshape(tokens.shape), wanted, flat[wanted])


def _packed(masked: Masked, pieces: WordPiece) -> tuple[Packed, Tensor, Tensor]:
    """Return the windows between their special tokens, and where the chosen tokens are then."""
    rows = [[pieces.first, *row, pieces.border] for row in masked.tokens.tolist()]
    window = masked.tokens.shape[1]
    wanted = masked.wanted + _SPECIAL * (masked.wanted // window) + 1
    return pack(rows), torch.from_numpy(wanted), torch.from_numpy(masked.targets)


class _Batches:
    def __init__(
        self, config: RunConfig, data: Tokens, seed: int, probability: float, pieces: WordPiece
    ) -> None:
        training = config.training
        window = config.model.context - _SPECIAL
        self._windows = order.Stream(data, window, training.batch, training.accumulation, seed)
        self._seed, self._probability, self._pieces = seed, probability, pieces
        self._accumulation = training.accumulation

    def at(self, step: int) -> list[Batch]:
        found = []
        for part, rows in enumerate(self._windows.at(step)):
            index = step * self._accumulation + part
            masked = mask(rows.tokens.numpy(), self._pieces, self._probability, self._seed, index)
            packed, wanted, targets = _packed(masked, self._pieces)
            found.append(Batch((packed, wanted), targets, len(targets), len(packed.tokens)))
        return found


class _Examination(Examination):
    """Windows of the held-out text, with the same tokens hidden in every run."""

    def __init__(
        self, config: RunConfig, data: Tokens, probability: float, pieces: WordPiece
    ) -> None:
        data = data.scored_on(config.evaluation.text)
        window = config.model.context - _SPECIAL
        windows = config.evaluation.windows
        self._windows = order.evaluation_windows(data.held_out, window, windows)
        count = config.evaluation.attention_windows
        self._watched: Tensor | None = None
        if count:
            watched = order.evaluation_windows(data.held_out, window, count)
            self._watched = next(watched.parts(count)).tokens
        self._probability, self._pieces = probability, pieces

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        nats, right, count = 0.0, 0, 0
        with evaluating(model, autocast) as device:
            for index, part in enumerate(self._windows.parts(_ROWS)):
                packed, wanted, targets = self._masked(part.tokens, index)
                logits = model(packed.to(device), wanted.to(device)).float()
                targets = targets.to(device)
                found = functional.cross_entropy(logits, targets, reduction="none")
                nats += found.double().sum().item()
                right += int((logits.argmax(-1) == targets).sum())
                count += len(targets)
            softmaxes = None
            if self._watched is not None:
                packed, wanted, _ = self._masked(self._watched, 0)
                softmaxes = look(model, [(packed.to(device), wanted.to(device))])
        return Held(nats / count, metrics={"accuracy": right / count}, softmaxes=softmaxes)

    def _masked(self, inputs: Tensor, index: int) -> tuple[Packed, Tensor, Tensor]:
        tokens = inputs.numpy()
        masked = mask(tokens, self._pieces, self._probability, _EVALUATION_SEED, index)
        return _packed(masked, self._pieces)


class MaskedLanguageModelling(AbstractTask):
    """The hidden tokens of a text, with a BERT; see the top of this file and ``AbstractTask``."""

    families = ("bert",)
    tokenizers = ("wordpiece",)
    metrics = ("loss", "accuracy")
    fine_tunes = True
    learns_text = True
    unit = "token"

    def __init__(self, probability: float) -> None:
        self.probability = probability

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.model.context < _SHORTEST:
            raise config.unfit("model.context", f"{_SHORTEST} or more")
        if config.evaluation.final_stride:
            required = "0: an encoder's windows are not strided"
            raise config.unfit("evaluation.final_stride", required)
        if config.training.compile:
            required = "false: the number of hidden tokens changes from batch to batch"
            raise config.unfit("training.compile", required)

    def prepare(self, config: RunConfig, cache: Path) -> Tokens:
        """Return the tokens of the text."""
        return prepare(config.data, cache)

    def batches(self, config: RunConfig, data: Tokens, seed: int) -> _Batches:
        """Masked windows of the training text."""
        return _Batches(config, data, seed, self.probability, wordpiece(data_folder()))

    def model(self, config: RunConfig, data: Tokens, seed: int, device: torch.device) -> BERT:
        """Return a BERT with a head of tokens, tied to their embedding."""
        return bert_of(config, data.vocabulary, Head("masked"), seed, device)

    def examination(self, config: RunConfig, data: Tokens) -> _Examination:
        """Masked windows of the held-out text."""
        return _Examination(config, data, self.probability, wordpiece(data_folder()))

    def evaluated(self, config: RunConfig, data: Tokens, whole: bool) -> int:
        """Windows."""
        return config.evaluation.windows
