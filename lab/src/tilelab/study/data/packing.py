"""Turn documents into the rows of a batch: as a stream, packed with masks, or padded.

* ``stream``: windows of the text, whatever documents they cut or join (``order.py``).
* ``documents``: the same windows in the same order. A query sees its own document alone, and
  positions count from the document's beginning in the window. The last token of a document has no
  target: its target would be the first token of another document.
* ``padded``: every row is a piece of one document, from its beginning on; what is left of the row
  is filled up with token 0 and has no target. Longer documents are cut into as many rows.

The model learns from the tokens that have a target.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilelab.study.ask.config import RunConfig
from tilelab.study.data.order import Batches, shuffled
from tilelab.study.data.tokens import Tokens, mean_piece, segments
from tilewise.errors import InvalidArgument

IGNORED = -100  # a target that is none, as torch's cross-entropy has it


class Rows(NamedTuple):
    """A micro-batch."""

    tokens: Tensor  # int64 [B, S]
    targets: Tensor  # int64 [B, S], ``IGNORED`` where there is none
    documents: Tensor | None = None  # int64 [B, S], of each token; None where a row is one

    @property
    def model_inputs(self) -> tuple[Tensor, ...]:
        """The arguments of a call of the model."""
        return (self.tokens,) if self.documents is None else (self.tokens, self.documents)

    @property
    def learnt(self) -> int:
        """Tokens that are learnt from: targets that there are."""
        return int((self.targets != IGNORED).sum())


class RunRows:
    """The rows of a run, of the length that a warm-up of lengths has come to."""

    def __init__(self, config: RunConfig, tokens: Tokens, seed: int) -> None:
        kinds: dict[str, type[Stream] | type[Padded]]
        kinds = {"stream": Stream, "documents": Packed, "padded": Padded}
        training, self._config = config.training, config
        kind = kinds[config.data.packing]
        self._source = kind(
            tokens, config.model.context, training.batch, training.accumulation, seed
        )

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        length, found = self._config.length_at(step), self._source.at(step)
        if length == self._config.model.context:
            return found
        return [shortened(each, length) for each in found]


def attended(config: RunConfig, tokens: Tokens) -> float:
    """Return the mean size, over a run, of the row (or document's piece in it) that a token is in.

    For packed documents, windows are taken to begin at multiples of their length.
    """
    packing, lengths = config.data.packing, config.lengths

    def one(length: int) -> float:
        if packing == "stream":
            return float(length)
        alone = packing == "padded"
        return mean_piece(tokens.documents.train, len(tokens.train), length, cut_at_starts=alone)

    return sum(one(length) * steps for length, steps in lengths.items()) / config.steps


def shortened(rows: Rows, length: int) -> Rows:
    """Return [B, S] rows as [B S / length, length]: each is cut into equal pieces."""
    tokens, targets = (each.reshape(-1, length) for each in (rows.tokens, rows.targets))
    documents = None if rows.documents is None else rows.documents.reshape(-1, length)
    return Rows(tokens, targets, documents)


class Stream:
    """Windows of the training text, see the top of this file."""

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        self._windows = Batches(tokens, context, batch, accumulation, seed)

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        return [Rows(inputs, targets) for inputs, targets in self._windows.at(step)]


class Packed(Stream):
    """The windows of ``Stream``, apart by document."""

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        super().__init__(tokens, context, batch, accumulation, seed)
        self._begins = tokens.documents.train

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        starts, size = self._windows.starts(step), self._windows.batch
        found = []
        for at, rows in enumerate(super().at(step)):
            of_windows = starts[at * size : (at + 1) * size]
            found.append(apart(rows, of_windows, self._begins))
        return [_checked(each) for each in found]


def apart(rows: Rows, starts: list[int], begins: NDArray[np.int64]) -> Rows:
    """Windows of a text with their documents, and without the targets beyond these.

    ``starts`` has the first token of each window, ``begins`` that of each document.
    """
    numbers, followed = zip(
        *(segments(begins, start, rows.tokens.shape[1]) for start in starts), strict=True
    )
    own = torch.from_numpy(np.stack(followed))
    documents = torch.from_numpy(np.stack(numbers))
    return Rows(rows.tokens, rows.targets.masked_fill(~own, IGNORED), documents)


class Padded:
    """Rows of one document each, see the top of this file; arguments are those of ``Stream``.

    An epoch goes once through all rows in a shuffled order, drawn anew for each epoch. A document
    of one token has nothing to predict, and no row.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        self._text, self._context = tokens.train, context
        self._batch, self._rows_per_step = batch, batch * accumulation
        begins = tokens.documents.train
        ends = np.append(begins[1:], len(self._text))
        self._rows: NDArray[Any] = np.array(
            [
                (start, min(context, end - 1 - start))
                for begin, end in zip(begins, ends, strict=True)
                for start in range(begin, end - 1, context)
            ],
            np.int64,
        ).reshape(-1, 2)
        if not len(self._rows):
            required = "documents of two tokens or more"
            raise InvalidArgument("data.packing", "padded, of none", required)
        count = len(self._rows)  # a step may reach into the next epoch
        self._order = lru_cache(maxsize=2)(lambda epoch: shuffled(count, seed, epoch))

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        first = step * self._rows_per_step
        chosen = [self._row(first + each) for each in range(self._rows_per_step)]
        return [
            self._filled(chosen[at : at + self._batch]) for at in range(0, len(chosen), self._batch)
        ]

    def _row(self, sample: int) -> tuple[int, int]:
        epoch, index = divmod(sample, len(self._rows))
        start, length = self._rows[self._order(epoch)[index]]
        return int(start), int(length)

    def _filled(self, rows: list[tuple[int, int]]) -> Rows:
        tokens = torch.zeros(len(rows), self._context, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for at, (start, length) in enumerate(rows):
            piece = torch.from_numpy(self._text[start : start + length + 1].astype(np.int64))
            tokens[at, :length], targets[at, :length] = piece[:-1], piece[1:]
        return Rows(tokens, targets)


def _checked(rows: Rows) -> Rows:
    if rows.learnt:
        return rows
    came = "documents, and a micro-batch in which every token is one of its own"
    fix = "Take a larger training.batch or model.context, or data.packing=stream."
    raise InvalidArgument("data.packing", came, "documents of two tokens or more", fix)
