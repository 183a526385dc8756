"""Runs: their names, folders, and the way through JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tilelab.study.ask.config import RunConfig, change, config_hash
from tilelab.study.ask.run import RunSpec
from tilewise.errors import InvalidArgument

FINAL = RunSpec("optimizers", "lion+wsd", 3, change(RunConfig(), {"optimizer": "lion"}))
TRIAL = RunSpec("optimizers", "lion", 1000, RunConfig(), phase="sweep", candidate=3e-05)


def test_a_name_says_experiment_arm_seed_and_candidate() -> None:
    assert FINAL.name == "optimizers/lion+wsd/seed-3"
    assert TRIAL.name == "optimizers/lion/sweep-3e-05-seed-1000"
    assert TRIAL.folder(Path("studies/x")) == Path(
        "studies/x/runs/optimizers/lion/sweep-3e-05-seed-1000"
    )


@pytest.mark.parametrize("run", [FINAL, TRIAL])
def test_a_run_comes_back_from_json(run: RunSpec) -> None:
    assert RunSpec.from_json(json.loads(json.dumps(run.as_json()))) == run


def test_six_digits_of_a_candidate_are_enough() -> None:
    run = RunSpec("e", "a", 0, RunConfig(), phase="sweep", candidate=0.1 + 0.2)
    assert run.name == "e/a/sweep-0.3-seed-0"


def test_the_hash_is_of_the_config_alone() -> None:
    assert TRIAL.config_hash == config_hash(RunConfig())
    assert FINAL.config_hash != TRIAL.config_hash


def test_a_config_of_json_is_checked() -> None:
    values = FINAL.as_json()
    values["config"]["optimizer"]["lr"] = -1
    with pytest.raises(InvalidArgument, match=r"optimizer\.lr: got -1"):
        RunSpec.from_json(values)
