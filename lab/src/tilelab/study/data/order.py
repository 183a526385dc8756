"""The order of the text's windows: a function of seed and step, and of nothing else.

Windows are ``context`` inputs and as many targets, the inputs moved on by one token.
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

from tilelab.study.data.tokens import Tokens, segments
from tilewise.errors import InvalidArgument

_MASK = (1 << 64) - 1


class Batches:
    """The training windows of a run, at random access.

    Sample number s (counted from 0 over all steps) is window ``s % n`` of epoch ``s // n``. An
    epoch goes once through the text in n windows that do not overlap, from an offset below
    ``context``, in a shuffled order. Each epoch draws its own offset and order. Batch and
    accumulation only cut that sequence into pieces: 4 x 2 and 8 x 1 learn from the same windows in
    a step.

    This module defines the draws itself, because a library may change its generators: see
    ``_mixed``.

    Raises:
        InvalidArgument: a text that is shorter than one window and its last target.
    """

    def __init__(
        self, tokens: Tokens, context: int, batch: int, accumulation: int, seed: int
    ) -> None:
        text = tokens.train
        _check_length("the training text", len(text), context)
        self._text = text
        self.context, self.batch, self.accumulation, self.seed = context, batch, accumulation, seed
        # The last offset: every epoch has the same number of windows wherever it starts.
        self._offsets = min(context, len(text) - context)
        self.windows = (len(text) - self._offsets) // context
        self._order = lru_cache(maxsize=2)(self._draw_order)  # a step may reach into the next epoch

    def at(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """Return inputs and targets of each micro-batch of a step, int64 [batch, context] each."""
        starts = self.starts(step)
        return [
            _pairs(self._text, starts[at : at + self.batch], self.context)
            for at in range(0, len(starts), self.batch)
        ]

    def starts(self, step: int) -> list[int]:
        """Return the first token of every window of an optimizer step, 0 for the first step."""
        first = step * self.batch * self.accumulation
        return [self._start(first + each) for each in range(self.batch * self.accumulation)]

    def _start(self, sample: int) -> int:
        epoch, index = divmod(sample, self.windows)
        offset, order = self._order(epoch)
        return offset + int(order[index]) * self.context

    def _draw_order(self, epoch: int) -> tuple[int, NDArray[np.int64]]:
        keys = drawn(self.seed, epoch, self.windows + 1)
        offset = int(keys[-1] % np.uint64(self._offsets))
        return offset, np.argsort(keys[:-1], kind="stable")


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the numbers below ``count`` in the order of an epoch."""
    return np.argsort(drawn(seed, epoch, count), kind="stable")


def drawn(seed: int, epoch: int, count: int) -> NDArray[np.uint64]:
    """Draw numbers of 64 bits, the same on every machine: their order is that of an epoch."""
    key = _mixed(np.array([seed & _MASK], np.uint64), _mixed_int(epoch))[0]
    return _mixed(np.arange(count, dtype=np.uint64), int(key))


def _mixed(values: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """SplitMix64's output function of ``key + (value + 1) * golden ratio``, modulo 2**64.

    Source: Steele, Lea, Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014.
    """
    z = (values + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out


def _mixed_int(value: int) -> int:
    return int(_mixed(np.array([value], np.uint64), 0)[0])


def micro_batch_seed(seed: int, step: int, index: int) -> int:
    """Return the seed of what is drawn in a micro-batch, such as dropout: whoever computes it."""
    of_run = int(_mixed(np.array([seed & _MASK], np.uint64), _mixed_int(step))[0])
    return int(_mixed(np.array([index], np.uint64), of_run)[0] >> np.uint64(1))


class Part(NamedTuple):
    """Some windows of an evaluation."""

    inputs: Tensor  # int64 [W, context], as the targets
    targets: Tensor
    counted: Tensor  # bool [W, context]: the targets that are scored
    documents: Tensor | None = None  # int64 [W, context], of each input; None: a query sees all

    @property
    def model_inputs(self) -> tuple[Tensor, ...]:
        """The arguments of a call of the model."""
        return (self.inputs,) if self.documents is None else (self.inputs, self.documents)


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

    def parts(self, rows: int) -> Iterator[Part]:
        """Yield all windows in order, at most ``rows`` at a time.

        A window that reaches over the end of the text is filled up with token 0, not counted.
        """
        places = torch.arange(self.context)
        for at in range(0, len(self), rows):
            starts = self.starts[at : at + rows]
            inputs, targets = _pairs(self.text, starts.tolist(), self.context)
            first = torch.from_numpy(self.first[at : at + rows])[:, None]
            ends = torch.from_numpy(len(self.text) - 1 - starts)[:, None]
            counted = (places >= first) & (places < ends)
            if self.begins is None:
                yield Part(inputs, targets, counted)
                continue
            found = [segments(self.begins, start, self.context) for start in starts.tolist()]
            documents, own = (torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
            yield Part(inputs, targets, counted & own, documents)


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


def _pairs(text: NDArray[Any], starts: list[int], context: int) -> tuple[Tensor, Tensor]:
    windows = np.zeros((len(starts), context + 1), np.int64)
    for row, start in enumerate(starts):
        piece = text[start : start + context + 1]
        windows[row, : len(piece)] = piece
    tokens = torch.from_numpy(windows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _check_length(what: str, length: int, context: int) -> None:
    if length < context + 1:
        fix = "Give more text, or a smaller model.context."
        required = f"at least {context + 1:,} for a context of {context:,}"
        raise InvalidArgument("data.source", f"{length:,} tokens in {what}", required, fix)
