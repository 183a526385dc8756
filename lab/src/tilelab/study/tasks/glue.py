"""GLUE: nine tasks of single sentences and of pairs, each with its own metrics.

The held-out part is GLUE's development set (of MNLI both, matched and mismatched): the labels of
its test sets are not public.

Source: Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform for Natural Language
Understanding (2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilelab.models.bert import HeadPooling
from tilelab.study.ask.config import RunConfig
from tilelab.study.data.order import shuffled
from tilelab.study.tasks import scores
from tilelab.study.tasks.classification import Classification, Output, tuning_examples
from tilelab.study.tasks.examples import HUB, Rows, lines, table
from tilewise.errors import InvalidArgument

_SAMPLE_SEED = 0  # the same examples in every study: a sample belongs to the data, not to a run


class GlueTask(Classification):
    """One of the tasks of GLUE, on all of its training examples or a fixed sample of so many."""

    tokenizers = ("wordpiece",)
    sources = "glue, the path of a folder with GLUE's files, or hub:NAME"
    place = ("glue", "glue")

    def __init__(self, dataset: str, train_examples: int, pooling: HeadPooling) -> None:
        super().__init__(pooling)
        self.dataset: Dataset = DATASETS[dataset]
        self.train_examples = train_examples
        self.classes = len(self.dataset.labels) or 1
        self.names = [f"{file}.tsv" for file, _ in self.dataset.parts.values()]
        self.fix = (
            "Get it with: curl -LO https://dl.fbaipublicfiles.com/glue/data/"
            f"{self.dataset.folder}.zip (MRPC: from Microsoft), or set "
            "data.source=hub:nyu-mll/glue."
        )

    def check(self, config: RunConfig) -> None:
        """See ``AbstractTask``."""
        super().check(config)
        if self.pooling == "pairs" and not self.dataset.second:
            required = f"first or mean: {self.dataset.name} has single sentences"
            raise config.unfit("task.pooling", required)

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics that GLUE has for the data set, and the loss."""
        return (*self.dataset.metrics, self.loss_name)

    def folder(self, source: str) -> Path:
        """See ``Classification``."""
        return super().folder(source) / self.dataset.folder

    def read(self, source: str) -> tuple[str, dict[str, Rows]]:
        """See ``Classification``."""
        parts = {name: self.part(source, *where) for name, where in self.dataset.parts.items()}
        broken = sum(rows.left_out for rows in parts.values())
        without = f", without {broken:,} broken lines of its files" if broken else ""
        return f"GLUE {self.dataset.folder}{without}", parts

    def sampled(self, rows: Rows) -> Rows:
        """See ``Classification``."""
        count = len(rows.labels)
        if self.train_examples > count:
            came, required = str(self.train_examples), f"at most {count}, or 0 for all"
            raise InvalidArgument("task.train_examples", came, required)
        if not self.train_examples:
            return rows
        order = shuffled(count, _SAMPLE_SEED, 0)[: self.train_examples]
        return rows.take(sorted(order.tolist()))

    def epoch(self, config: RunConfig) -> int:
        """Return the sample's size, or that of GLUE's own training part without ``data.tuning``."""
        whole = self.dataset.examples
        return self.train_examples or whole - tuning_examples(whole, config.data.tuning)

    def part(self, source: str, file: str, split: str) -> Rows:
        """Return a part of the data set from its file, or from its split on the Hub."""
        if source.startswith(HUB):
            files = "a folder with GLUE's files"
            rows = table(source, self.dataset.name, split, files)
            return _hub_rows(self.dataset, rows, source)
        return _from_file(self.dataset, self.file(source, f"{file}.tsv"))

    def score(self, outputs: Mapping[str, Output]) -> dict[str, float | None]:
        """Return GLUE's metrics of the data set."""
        first, *others = outputs.values()
        if self.classes == 1:
            pearson = scores.pearson(first.logits, first.labels)
            spearman = scores.spearman(first.logits, first.labels)
            mean = (pearson + spearman) / 2
            return {"pearson": pearson, "spearman": spearman, "pearson_spearman": mean}
        accuracy = scores.accuracy(first.predicted, first.labels)
        found: dict[str, float | None] = {"accuracy": accuracy}
        for other in others:
            found["accuracy_mismatched"] = scores.accuracy(other.predicted, other.labels)
        if self.classes == 2:
            f1 = scores.f1(first.predicted, first.labels)
            found |= {"f1": f1, "f1_accuracy": (f1 + accuracy) / 2}
            found["matthews"] = scores.matthews(first.predicted, first.labels)
        return found


_ENTAILMENT = ("entailment", "not_entailment")


@dataclass(frozen=True)
class Dataset:
    """One of the nine."""

    name: str  # also of the Hub's configuration
    folder: str
    examples: int  # of its training part
    first: str  # columns of the sentences
    second: str = ""  # empty for single ones
    label: str = "label"  # a column too
    labels: tuple[str, ...] = ("0", "1")  # what files call the classes 0, 1, ...; empty for a score
    metrics: tuple[str, ...] = ("accuracy",)  # GLUE's, the one of its leaderboard first
    header: tuple[str, ...] = ()  # the columns of a file that does not name them
    hub_first: str = ""  # where columns have other names on the Hub
    hub_second: str = ""
    held_out: Mapping[str, tuple[str, str]] | None = None  # part -> (file, split of the Hub)
    broken_lines: bool = False  # lines of other columns than the header are left out

    @property
    def parts(self) -> dict[str, tuple[str, str]]:
        """Part -> (file, split of the Hub)."""
        held_out = self.held_out or {"held_out": ("dev", "validation")}
        return {"train": ("train", "train"), **held_out}


_PARAPHRASE = ("f1_accuracy", "f1", "accuracy")
DATASETS: Mapping[str, Dataset] = {
    each.name: each
    for each in (
        Dataset(
            "cola",
            "CoLA",
            8_551,
            "sentence",
            metrics=("matthews", "accuracy"),
            header=("source", "label", "star", "sentence"),
        ),
        Dataset("sst2", "SST-2", 67_349, "sentence"),
        Dataset(
            "mrpc",
            "MRPC",
            3_668,
            "#1 String",
            "#2 String",
            label="Quality",
            metrics=_PARAPHRASE,
            hub_first="sentence1",
            hub_second="sentence2",
        ),
        Dataset(
            "qqp",
            "QQP",
            363_846,
            "question1",
            "question2",
            label="is_duplicate",
            metrics=_PARAPHRASE,
            broken_lines=True,
        ),
        Dataset(
            "stsb",
            "STS-B",
            5_749,
            "sentence1",
            "sentence2",
            label="score",
            labels=(),
            metrics=("pearson_spearman", "pearson", "spearman"),
        ),
        Dataset(
            "mnli",
            "MNLI",
            392_702,
            "sentence1",
            "sentence2",
            label="gold_label",
            labels=("entailment", "neutral", "contradiction"),
            metrics=("accuracy", "accuracy_mismatched"),
            hub_first="premise",
            hub_second="hypothesis",
            held_out={
                "matched": ("dev_matched", "validation_matched"),
                "mismatched": ("dev_mismatched", "validation_mismatched"),
            },
        ),
        Dataset("qnli", "QNLI", 104_743, "question", "sentence", labels=_ENTAILMENT),
        Dataset("rte", "RTE", 2_490, "sentence1", "sentence2", labels=_ENTAILMENT),
        Dataset("wnli", "WNLI", 635, "sentence1", "sentence2"),
    )
}


def _from_file(dataset: Dataset, path: Path) -> Rows:
    rows = [line.split("\t") for line in lines(path)]  # whatever quotes are in its text
    header = list(dataset.header) or rows.pop(0)
    columns = [each for each in (dataset.first, dataset.second, dataset.label) if each]
    at = {column: header.index(column) for column in columns if column in header}
    missing = [column for column in columns if column not in at]
    if missing:
        came = f"{path} with the columns {', '.join(header)}"
        raise InvalidArgument("data.source", came, f"a column {missing[0]!r}, as GLUE has it")
    whole = len(rows)
    if dataset.broken_lines:
        rows = [row for row in rows if len(row) == len(header)]
    for number, row in enumerate(rows, 1 + (not dataset.header)):
        if len(row) <= max(at.values()):
            came = f"{path}, line {number}: {len(row)} columns"
            raise InvalidArgument("data.source", came, f"{len(header)}, as GLUE has it")
    labels = [_label(dataset, row[at[dataset.label]], path) for row in rows]
    second = [row[at[dataset.second]] for row in rows] if dataset.second else None
    first = [row[at[dataset.first]] for row in rows]
    return Rows(first, labels, second, whole - len(rows))


def _label(dataset: Dataset, text: str, path: Path) -> float:
    if dataset.labels:
        if text in dataset.labels:
            return dataset.labels.index(text)
        required = f"one of {', '.join(dataset.labels)}"
        raise InvalidArgument("data.source", f"{path} with the label {text!r}", required)
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InvalidArgument("data.source", f"{path} with the score {text!r}", "a number")
    return score


def _hub_rows(dataset: Dataset, rows: Any, source: str) -> Rows:
    first = dataset.hub_first or dataset.first
    second = (dataset.hub_second or dataset.second) if dataset.second else ""
    missing = [each for each in (first, second, "label") if each and each not in rows.column_names]
    if missing:
        came = f"{source} with the columns {', '.join(rows.column_names)}"
        raise InvalidArgument("data.source", came, f"a column {missing[0]!r}")
    labels = [float(each) for each in rows["label"]]
    if dataset.labels:
        odd = [each for each in labels if each not in range(len(dataset.labels))]
        if odd:
            came = f"{source} with the label {odd[0]:g}"
            raise InvalidArgument("data.source", came, f"0 to {len(dataset.labels) - 1}")
    others = [str(each) for each in rows[second]] if second else None
    return Rows([str(each) for each in rows[first]], labels, others)
