"""The forecast: its sums by hand, and that a calibration measures something."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.lab.study.records_of import config_of, experiment_of, study_of
from tests.lab.study.train.toys import tokens_of
from tilelab.study.ask.config import Arm, RunConfig
from tilelab.study.conduct import forecast
from tilelab.study.conduct.forecast import Price, data_key, price, run_s
from tilelab.study.plan import planned
from tilelab.study.tasks.task import Prepared

PRICE = Price(layer=0.1, rest=0.2)
CPU = torch.device("cpu")


def seconds(**changes: Any) -> float:
    data = tokens_of(bytes(64_000))
    return run_s(config_of(**changes), PRICE, data) - forecast._START_S


def test_a_run_is_its_steps_and_evaluations() -> None:
    sequence = 0.2 + 2 * 0.1
    # 40 steps of 4 sequences; 5 evaluations (the first weights too) of 4 windows, a third each.
    assert seconds() == pytest.approx(40 * 4 * sequence + 5 * 4 * sequence / 3)
    assert seconds(**{"training.accumulation": 2}) == pytest.approx(
        80 * 4 * sequence + 5 * 4 * sequence / 3
    )
    assert seconds(**{"training.checkpointing": True}) == pytest.approx(
        40 * 4 * sequence * 4 / 3 + 5 * 4 * sequence / 3
    )
    assert seconds(**{"training.compile": True}) > seconds() + 30
    # The last evaluation goes over all of the text: 6400 / 32 windows.
    assert seconds(**{"evaluation.final_stride": 32}) == pytest.approx(
        40 * 4 * sequence + (4 * 4 + 200) * sequence / 3
    )


def test_a_calibration_gives_seconds() -> None:
    found = price(config_of(**{"training.precision": "bf16"}), tokens_of(), CPU)
    assert 0 <= found.layer < 1
    assert 0 <= found.rest < 1
    assert found.layer + found.rest > 1e-5


def test_one_calibration_for_all_runs_that_cost_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RunConfig] = []

    tokens = tokens_of()

    def remember(config: RunConfig, data: Prepared, device: torch.device) -> Price:
        asked.append(config)
        assert (data, device) == (tokens, CPU)
        return PRICE

    monkeypatch.setattr(forecast, "price", remember)
    arms = (
        Arm(name="lion", changes={"optimizer.name": "lion"}),
        Arm(name="deep", changes={"model.layers": 8}),
        Arm(name="plain", changes={"attention.implementation": "plain"}),
    )
    tasks = planned(study_of(experiment_of(*arms)))
    corpora = dict.fromkeys((data_key(run.config) for run in tasks), tokens)
    found = forecast.forecast_s(tasks, corpora, CPU)
    assert [config.attention.implementation for config in asked] == ["tilewise", "plain"]
    assert found.keys() == {run.name for run in tasks}
    assert found["optimizers/deep/seed-0"] > found["optimizers/lion/seed-0"]
