"""The rows of a text that a run learns from and is evaluated on: functions of seed and step alone.

A row is ``context`` tokens and as many targets, the tokens moved on by one. In training it is made
in one of three ways:

* ``stream``: windows of the text, whatever documents they cut or join.
* ``documents``: the same windows in the same order. A query sees its own document alone, and
  positions count from the document's beginning in the window. The last token of a document has no
  target: its target would be the first token of another document.
* ``padded``: every row is a piece of one document, from its beginning on; what is left of the row
  is filled up with token 0 and has no target. Longer documents are cut into as many rows.

The model learns from the tokens that have a target. This module defines its random draws itself,
because a library may change its generators: see ``_mixed``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilelab.study.ask.config import RunConfig
from tilelab.study.data.tokens import Tokens, mean_piece, segments
from tilewise.errors import InvalidArgument

IGNORED = -100  # a target that is none, as torch's cross-entropy has it
_MASK = (1 << 64) - 1


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers below ``count`` in the order of an epoch."""
    return np.argsort(drawn(seed, epoch, count), kind="stable")


def drawn(seed: int, epoch: int, count: int, first: int = 0) -> NDArray[np.uint64]:
    """Draw numbers ``first`` to ``first + count`` of 64 bits, the same on every machine."""
    (of_epoch,) = _mixed(np.array([epoch], np.uint64), 0)
    key = _mixed(np.array([seed & _MASK], np.uint64), int(of_epoch))[0]
    return _mixed(np.arange(first, first + count, dtype=np.uint64), int(key))


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64's output function of ``key + (value + 1) * golden ratio``, modulo 2**64.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Return the seed of what is drawn in a micro-batch, such as dropout: whoever computes it."""
    return int(drawn(seed, step, 1, first=index)[0] >> np.uint64(1))


class Samples:
    """The samples of a run, at random access.

    Sample number s (counted from 0 over all steps) is one of the ``count`` of epoch ``s // count``.
    An epoch has each of them once, in an order of its own. Batch and accumulation only cut that
    sequence into pieces: 4 x 2 and 8 x 1 learn from the same samples in a step.
    """

    def __init__(self, count: int, batch: int, accumulation: int, seed: int) -> None:
        self._count, self._batch, self._accumulation = count, batch, accumulation
        # A step may reach into the next epoch.
        self._order = lru_cache(maxsize=2)(lambda epoch: shuffled(count, seed, epoch))

    def at(self, step: int) -> list[list[tuple[int, int]]]:
        """Return epoch and number of the samples of each micro-batch of a step, 0 for the first."""
        found = []
        for part in range(step * self._accumulation, (step + 1) * self._accumulation):
            samples = range(part * self._batch, (part + 1) * self._batch)
            places = [divmod(sample, self._count) for sample in samples]
            found.append([(epoch, int(self._order(epoch)[index])) for epoch, index in places])
        return found

    def first(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the first samples of a run, in order, at most the first epoch's."""
        return self._order(0)[:count]


class Rows(NamedTuple):
    """A micro-batch, or some windows of an evaluation."""

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


class Stream:
    """Windows of the training text, see the top of this file.

    An epoch goes once through the text in windows that do not overlap, from an offset below
    ``context`` that it draws.

    Raises:
        InvalidArgument: a text that is shorter than one window and its last target.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        _check_length("the training text", len(tokens.train), context)
        self._tokens, self._context, self._seed = tokens, context, seed
        # The last offset: every epoch has the same number of windows wherever it starts.
        self._offsets = min(context, len(tokens.train) - context)
        self.windows = (len(tokens.train) - self._offsets) // context
        self._samples = Samples(self.windows, batch, accumulation, seed)

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        return [self._rows(part) for part in self._samples.at(step)]

    def seen(self, samples: int) -> NDArray[np.int64]:
        """Return the place of each of a run's first samples, int64 [n, 2]; see ``RunRows.seen``."""
        starts = self._offset(0) + self._samples.first(samples) * self._context
        return np.stack([starts, starts + self._context + 1], axis=1)

    def _offset(self, epoch: int) -> int:
        return int(drawn(self._seed, epoch, 1, first=self.windows)[0] % np.uint64(self._offsets))

    def _starts(self, places: list[tuple[int, int]]) -> list[int]:
        return [self._offset(epoch) + index * self._context for epoch, index in places]

    def _rows(self, places: list[tuple[int, int]]) -> Rows:
        return _windows(self._tokens.train, self._starts(places), self._context)


class Packed(Stream):
    """The windows of ``Stream``, apart by document."""

    def _rows(self, places: list[tuple[int, int]]) -> Rows:
        begins = self._tokens.documents.train
        rows = _apart(super()._rows(places), self._starts(places), begins)
        if not rows.learnt:
            came = "documents, and a micro-batch in which every token is one of its own"
            fix = "Take a larger training.batch or model.context, or data.packing=stream."
            required = "documents of two tokens or more"
            raise InvalidArgument("data.packing", came, required, fix)
        return rows


class Padded(Stream):
    """Rows of one document each, see the top of this file; arguments are those of ``Stream``.

    An epoch goes once through all rows. A document of one token has nothing to predict, and no row.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        self._text, self._context = tokens.train, context
        begins = tokens.documents.train
        ends = np.append(begins[1:], len(self._text))
        self._pieces = [
            (int(start), int(min(context, end - 1 - start)))
            for begin, end in zip(begins, ends, strict=True)
            for start in range(begin, end - 1, context)
        ]
        if not self._pieces:
            required = "documents of two tokens or more"
            raise InvalidArgument("data.packing", "padded, of none", required)
        self.windows = len(self._pieces)
        self._samples = Samples(self.windows, batch, accumulation, seed)

    def seen(self, samples: int) -> NDArray[np.int64]:
        """Return the place of each of a run's first samples, int64 [n, 2]; see ``RunRows.seen``."""
        rows = np.array(self._pieces, np.int64)[self._samples.first(samples)]
        return np.stack([rows[:, 0], rows.sum(axis=1) + 1], axis=1)

    def _rows(self, places: list[tuple[int, int]]) -> Rows:
        tokens = torch.zeros(len(places), self._context, dtype=torch.int64)
        targets = torch.full_like(tokens, IGNORED)
        for at, (_, index) in enumerate(places):
            start, length = self._pieces[index]
            piece = torch.from_numpy(self._text[start : start + length + 1].astype(np.int64))
            tokens[at, :length], targets[at, :length] = piece[:-1], piece[1:]
        return Rows(tokens, targets)


_KINDS: dict[str, type[Stream]] = {"stream": Stream, "documents": Packed, "padded": Padded}


class RunRows:
    """The rows of a run, of the length that a warm-up of lengths has come to."""

    def __init__(self, config: RunConfig, tokens: Tokens, seed: int) -> None:
        training, self._config, self._size = config.training, config, len(tokens.train)
        kind = _KINDS[config.data.packing]
        self._source = kind(
            tokens, config.model.context, training.batch, training.accumulation, seed
        )

    def at(self, step: int) -> list[Rows]:
        """Return the micro-batches of an optimizer step, 0 for the first."""
        length, found = self._config.length_at(step), self._source.at(step)
        if length == self._config.model.context:
            return found
        return [shortened(each, length) for each in found]

    def seen(self) -> NDArray[np.int64]:
        """Return the pieces of the training text in the run's batches, int64 [P, 2].

        A piece is its first token and one beyond its last, targets included. Pieces ascend and do
        not touch: neighbouring windows are one piece. A run of an epoch or more has seen all.
        """
        training = self._config.training
        samples = self._config.steps * training.batch * training.accumulation
        if samples >= self._source.windows:
            return np.array([[0, self._size]], np.int64)
        starts, ends = (np.sort(each) for each in self._source.seen(samples).T)
        apart = starts[1:] > ends[:-1]
        return np.stack([starts[np.append(True, apart)], ends[np.append(apart, True)]], axis=1)


def shortened(rows: Rows, length: int) -> Rows:
    """Return [B, S] rows as [B S / length, length]: each is cut into equal pieces."""
    tokens, targets = (each.reshape(-1, length) for each in (rows.tokens, rows.targets))
    documents = None if rows.documents is None else rows.documents.reshape(-1, length)
    return Rows(tokens, targets, documents)


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


@dataclass(frozen=True)
class Windows:
    """Windows of the held-out text, and which of their targets count."""

    text: NDArray[Any]
    context: int  # tokens in a window
    starts: NDArray[np.int64]  # int64 [W]
    first: NDArray[np.int64]  # of each window, the first target that counts, int64 [W]
    begins: NDArray[np.int64] | None = None  # first token of each document, to keep them apart

    def __len__(self) -> int:
        return len(self.starts)

    def parts(self, rows: int) -> Iterator[Rows]:
        """Yield all windows in order, at most ``rows`` at a time.

        A window that reaches over the end of the text is filled up with token 0, not counted.
        """
        places = torch.arange(self.context)
        for at in range(0, len(self), rows):
            starts = self.starts[at : at + rows]
            found = _windows(self.text, starts.tolist(), self.context)
            first = torch.from_numpy(self.first[at : at + rows])[:, None]
            ends = torch.from_numpy(len(self.text) - 1 - starts)[:, None]
            counted = (places >= first) & (places < ends)
            found = found._replace(targets=found.targets.masked_fill(~counted, IGNORED))
            begins = self.begins
            yield found if begins is None else _apart(found, starts.tolist(), begins)


def evaluation_windows(
    text: NDArray[Any], context: int, windows: int, begins: NDArray[np.int64] | None = None
) -> Windows:
    """Windows spread evenly over the held-out text, none overlapping, all targets counted.

    There are fewer where the text is too short for so many.
    """
    _check_length("the held-out text", len(text), context)
    count = min(windows, (len(text) - 1) // context)
    last = len(text) - 1 - context
    starts = np.array([last * each // max(count - 1, 1) for each in range(count)], np.int64)
    return Windows(text, context, starts, np.zeros(count, np.int64), begins)


def strided(
    text: NDArray[Any], context: int, stride: int, begins: NDArray[np.int64] | None = None
) -> Windows:
    """Windows that score every token of the held-out text but the first, each once.

    Window k starts at ``k * stride``. The first counts all its targets, the others their last
    ``stride``: each token is predicted from at least ``context - stride`` before it.

    Source: the overlapping evaluation of Megatron-LM (Shoeybi et al. 2019).
    """
    if not 1 <= stride <= context:
        raise InvalidArgument("final_stride", str(stride), f"from 1 to the context {context}")
    _check_length("the held-out text", len(text), 1)
    beyond = max(len(text) - 1 - context, 0)  # targets that the first window does not reach
    count = 1 + -(-beyond // stride)
    first = np.full(count, context - stride, np.int64)
    first[0] = 0
    return Windows(text, context, np.arange(count, dtype=np.int64) * stride, first, begins)


def _windows(text: NDArray[Any], starts: list[int], context: int) -> Rows:
    windows = np.zeros((len(starts), context + 1), np.int64)
    for row, start in enumerate(starts):
        piece = text[start : start + context + 1]
        windows[row, : len(piece)] = piece
    tokens = torch.from_numpy(windows)
    return Rows(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _apart(rows: Rows, starts: list[int], begins: NDArray[np.int64]) -> Rows:
    """Windows of a text with their documents, and without the targets beyond these."""
    found = [segments(begins, start, rows.tokens.shape[1]) for start in starts]
    documents, own = (torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
    return Rows(rows.tokens, rows.targets.masked_fill(~own, IGNORED), documents)


def _check_length(what: str, length: int, context: int) -> None:
    if length < context + 1:
        fix = "Give more text, or a smaller model.context."
        required = f"at least {context + 1:,} for a context of {context:,}"
        raise InvalidArgument("data.source", f"{length:,} tokens in {what}", required, fix)
