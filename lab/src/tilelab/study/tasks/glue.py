"""GLUE: nine tasks of single sentences and of pairs, each with its own metrics.

The held-out part is GLUE's development set (of MNLI both, matched and mismatched): the labels of
its test sets are not public.

Source: Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from tilelab.study.ask.config import RunConfig
from tilelab.study.data.corpus import data_folder
from tilelab.study.data.order import shuffled
from tilelab.study.data.wordpiece import WordPiece, wordpiece
from tilelab.study.tasks import scores
from tilelab.study.tasks.classification import Classification, Output
from tilelab.study.tasks.examples import Examples, Ragged, Split
from tilelab.study.tasks.files import ended, folder_of
from tilelab.study.tasks.glue_files import DATASETS, Dataset, Rows, read
from tilelab.study.tasks.hub import HUB
from tilewise.errors import InvalidArgument

__all__ = ["GlueTask"]

_SAMPLE_SEED = 0  # the same examples in every study: a sample belongs to the data, not to a run


class GlueTask(Classification):
    """One of the tasks of GLUE.

    ``data.source`` is one of:

    * ``"glue"``: the folder of that name in ``TILEWISE_DATA``;
    * the path of a folder that has GLUE's own (``CoLA/train.tsv`` and so on);
    * ``"hub:NAME"`` for a data set by its name on the Hub, e.g. ``"hub:nyu-mll/glue"`` (needs the
      package datasets).

    Args:
        dataset: which.
        train_examples: learn from a fixed sample of so many; 0 for all.
        pooling: as of ``Classification``.
    """

    tokenizers = ("wordpiece",)
    sources = "glue, the path of a folder with GLUE's files, or hub:NAME"

    def __init__(
        self, dataset: str, train_examples: int, pooling: Literal["first", "mean"]
    ) -> None:
        super().__init__(pooling)
        self.dataset: Dataset = DATASETS[dataset]
        self.train_examples = train_examples
        self.classes = len(self.dataset.labels) or 1

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that GLUE has for the data set, and the loss."""
        return (*self.dataset.metrics, self.loss_name)

    def prepare(self, config: RunConfig, cache: Path) -> Examples:
        """Return the data set's sentences as tokens."""
        pieces = wordpiece(data_folder())
        parts = read(self.dataset, config.data.source)
        train = parts["train"]
        broken = sum(rows.left_out for rows in parts.values())
        if self.train_examples and self.train_examples < len(train.labels):
            order = shuffled(len(train.labels), _SAMPLE_SEED, 0)[: self.train_examples]
            train = train.take(sorted(order.tolist()))
        elif self.train_examples > len(train.labels):
            came, required = str(self.train_examples), f"at most {len(train.labels)}, or 0 for all"
            raise InvalidArgument("task.train_examples", came, required)
        sample = f" (a sample of {len(train.labels):,})" if self.train_examples else ""
        left_out = f", without {broken:,} broken lines of its files" if broken else ""
        return Examples(
            name=f"GLUE {self.dataset.folder}{sample}{left_out}",
            source=config.data.source,
            vocabulary=pieces.vocabulary,
            start=pieces.first,
            border=pieces.border,
            train=_encoded(train, pieces, self.classes),
            held_out={
                name: _encoded(rows, pieces, self.classes)
                for name, rows in parts.items()
                if name != "train"
            },
            tokenizer="wordpiece",
        )

    def files(self, config: RunConfig) -> list[Path | None]:
        """See ``Classification``."""
        if config.data.source.startswith(HUB):
            return []
        folder = folder_of(config.data.source, "glue", "glue") / self.dataset.folder
        return [ended(folder / f"{file}.tsv") for file, _ in self.dataset.parts.values()]

    def score(self, outputs: Mapping[str, Output]) -> dict[str, float | None]:
        """Return GLUE's metrics of the data set."""
        first, *others = outputs.values()
        found: dict[str, float | None] = {}
        if self.classes == 1:
            pearson = scores.pearson(first.logits, first.labels)
            spearman = scores.spearman(first.logits, first.labels)
            mean = (pearson + spearman) / 2
            return {"pearson": pearson, "spearman": spearman, "pearson_spearman": mean}
        accuracy = scores.accuracy(first.predicted, first.labels)
        found["accuracy"] = accuracy
        for other in others:
            found["accuracy_mismatched"] = scores.accuracy(other.predicted, other.labels)
        if self.classes == 2:
            f1 = scores.f1(first.predicted, first.labels)
            found |= {"f1": f1, "f1_accuracy": (f1 + accuracy) / 2}
            found["matthews"] = scores.matthews(first.predicted, first.labels)
        return found


def _encoded(rows: Rows, pieces: WordPiece, classes: int) -> Split:
    second = None if rows.second is None else Ragged.of(pieces.encode(rows.second))
    kind = np.float64 if classes == 1 else np.int64
    return Split(Ragged.of(pieces.encode(rows.first)), second, np.array(rows.labels, kind))
