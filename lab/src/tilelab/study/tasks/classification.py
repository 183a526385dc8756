"""Classification of sequences (or a number for each) with a BERT: the base of such tasks.

A subclass says where examples come from and what counts (``TextClassification`` in ``long.py`` is
one)::

    class Tones(Classification):
        tokenizers = ("wordpiece",)
        sources = "tones, or the path of a folder"
        place = ("tones", "tones")      # data.source, folder in TILEWISE_DATA
        names = ("train.txt", "test.txt")
        classes = 2

        def read(self, source):
            return "tones", {"train": Rows(...), "held_out": Rows(...)}     # examples.py

There may be several held-out parts; the first one gives the loss. A task whose examples differ much
in length says ``quarters = True``. Its metrics then have the accuracy on each quarter of the
held-out examples, from the shortest to the longest. Batches have no padding: sequences of different
lengths lie one after the other, through ``tilewise.attention_varlen``. An epoch goes once through
all examples in a shuffled order, drawn anew for each epoch from the seed. Batches are full: the
last one of an epoch goes on with the next.

With ``data.tuning`` that share of the training examples is drawn once, the same in every study, and
only trials of a sweep are scored on it. Nothing learns from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tilelab.common.files import first_of
from tilelab.models.bert import Head, HeadPooling
from tilelab.models.layers import pack
from tilelab.study.ask.config import Data, RunConfig, Training
from tilelab.study.ask.metrics import Floor
from tilelab.study.data.order import Samples, shuffled
from tilelab.study.tasks import scores
from tilelab.study.tasks.examples import (
    HUB,
    Encoding,
    Examples,
    Ragged,
    Rows,
    Split,
    encoding_of,
    folder_of,
    unpacked_bytes,
)
from tilelab.study.tasks.families import bert_of
from tilelab.study.tasks.task import AbstractTask, Batch, Batches, DataBytes, Examination, Held
from tilewise.errors import InvalidArgument

_TUNING_SEED = 1  # the same split in every study: it belongs to the data, not to a run
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


class _Examination(Examination):
    def __init__(self, task: Classification, config: RunConfig, data: Any) -> None:
        self._task, self._config, self._data = task, config, data
        self._parts = _scored(config, data)
        self._rows = min(task.most_rows, max(1, task.most_tokens // config.model.context))

    def held_out(self, model: nn.Module, whole: bool, autocast: torch.dtype | None) -> Held:
        first, *_ = self._parts.values()
        watched = min(self._config.evaluation.attention_windows, len(first))
        softmaxes = None
        with scores.evaluating(model, autocast) as device:
            found = {
                name: self._output(model, split, device) for name, split in self._parts.items()
            }
            if watched:
                rows = watched if self._task.watches_at_once else self._rows
                softmaxes = scores.look(model, self._calls(first, watched, rows, device))
        loss = self._task.loss_of(next(iter(found.values())))
        metrics = {**self._task.score(found), self._task.loss_name: loss}
        metrics = {name: metrics[name] for name in self._task.metrics}
        return Held(loss, metrics=metrics, softmaxes=softmaxes)

    def _calls(
        self, split: Any, count: int, rows: int, device: torch.device
    ) -> Iterator[tuple[Any, ...]]:
        for at in range(0, count, rows):
            indices = list(range(at, min(at + rows, count)))
            yield self._task.batch(self._config, self._data, split, indices).to(device).inputs

    def _output(self, model: nn.Module, split: Any, device: torch.device) -> Output:
        calls = self._calls(split, len(split), self._rows, device)
        whole = torch.cat([model(*inputs).double().cpu() for inputs in calls]).numpy()
        lengths = self._data.lengths(split) if self._task.quarters else None
        return Output(whole[:, 0] if self._task.classes == 1 else whole, split.labels, lengths)


class Classification(AbstractTask):
    """A class, or a number, for each sequence; see ``AbstractTask`` and the top of this file.

    With ``pooling="first"`` the head sees the first token through a layer of its own (BERT's way),
    with ``"mean"`` the mean of all tokens. With ``"pairs"`` the two parts of an example are
    sequences of their own, and the head compares their means (``models.bert.Head``).
    """

    families = ("bert",)
    fine_tunes = True
    tunes = True
    classes: int  # 1: a number, learnt by squared error
    quarters: bool = False
    sources: ClassVar[str]  # what data.source may be, in words
    place: ClassVar[tuple[str, str]]  # a ``data.source``, and its folder in TILEWISE_DATA
    names: Sequence[str]  # of the files that ``read`` takes
    fix: str = ""  # where they come from
    on_the_hub: ClassVar[bool] = True  # whether data.source may be a name of the Hub
    # Sequences and tokens of an evaluation's forward pass, if a single one has not more.
    most_rows: ClassVar[int] = 32
    most_tokens: ClassVar[int] = 8192
    watches_at_once: ClassVar[bool] = True  # the sequences whose attention is recorded

    def __init__(self, pooling: HeadPooling = "first") -> None:
        self.pooling: HeadPooling = pooling

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
        hub = config.data.source.startswith(HUB)
        if config.data.source == Data().source or (hub and not self.on_the_hub):
            raise config.unfit("data.source", self.sources)
        for key in ("held_out", "size_cap_bytes"):
            standard = getattr(Data(), key)
            if getattr(config.data, key) != standard:
                why = "which says nothing here: the task has its own held-out part"
                raise config.unfit(f"data.{key}", f"{standard}, {why}")
        if config.training.compile:
            required = "false: sequences differ in length, and every batch would be compiled anew"
            raise config.unfit("training.compile", required)
        for key in ("label_smoothing", "z_loss") if self.classes == 1 else ():
            if getattr(config.training, key):
                raise config.unfit(f"training.{key}", "0: this task learns a number")

    def folder(self, source: str) -> Path:
        """Return the folder of the files."""
        return folder_of(source, *self.place)

    def files(self, source: str) -> dict[str, Path | None]:
        """Return the files that ``read`` takes, None for a missing one; none for the Hub."""
        if source.startswith(HUB):
            return {}
        folder = self.folder(source)
        return {name: first_of(folder, name) for name in self.names}

    def file(self, source: str, name: str) -> Path:
        """Return one of the files; refuse a missing one."""
        path = self.files(source)[name]
        if path is None:
            came, required = f"{self.folder(source)} without {name}", f"{name} or {name}.gz"
            raise InvalidArgument("data.source", came, required, self.fix)
        return path

    def read(self, source: str) -> tuple[str, dict[str, Rows]]:
        """Return the name of the data in words, and ``"train"`` and the parts that are held out."""
        raise NotImplementedError

    def encoding(self, config: RunConfig) -> Encoding:
        """Return how what was read becomes tokens."""
        return encoding_of(config.data.tokenizer)

    def encoded(self, rows: Rows, encoding: Encoding) -> Split:
        """Return a part as tokens."""
        second = None if rows.second is None else Ragged.of(encoding.encode(rows.second))
        kind = np.float64 if self.classes == 1 else np.int64
        first = Ragged.of(encoding.encode(rows.first))
        return Split(first, second, np.array(rows.labels, kind))

    def prepare(self, config: RunConfig, cache: Path) -> Any:
        """Return the data set as tokens, ``Examples``."""
        encoding = self.encoding(config)
        name, parts = self.read(config.data.source)
        rest, tuning = _cut(parts.pop("train"), config.data.tuning)
        rows = self.sampled(rest)
        if len(rows.labels) < len(rest.labels):
            name += f" (a sample of {len(rows.labels):,})"
        splits = {part: self.encoded(rows, encoding) for part, rows in parts.items()}
        tried = None if tuning is None else self.encoded(tuning, encoding)
        least = len(scores.QUARTERS)
        for part, split in {"held-out": next(iter(splits.values())), "tuning": tried}.items():
            if self.quarters and split is not None and 0 < len(split) < least:
                required = f"{least} or more: the accuracy is given by quarters of length"
                came = f"{name} with {len(split)} {part} examples"
                raise InvalidArgument("data.source", came, required)
        source, tokenizer = config.data.source, config.data.tokenizer
        train = self.encoded(rows, encoding)
        return Examples(name, source, *encoding[:3], train, splits, tokenizer, tried)

    def sampled(self, rows: Rows) -> Rows:
        """Return the examples that are learnt from, of those that there are; here all."""
        return rows

    def data_bytes(self, config: RunConfig) -> DataBytes:
        """See ``AbstractTask``; by the sizes of the files."""
        size = 0
        with suppress(InvalidArgument, OSError):  # ``prepare`` will say what is missing
            files = self.files(config.data.source).values()
            size = sum(unpacked_bytes(each) for each in files if each is not None)
        kept, most = _A_BYTE.get(config.data.tokenizer, _A_BYTE["wordpiece"])
        return DataBytes(int(kept * size), int(most * size))

    def batches(self, config: RunConfig, data: Any, seed: int) -> Batches:
        """Full batches of examples, an epoch after the other.

        Raises:
            InvalidArgument: epochs of a data set that has another number of examples.
        """
        if config.budget.epochs is not None and len(data.train) != self.epoch(config):
            came = f"{data.name} with {len(data.train):,} examples to learn from"
            required = f"{self.epoch(config):,}, of which an epoch is"
            fix = f"Set task.train_examples={len(data.train)}, or budget.steps."
            raise InvalidArgument("budget.epochs", came, required, fix)
        training, train = config.training, data.train
        samples = Samples(len(train), training.batch, training.accumulation, seed)
        return lambda step: [
            self.batch(config, data, train, [at for _, at in part]) for part in samples.at(step)
        ]

    def batch(self, config: RunConfig, data: Any, split: Any, indices: list[int]) -> Batch:
        """Return some examples of a part of the data."""
        context = config.model.context
        if self.pooling == "pairs":
            found = [part for each in indices for part in data.pair(split, each, context)]
        else:
            found = [data.sequence(split, each, context) for each in indices]
        rows, kinds = zip(*found, strict=True)
        packed, labels = pack(rows, kinds), torch.from_numpy(split.labels[indices])
        labels = labels.float() if labels.is_floating_point() else labels
        return Batch((packed,), labels, len(indices), len(packed.tokens))

    def model(self, config: RunConfig, data: Any, seed: int, device: torch.device) -> nn.Module:
        """Return a BERT with a head of classes."""
        head = Head("classes", self.classes, self.pooling)
        return bert_of(config, data.vocabulary, head, seed, device)

    def losses(self, output: Tensor, targets: Tensor, training: Training) -> tuple[Tensor, Tensor]:
        """Cross-entropy of the classes, or the squared error of a number."""
        if self.classes == 1:
            error = functional.mse_loss(output[:, 0].float(), targets)
            return error, error.detach()
        return super().losses(output, targets, training)

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

    def examination(self, config: RunConfig, data: Any) -> Examination:
        """Return the examination on all held-out examples."""
        return _Examination(self, config, data)

    def floors(self, config: RunConfig, data: Any, seed: int, cache: Path) -> tuple[Floor, ...]:
        """Return what one answer for all examples scores, in each metric of the task.

        It is the shares of the held-out classes, of which the largest is the answer; for numbers
        it is their mean. No other constant has a lower loss.
        """
        outputs = {name: self._constant(split, data) for name, split in data.held_out.items()}
        found = {**self.score(outputs), self.loss_name: self.loss_of(next(iter(outputs.values())))}
        name = "mean answer" if self.classes == 1 else "majority answer"
        known = [(metric, found.get(metric)) for metric in self.metrics]
        return tuple(
            Floor(name, "none", 0, value, metric) for metric, value in known if value is not None
        )

    def _constant(self, split: Any, data: Any) -> Output:
        labels = split.labels
        if self.classes == 1:
            answer = np.array(labels.mean())
        else:
            with np.errstate(divide="ignore"):
                answer = np.log(np.bincount(labels) / len(labels))
        logits = np.broadcast_to(answer, (len(labels), *answer.shape)).copy()
        return Output(logits, labels, data.lengths(split) if self.quarters else None)

    def attended(self, config: RunConfig, data: Any) -> float:
        """Return the mean over the training tokens of the length of their sequence."""
        context, apart = config.model.context, self.pooling == "pairs"
        lengths = data.lengths(data.train, context, apart=apart).astype(np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def evaluated(self, config: RunConfig, data: Any, whole: bool) -> int:
        """Return the number of all held-out examples."""
        return sum(len(split) for split in _scored(config, data).values())


def tuning_examples(count: int, share: float) -> int:
    """Return how many of so many training examples ``data.tuning`` keeps back."""
    return round(count * share)


def _cut(rows: Rows, share: float) -> tuple[Rows, Rows | None]:
    """Return the examples that may be learnt from, and those that trials are scored on."""
    if not share:
        return rows, None
    count = len(rows.labels)
    order, tried = shuffled(count, _TUNING_SEED, 0), tuning_examples(count, share)
    kept, apart = (rows.take(sorted(part.tolist())) for part in (order[tried:], order[:tried]))
    return kept, apart


def _scored(config: RunConfig, data: Any) -> Mapping[str, Any]:
    """Return the parts that ``evaluation.text`` names."""
    return {"tuning": data.tuning} if config.evaluation.text == "tuning" else data.held_out
