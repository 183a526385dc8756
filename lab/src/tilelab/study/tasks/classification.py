"""Classification of sequences (or a number for each) with a BERT: the base of such tasks.

A subclass says where examples come from and what counts (``GlueTask`` in ``glue.py`` is one)::

    class Tones(Classification):
        tokenizers = ("wordpiece",)
        sources = "tones, or the path of a folder"
        classes = 2

        def prepare(self, config, cache):
            return Examples(...)        # tokens and labels, split: tasks/examples.py

``held_out`` of its ``Examples`` may have several parts; the first one gives the loss. A task whose
examples differ much in length says ``quarters = True``. Its metrics then have the accuracy on each
quarter of the held-out examples, from the shortest to the longest. Its ``prepare`` passes what it
made through ``checked``, as there must be four of them. Batches have no padding: sequences of
different lengths lie one after the other, through ``tilewise.attention_varlen``. An epoch goes once
through all examples in a shuffled order, drawn anew for each epoch from the seed. Batches are full:
the last one of an epoch goes on with the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilelab.models.bert import BERT, Head
from tilelab.models.packed import Packed, pack
from tilelab.models.vit import Pooling
from tilelab.study.ask.config import Data, RunConfig, Training
from tilelab.study.data.order import shuffled
from tilelab.study.records.events import LayerSoftmax
from tilelab.study.tasks import scores
from tilelab.study.tasks.examples import Examples, Split, unpacked_bytes
from tilelab.study.tasks.families import bert_of
from tilelab.study.tasks.task import AbstractTask, Batch, DataBytes, Examination, Held, losses
from tilewise.errors import InvalidArgument

_ROWS = 32  # sequences of an evaluation's forward pass, and fewer of long ones
_TOKENS = 8192
# Tokenizer -> bytes in memory for each byte of the files: of what is kept (int32 tokens, borders,
# labels), and at the most, when texts and lists of tokens are there too. More than what GLUE's
# files, reviews, addresses and ListOps took; one with other columns beside the text takes less.
_A_BYTE = {"bytes": (4.0, 11.0), "wordpiece": (1.5, 13.0), "listops": (1.0, 4.0)}


class Output(NamedTuple):
    """The outputs of a model on a held-out part."""

    logits: NDArray[np.float64]  # float64 [n, classes]; [n] of a number
    labels: NDArray[Any]  # int64 [n], or float64 [n]
    lengths: NDArray[np.int64] | None = None  # before any was cut off; None if nobody asks

    @property
    def predicted(self) -> NDArray[np.int64]:
        """The most likely class of each example, the first of equal ones."""
        found: NDArray[np.int64] = self.logits.argmax(axis=-1)
        return found


class ExampleBatches:
    """The training batches of a run: sample s is example ``s % n`` of epoch ``s // n``."""

    def __init__(self, examples: Examples, config: RunConfig, seed: int) -> None:
        self._examples, self._context = examples, config.model.context
        self._batch, self._accumulation = config.training.batch, config.training.accumulation
        count = len(examples.train)
        self._order = lru_cache(maxsize=2)(lambda epoch: shuffled(count, seed, epoch))

    def at(self, step: int) -> list[Batch]:
        """Return the micro-batches of an optimizer step."""
        count = len(self._examples.train)
        found = []
        for part in range(self._accumulation):
            first = (step * self._accumulation + part) * self._batch
            places = [divmod(sample, count) for sample in range(first, first + self._batch)]
            found.append(self._of([int(self._order(epoch)[index]) for epoch, index in places]))
        return found

    def _of(self, indices: list[int]) -> Batch:
        packed, labels = packed_of(self._examples, self._examples.train, indices, self._context)
        return Batch((packed,), labels, len(indices), len(packed.tokens))


def packed_of(
    examples: Examples, split: Split, indices: list[int], context: int
) -> tuple[Packed, Tensor]:
    """Some examples as one packed batch, and their labels."""
    rows, kinds = zip(*(examples.sequence(split, each, context) for each in indices), strict=True)
    labels = torch.from_numpy(split.labels[indices])
    return pack(rows, kinds), labels.float() if labels.is_floating_point() else labels


def looked_up(model: nn.Module) -> int:
    """Count the numbers of a BERT's embeddings."""
    assert isinstance(model, BERT)
    return sum(each.weight.numel() for each in (model.positions, model.kinds, model.tokens))


class _Examination(Examination):
    def __init__(self, task: Classification, config: RunConfig, data: Examples) -> None:
        self._task, self._data, self._context = task, data, config.model.context
        self._watched = config.evaluation.attention_windows

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        with scores.evaluating(model, autocast) as device:
            found = {
                name: self._output(model, split, device)
                for name, split in self._data.held_out.items()
            }
            softmaxes = self._look(model, device)
        loss = self._task.loss_of(next(iter(found.values())))
        metrics = {**self._task.score(found), self._task.loss_name: loss}
        metrics = {name: metrics[name] for name in self._task.metrics}
        return Held(loss, metrics=metrics, softmaxes=softmaxes)

    def _look(self, model: nn.Module, device: torch.device) -> list[LayerSoftmax] | None:
        split = next(iter(self._data.held_out.values()))
        indices = list(range(min(self._watched, len(split))))
        if not indices:
            return None
        packed, _ = packed_of(self._data, split, indices, self._context)
        return scores.look(model, [(packed.to(device),)])

    def _output(self, model: nn.Module, split: Split, device: torch.device) -> Output:
        logits = []
        rows = min(_ROWS, max(1, _TOKENS // self._context))
        for at in range(0, len(split), rows):
            indices = list(range(at, min(at + rows, len(split))))
            packed, _ = packed_of(self._data, split, indices, self._context)
            logits.append(model(packed.to(device)).double().cpu())
        whole: NDArray[np.float64] = torch.cat(logits).numpy()
        lengths = self._data.lengths(split)
        return Output(whole[:, 0] if self._task.classes == 1 else whole, split.labels, lengths)


class Classification(AbstractTask):
    """A class, or a number, for each sequence; see ``AbstractTask`` and the top of this file.

    With ``pooling="first"`` the head sees the first token through a layer of its own (BERT's way),
    with ``"mean"`` the mean of all tokens.
    """

    families = ("bert",)
    fine_tunes = True
    classes: int  # 1: a number, learnt by squared error
    quarters: bool = False
    sources: ClassVar[str]  # what data.source may be, in words

    def __init__(self, pooling: Pooling = "first") -> None:
        self.pooling: Pooling = pooling

    @property
    def metrics(self) -> tuple[str, ...]:
        """The accuracy and the loss, and the accuracy by length where that says something."""
        return ("accuracy", *(scores.QUARTERS if self.quarters else ()), self.loss_name)

    @property
    def loss_name(self) -> str:
        """The metric that the held-out loss is."""
        return "squared_error" if self.classes == 1 else "cross_entropy"

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if config.data.source == Data().source:
            raise InvalidArgument("data.source", repr(config.data.source), self.sources)
        for key in ("held_out", "size_cap_bytes"):
            came, standard = getattr(config.data, key), getattr(Data(), key)
            if came != standard:
                required = (
                    f"{standard}, which says nothing here: the task has its own held-out part"
                )
                raise InvalidArgument(f"data.{key}", str(came), required)
        training = config.training
        if training.compile:
            required = "false: sequences differ in length, and every batch would be compiled anew"
            raise InvalidArgument("training.compile", "true", required)
        if self.classes == 1 and (training.label_smoothing or training.z_loss):
            which = "label_smoothing" if training.label_smoothing else "z_loss"
            required = "0: this task learns a number"
            raise InvalidArgument(f"training.{which}", str(getattr(training, which)), required)

    def checked(self, data: Examples) -> Examples:
        """Return the data, if it has an example for each quarter of the accuracy."""
        count, least = len(next(iter(data.held_out.values()))), len(scores.QUARTERS)
        if self.quarters and count < least:
            required = f"{least} or more: the accuracy is given by quarters of length"
            came = f"{data.name} with {count} held-out examples"
            raise InvalidArgument("data.source", came, required)
        return data

    def files(self, config: RunConfig) -> Sequence[Path | None]:
        """Return the files that ``prepare`` reads; None for a missing one, empty for the Hub."""
        return ()

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """See ``AbstractTask``; by the sizes of the files."""
        size = 0
        with suppress(InvalidArgument, OSError):  # ``prepare`` will say what is missing
            size = sum(unpacked_bytes(each) for each in self.files(config) if each is not None)
        kept, most = _A_BYTE.get(config.data.tokenizer, _A_BYTE["wordpiece"])
        return DataBytes(int(kept * size), int(most * size))

    def batches(self, config: RunConfig, data: Examples, seed: int) -> ExampleBatches:
        """Full batches of examples, an epoch after the other."""
        return ExampleBatches(data, config, seed)

    def model(self, config: RunConfig, data: Examples, seed: int, device: torch.device) -> BERT:
        """Return a BERT with a head of classes."""
        head = Head("classes", self.classes, self.pooling)
        return bert_of(config, data.vocabulary, head, seed, device)

    def losses(self, output: Tensor, targets: Tensor, training: Training) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the classes, or the squared error of a number."""
        if self.classes == 1:
            error = functional.mse_loss(output[:, 0].float(), targets)
            return error, error.detach()
        smoothing, z_loss = training.label_smoothing, training.z_loss
        rows = output[:, None]  # a sequence is a row of one place
        return losses(rows, targets[:, None], label_smoothing=smoothing, z_loss=z_loss)

    def loss_of(self, output: Output) -> float:
        """Return the plain loss of a held-out part."""
        if self.classes == 1:
            return float(np.mean((output.logits - output.labels) ** 2))
        logits, labels = torch.from_numpy(output.logits), torch.from_numpy(output.labels)
        return functional.cross_entropy(logits, labels).item()

    def score(self, outputs: Mapping[str, Output]) -> dict[str, float | None]:
        """Return the metrics of all held-out parts but the loss; here the first part's accuracy."""
        output = next(iter(outputs.values()))
        found: dict[str, float | None] = {
            "accuracy": scores.accuracy(output.predicted, output.labels)
        }
        if self.quarters:
            assert output.lengths is not None
            found |= scores.by_length(output.predicted, output.labels, output.lengths)
        return found

    def examination(self, config: RunConfig, data: Examples) -> Examination:
        """Return the examination on all held-out examples."""
        return _Examination(self, config, data)

    def looked_up(self, model: nn.Module) -> int:
        """Count the numbers of all embeddings."""
        return looked_up(model)

    def attended(self, config: RunConfig, data: Examples) -> float:
        """Return the mean over the training tokens of the length of their sequence."""
        lengths = data.lengths(data.train, config.model.context).astype(np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def evaluated(self, config: RunConfig, data: Examples, whole: bool) -> int:
        """Return the number of all held-out examples."""
        return sum(len(split) for split in data.held_out.values())
