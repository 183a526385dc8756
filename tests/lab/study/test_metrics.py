"""Metrics: what a number is called, and which way is better, wherever it decides something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.records_of import (
    Behaviour,
    experiment_of,
    folder_of,
    judged,
    known,
    records_of,
    study_of,
)
from tilelab.study import report
from tilelab.study.ask.config import Experiment, Study, Sweep, change
from tilelab.study.ask.metrics import METRICS, ahead, rank, reached, value_in
from tilelab.study.ask.values import find, names
from tilelab.study.conduct.conductor import check_target
from tilelab.study.verdict.judge import judge
from tilewise.errors import InvalidArgument

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


@pytest.fixture
def any_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment may decide by any metric, whatever its task says of that."""
    monkeypatch.setattr(Experiment, "_check_metric", lambda self, arm, known: None)


def accurate(**fields: Any) -> Experiment:
    """An experiment that decides by accuracy."""
    values = {"smallest_effect": 0.001, "metric": "accuracy", **fields}
    return experiment_of("lion", "wsd", "lion+wsd", **values)


def behaviours(**effects: float) -> dict[str, Behaviour]:
    """Arms whose *loss* moves by so much: accuracy goes the other way, a tenth as far."""
    arms = {"baseline": 0.0, **effects}
    return {
        arm: Behaviour(metric="accuracy", effect=effect, noise=1e-4) for arm, effect in arms.items()
    }


def test_which_way_is_better() -> None:
    assert [ahead("loss", each) for each in (-0.1, 0.0, 0.1)] == [True, False, False]
    assert [ahead("accuracy", each) for each in (-0.1, 0.0, 0.1)] == [False, False, True]
    assert sorted([0.2, 0.9, 0.5], key=lambda value: rank("f1", value)) == [0.9, 0.5, 0.2]
    assert sorted([0.2, 0.9, 0.5], key=lambda value: rank("loss", value)) == [0.2, 0.5, 0.9]
    assert [reached("loss", each, 1.0) for each in (0.9, 1.0, 1.1)] == [True, True, False]
    assert [reached("f1", each, 1.0) for each in (0.9, 1.0, 1.1)] == [False, True, True]


def test_values_of_an_evaluation() -> None:
    evaluation = {"loss": 1.5, "bits_per_byte": None, "metrics": {"f1": 0.5, "accuracy": None}}
    assert value_in(evaluation, "loss") == 1.5
    assert value_in(evaluation, "f1") == 0.5
    for absent in ("bits_per_byte", "accuracy", "matthews"):
        assert value_in(evaluation, absent) is None
    assert value_in({"loss": 1.5}, "f1") is None  # of an old record
    missing = [name for name in METRICS if f"`{name}`" not in PAGE]
    assert not missing, f"docs/metrics.md does not define {missing}"


@pytest.mark.parametrize("task", names("task"))
def test_the_metrics_of_a_task_have_a_row(task: str) -> None:
    missing = [name for name in find("task", task).function().metrics if name not in METRICS]
    assert not missing, f"add {missing} to METRICS in ask/metrics.py: unit and direction"


def test_a_metric_of_no_task_is_refused() -> None:
    required = r"metric: got 'accuracy'.*bits_per_byte, loss, which the task of baseline has"
    with pytest.raises(InvalidArgument, match=required):
        change(experiment_of("lion"), {"metric": "accuracy"})
    with pytest.raises(InvalidArgument, match=r"Did you mean 'loss'"):
        change(experiment_of("lion"), {"metric": "los"})


@pytest.mark.usefixtures("any_metric")
def test_more_accuracy_is_better() -> None:
    effects = {"lion": -0.2, "wsd": 0.2, "lion+wsd": -0.1}
    verdict = judged(accurate(), behaviours(**effects))
    labels = {each.arm: each.label for each in verdict.arms}
    assert labels == {"lion": "better", "wsd": "worse", "lion+wsd": "better"}
    lion = verdict.arms[0]
    assert known(lion.effect) > 0
    assert "accuracy" in lion.reason
    accuracy = lion.measures.metrics["accuracy"]
    assert accuracy.mean > verdict.baseline.measures.metrics["accuracy"].mean
    # Together they should be 0 and lose 0.1 of loss: 0.01 of accuracy more.
    (together,) = verdict.interactions
    assert together.label == "better together"


@pytest.mark.usefixtures("any_metric")
def test_a_sweep_takes_the_best() -> None:
    values = dict.fromkeys(("baseline", "lion", "wsd", "lion+wsd"), (1e-4, 1e-3, 1e-2))
    experiment = accurate(sweep=Sweep(values=values))
    study = study_of(experiment)
    records = records_of(study, behaviours(**{"lion": 0.0, "wsd": 0.0, "lion+wsd": 0.0}))
    found = judge(study, records).experiments[0]
    assert {each.chosen for each in found.sweeps} == {1e-3}


@pytest.mark.usefixtures("any_metric")
def test_a_target_is_reached_from_below() -> None:
    experiment = accurate(target=0.83)
    verdict = judged(experiment, behaviours(**{"lion": -0.2, "wsd": 1.0, "lion+wsd": 0.0}))
    by_arm = {each.arm: each.target for each in verdict.arms}
    assert known(by_arm["lion"]).reached == 3
    assert known(by_arm["wsd"]).reached == 0
    late = judged(change(experiment, {"target": 0.99}), behaviours())
    (note,) = [each for each in late.notes if "target" in each]
    assert "No run reached the target of 0.99 accuracy; the best evaluation was 0.8" in note


@pytest.mark.usefixtures("any_metric")
def test_a_target_that_is_there_already_is_refused() -> None:
    experiment = accurate(target=0.5)
    study = study_of(experiment)
    first = {"step": 0, "loss": 1.0, "metrics": {"accuracy": 0.6}}
    fix = r"target: got 0.5 accuracy; required: more than 0.6, the held-out metric.*=0.8"
    with pytest.raises(InvalidArgument, match=fix):
        check_target(study, experiment.name, first)
    check_target(study, experiment.name, {**first, "metrics": {"accuracy": 0.4}})


@pytest.mark.usefixtures("any_metric")
def test_the_report_says_which_way(tmp_path: Path) -> None:
    values = experiment_of("lion", "wsd", smallest_effect=0.001, metric="accuracy", target=0.83)
    study = Study(name="s", question="Which?", experiments=(values,))
    records = records_of(study, behaviours(lion=-0.2, wsd=0.2))
    page, text = report.write(report.gather(folder_of(tmp_path, study, records)))
    said = text.read_text()
    assert "lion is better by 0.0" in said
    assert "accuracy" in said
    assert "Accuracy by tokens" in said
    assert "above the line an arm is ahead" in said
    assert "The first evaluation at 0.83 accuracy or better" in said
    assert "Loss by" not in said
    assert "| accuracy |" in said  # in the table of quality
    assert page.exists()
