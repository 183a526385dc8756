"""Small runs of tasks with a BERT: files of GLUE's format, and a text of few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilelab.study.ask.config import RunConfig, change
from tilelab.study.data.corpus import data_folder

FOLDER = data_folder()
needs_wordpiece = pytest.mark.skipif(
    FOLDER is None or not (FOLDER / "vocab" / "bert-base-uncased").exists(),
    reason="no vocab/bert-base-uncased in TILEWISE_DATA",
)
WORDS = ("good", "bad", "film", "food", "a", "the", "man", "woman", "reads", "eats", "tea", "bread")
LABELS = {
    "cola": "01",
    "sst2": "01",
    "mrpc": "01",
    "qqp": "01",
    "wnli": "01",
    "mnli": ("entailment", "neutral", "contradiction"),
    "qnli": ("entailment", "not_entailment"),
    "rte": ("entailment", "not_entailment"),
    "stsb": ("0.000", "2.500", "5.000"),
}
# GLUE's own headers; CoLA has none.
HEADERS = {
    "sst2": "sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": (
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse "
        "sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label"
    ),
    "qnli": "index question sentence label",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
}
FOLDERS = {
    "cola": "CoLA",
    "sst2": "SST-2",
    "mrpc": "MRPC",
    "qqp": "QQP",
    "stsb": "STS-B",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
    "wnli": "WNLI",
}
_SENTENCES = (
    *("sentence", "sentence1", "sentence2", "question", "question1", "question2"),
    *("#1 String", "#2 String"),
)


def sentence(number: int) -> str:
    """Some words, with quotes that no reader of tables may take for its own."""
    return " ".join(WORDS[(number * step + step) % len(WORDS)] for step in (1, 3, 5)) + ' "'


def row(dataset: str, number: int) -> list[str]:
    """The columns of an example."""
    labels = LABELS[dataset]
    label = labels[number % len(labels)]
    if dataset == "cola":
        return ["src", label, "", sentence(number)]
    header = HEADERS[dataset].split("|" if "|" in HEADERS[dataset] else " ")
    named = {"label": label, "gold_label": label, "score": label, "Quality": label}
    named |= {"is_duplicate": label}
    first, *others = [column for column in header if column in _SENTENCES]
    named |= {first: sentence(number), **dict.fromkeys(others, sentence(number + 7))}
    return [named.get(column, "0") for column in header]


def write_glue(root: Path, dataset: str, examples: int = 24) -> Path:
    """The files of a data set below a folder, as GLUE has them."""
    folder = root / FOLDERS[dataset]
    folder.mkdir(parents=True, exist_ok=True)
    held_out = ("dev_matched", "dev_mismatched") if dataset == "mnli" else ("dev",)
    for shift, name in enumerate(("train", *held_out)):
        lines = [] if dataset == "cola" else [HEADERS[dataset].replace(" ", "\t")]
        if dataset == "mrpc":
            lines = [HEADERS[dataset].replace("|", "\t")]
        lines += ["\t".join(row(dataset, shift + each)) for each in range(examples)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    return root


def tiny(
    task: dict[str, Any], source: Path | str, tokenizer: str, changes: dict[str, Any]
) -> RunConfig:
    """A run of a tiny BERT that learns a task; dotted paths change it."""
    small = {
        "model.family": "bert",
        "model.layers": 1,
        "model.heads": 2,
        "model.width": 16,
        "model.context": 24,
        "data.source": str(source),
        "data.tokenizer": tokenizer,
        "attention.variant": "full",
        "training.batch": 4,
        "budget.steps": 4,
        "evaluation.every": 2,
        "task": task,
    }
    return change(RunConfig(), {**small, **changes})


def config_of(source: Path, dataset: str = "cola", **changes: Any) -> RunConfig:
    """A run of a tiny BERT on a data set in GLUE's files."""
    task = {"name": "glue", "dataset": dataset}
    return tiny(task, source, "wordpiece", {"training.accumulation": 2, **changes})


def masked_config(folder: Path, **changes: Any) -> RunConfig:
    """A tiny BERT on a text in which a word follows from the one before."""
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(WORDS) for _ in range(120)) + "\n")
    task = {"task": {"name": "masked-language-modelling", "probability": 0.2}}
    fewer = {"data.held_out": 0.2, "evaluation.windows": 3}
    return change(config_of(path), {**task, **fewer, **changes})
