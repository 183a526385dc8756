"""Checks before the first run: checkpoints that do not fit, targets that are reached already."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from torch import nn

from tests.lab.study.conduct.conducting import conductor_of
from tests.lab.study.records_of import config_of as language_of
from tests.lab.study.records_of import experiment_of, study_of
from tests.lab.study.tasks import test_images as images
from tests.lab.study.tasks.small import config_of
from tilelab.models.bert import BERT, Shape
from tilelab.models.vit import Shape as ViTShape
from tilelab.models.vit import ViT
from tilelab.study.ask.config import Arm, RunConfig, Study
from tilelab.study.conduct.conductor import check_checkpoints, check_target
from tilelab.study.plan import planned
from tilelab.study.records import store
from tilelab.study.tasks.classification import Classification
from tilelab.study.tasks.examples import Examples, Ragged, Split
from tilelab.study.tasks.task import Prepared, data_key
from tilewise.errors import InvalidArgument, Unsupported

VOCABULARY = 20
BERT_SHAPE = Shape(layers=1, heads=2, width=16, context=32, vocabulary=VOCABULARY)


def examples() -> Examples:
    split = Split(Ragged.of([[1], [2, 3]]), None, np.array([0, 1]))
    return Examples("some", "some", VOCABULARY, 4, 5, split, {"held_out": split}, "wordpiece")


def study_from(baseline: RunConfig, *arms: Mapping[str, Any]) -> Study:
    changed = tuple(Arm(name=f"arm-{at}", changes=dict(each)) for at, each in enumerate(arms))
    fields = {"name": "tuned", "baseline": baseline, "seeds": (0, 1), "metric": "accuracy"}
    return study_of(experiment_of(*changed, **fields))


def check(study: Study, data: Prepared) -> None:
    tasks = planned(study)
    check_checkpoints(tasks, {data_key(run.config): data for run in tasks})


def test_each_is_loaded_once_and_as_its_runs_load_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        BERT(BERT_SHAPE).save(tmp_path / name)
    asked: list[str] = []
    real = Classification.model

    def counted(self: Classification, config: RunConfig, *rest: Any) -> nn.Module:
        asked.append(Path(config.model.checkpoint).name)
        return real(self, config, *rest)

    monkeypatch.setattr(Classification, "model", counted)
    check(
        study_from(
            config_of(tmp_path, **{"model.checkpoint": str(tmp_path / "one")}),
            {"optimizer.lr": 0.1},
            {"model.dropout.residual": 0.1},
            {"model.checkpoint": str(tmp_path / "two")},
            {"model.checkpoint": ""},
        ),
        examples(),
    )
    assert sorted(asked) == ["one", "two"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.checkpoint": "nowhere"}, r"arm-0: model.checkpoint: got nowhere.*config.json"),
        ({"model.layers": 2}, r"tuned/arm-0: model.layers: got 2.*Set model.layers=1"),
        ({"model.context": 64}, r"tuned/arm-0: model.context: got 64.*at most 32"),
    ],
)
def test_a_bert_that_does_not_fit(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    BERT(BERT_SHAPE).save(tmp_path)
    study = study_from(config_of(tmp_path, **{"model.checkpoint": str(tmp_path)}), changes)
    with pytest.raises(InvalidArgument, match=words):
        check(study, examples())
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "hidden_act": "relu"}))
    with pytest.raises(Unsupported, match=rf"tuned/baseline: {tmp_path}: a BERT with hidden_act"):
        check(study_from(study.experiments[0].baseline), examples())


@pytest.mark.parametrize("there", [False, True])
def test_no_run_starts_before_the_checkpoint_of_a_later_one_is_there(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The language model would run first, and needs no checkpoint."""
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").write_text("the cat sat on the mat. " * 400)
    weights = tmp_path / "weights"
    if there:
        shape = ViTShape(layers=1, heads=2, width=16, image=16, patch=4, channels=1, classes=3)
        ViT(shape).save(weights)
    source = images.folder_of(tmp_path)
    first = experiment_of("lion", baseline=language_of(**{"data.source": str(tmp_path / "text")}))
    later = study_from(images.config_of(source, model__checkpoint=str(weights))).experiments
    study = study_of(first, *later)
    ours = conductor_of(study, tmp_path / "out", jobs=1, module="no.child.shall.start")
    words = r"shape: got image 8; required: 16" if there else r"model.checkpoint: got .*weights"
    with pytest.raises(InvalidArgument, match=rf"tuned/baseline: {words}"):
        ours.conduct(Console(file=io.StringIO()))
    assert not store.folder_of(study, tmp_path / "out").exists()


FIRST = {"step": 0, "loss": 5.5, "bits_per_byte": 7.9}


def test_a_target_above_the_first_loss_is_refused() -> None:
    study = study_of(experiment_of("lion", target=8.0))
    message = r"optimizers\.target: got 8 bits per byte.*7\.9.*--set optimizers\.target=4\.74"
    with pytest.raises(InvalidArgument, match=message):
        check_target(study, "optimizers", FIRST)
    nats = study_of(experiment_of("lion", target=5.5, metric="loss"))
    with pytest.raises(InvalidArgument, match=r"5\.5 nats per token"):
        check_target(nats, "optimizers", FIRST)
    for target in (0.001, 6.0, None):
        check_target(study_of(experiment_of("lion", target=target)), "optimizers", FIRST)
    check_target(study, "optimizers", {**FIRST, "step": 10})
    check_target(study, "optimizers", {**FIRST, "bits_per_byte": None})
    check_target(study, "put.there.by.hand", FIRST)
