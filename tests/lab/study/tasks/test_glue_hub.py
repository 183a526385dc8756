"""GLUE by a name of the Hub: all nine data sets, through the real loading code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.tasks.small import write_glue
from tilelab.study.tasks.glue_files import DATASETS, read
from tilewise.errors import InvalidArgument, Unsupported

# Columns and splits of nyu-mll/glue, which the code under test has its own table of.
ON_THE_HUB = {
    "cola": ("sentence", "label"),
    "sst2": ("sentence", "label"),
    "mrpc": ("sentence1", "sentence2", "label"),
    "qqp": ("question1", "question2", "label"),
    "stsb": ("sentence1", "sentence2", "label"),
    "mnli": ("premise", "hypothesis", "label"),
    "qnli": ("question", "sentence", "label"),
    "rte": ("sentence1", "sentence2", "label"),
    "wnli": ("sentence1", "sentence2", "label"),
}
SPLITS_ON_THE_HUB = {"train": "train", "held_out": "validation"}
MNLI_SPLITS_ON_THE_HUB = {
    "train": "train",
    "matched": "validation_matched",
    "mismatched": "validation_mismatched",
}


@pytest.mark.filterwarnings("ignore:Cannot locate reference")  # of dill, inside datasets
@pytest.mark.parametrize("dataset", list(ON_THE_HUB))
def test_by_a_name_of_the_hub(
    dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real loading code, on a folder that is laid out like a data set of the Hub."""
    datasets = pytest.importorskip("datasets", reason="pip install 'tilewise[hub]'")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    local = read(DATASETS[dataset], str(write_glue(tmp_path / "glue", dataset)))
    splits = MNLI_SPLITS_ON_THE_HUB if dataset == "mnli" else SPLITS_ON_THE_HUB
    lines = ["---", "configs:", f"- config_name: {dataset}", "  data_files:"]
    for part, split in splits.items():
        rows = local[part]
        values = (rows.first, *([] if rows.second is None else [rows.second]), rows.labels)
        columns: dict[str, Any] = dict(zip(ON_THE_HUB[dataset], values, strict=True))
        path = tmp_path / "hub" / dataset / f"{split}-00000-of-00001.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.table(columns), path)
        lines += [f"  - split: {split}", f"    path: {dataset}/{path.name}"]
    (tmp_path / "hub" / "README.md").write_text("\n".join([*lines, "---", ""]))
    assert read(DATASETS[dataset], f"hub:{tmp_path / 'hub'}") == local
    other = "cola" if dataset == "rte" else "rte"
    with pytest.raises(InvalidArgument, match=f"configuration {other}"):
        read(DATASETS[other], f"hub:{tmp_path / 'hub'}")


def test_every_data_set_of_the_hub_is_named() -> None:
    assert list(ON_THE_HUB) == list(DATASETS)


def test_the_hub_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(Unsupported, match=r"pip install 'tilewise\[hub\]'"):
        read(DATASETS["cola"], "hub:nyu-mll/glue")
