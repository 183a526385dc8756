"""Settings that came later leave old studies, their hashes and their records valid."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilelab.study.ask.config import RunConfig, Study, config_hash, parse
from tilelab.study.records.store import read_study

STUDIES = sorted((Path(__file__).parents[3] / "benchmarks" / "studies").glob("*/study.json"))


def test_there_are_stored_studies() -> None:
    assert len(STUDIES) >= 4


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.parent.name)
def test_the_hash_of_a_stored_study_is_what_it_was(path: Path) -> None:
    values = json.loads(path.read_text())
    assert config_hash(parse(Study, values["study"])) == values["hash"]
    assert read_study(path.parent).study == parse(Study, values["study"])


def test_a_saved_config_says_everything() -> None:
    dumped = RunConfig().model_dump(mode="json")
    assert dumped["task"] == {"name": "language-modelling"}
    assert (dumped["model"]["family"], dumped["model"]["checkpoint"]) == ("gpt2", "")
