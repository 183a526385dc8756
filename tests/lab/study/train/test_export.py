"""Weights of finished runs in the Hugging Face layout: those that were evaluated, ready to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tests.lab.study.in_process import quickly
from tests.lab.study.records_of import experiment_of, folder_of, known, study_of
from tests.lab.study.tasks import test_images as images
from tests.lab.study.tasks.small import WORDS, config_of, needs_wordpiece, write_glue
from tests.lab.study.train.toys import CONFIG, CPU, record_of, session_for, text_file
from tilelab.models import bert, gpt2, vit
from tilelab.study.ask.config import RunConfig, change
from tilelab.study.ask.run import Execution, RunSpec
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child
from tilelab.study.train.export import export
from tilelab.study.train.state import CHECKPOINT, CheckpointError
from tilewise import cli
from tilewise.errors import InvalidArgument, Unsupported

FACTORS: dict[str, Any] = {
    "model.positions": "rotary",
    "model.norm": "rms",
    "model.kv_heads": 1,
    "model.qk_norm": True,
    "model.tied": False,
    "model.bias": False,
    "model.std": 0.08,
}


def trained(config: RunConfig, folder: Path) -> tuple[Any, nn.Module]:
    """The data and the model of a run that has worked in a folder."""
    folder.mkdir(exist_ok=True)
    data = config.learning.prepare(config, folder / "cache")
    session = session_for(config, folder, seed=1, data=data, checkpoint_every_s=10.0)
    session.work()
    return data, session.trainer.model


def language(folder: Path, **changes: Any) -> RunConfig:
    return change(CONFIG, {"data": text_file(folder), **changes})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "gpt2"),
        (FACTORS, "tilewise-gpt2"),
        ({"optimizer": {"name": "schedule-free"}, "schedule": {"name": "constant"}}, "gpt2"),
    ],
    ids=["gpt2", "factors", "average"],
)
def test_a_gpt2_is_the_one_that_was_evaluated(
    changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    config = language(tmp_path, **changes)
    data, last = trained(config, tmp_path / "run")
    record = record_of(tmp_path / "run")
    found = export(record, tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert found == ("gpt2", kind, config.steps)
    averages = config.optimizer.name == "schedule-free"
    with safe_open(tmp_path / "run" / CHECKPOINT, framework="pt") as file:
        kept = {name.partition(".")[0] for name in file.keys()}  # noqa: SIM118
    assert kept == ({"model", "optimizer"} if averages else {"model"})
    model = gpt2.load(tmp_path / "out")
    held = config.learning.examination(config, data).held_out(model, True, None)
    assert held.loss == record.evaluations[-1].loss
    assert torch.equal(model.tokens.weight, last.tokens.weight) != averages  # type: ignore[union-attr, arg-type]


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_a_vit_is_the_one_that_was_evaluated(pooling: str, tmp_path: Path) -> None:
    context = 17 if pooling == "first" else 16
    changes = {"task.pooling": pooling, "model.context": context, "model.feed_forward": 24}
    config = change(images.config_of(images.folder_of(tmp_path)), changes)
    data, _ = trained(config, tmp_path / "run")
    record = record_of(tmp_path / "run")
    found = export(record, tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    assert found.kind == ("vit" if pooling == "first" else "tilewise-vit")
    model = vit.load(tmp_path / "out")
    held = config.learning.examination(config, data).held_out(model, True, None)
    assert held.loss == record.evaluations[-1].loss


@needs_wordpiece
def test_a_head_of_pairs_is_exported_as_one(tmp_path: Path) -> None:
    source = write_glue(tmp_path / "glue", "rte")
    config = config_of(source, "rte", **{"task.pooling": "pairs"})
    data, _ = trained(config, tmp_path / "run")
    record = record_of(tmp_path / "run")
    export(record, tmp_path / "run" / CHECKPOINT, tmp_path / "out")
    model = bert.load(tmp_path / "out", head=None)
    assert model.head == bert.Head("classes", 2, "pairs")
    held = config.learning.examination(config, data).held_out(model, True, None)
    assert held.loss == record.evaluations[-1].loss


@needs_wordpiece
def test_a_masked_run_feeds_one_of_glue_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("\n".join(" ".join(WORDS) for _ in range(120)) + "\n")
    masked = {"task": {"name": "masked-language-modelling"}, "data.held_out": 0.2}
    first = change(config_of(tmp_path / "text"), {**masked, "evaluation.windows": 3})
    weights, out = tmp_path / "weights", tmp_path / "studies"
    tuned = {"model.checkpoint": str(weights), "model.context": 20, "task.pooling": "mean"}
    second = config_of(write_glue(tmp_path / "glue", "mnli"), "mnli", **tuned)
    third = change(
        config_of(write_glue(tmp_path / "glue", "rte"), "rte"),
        {**tuned, "model.checkpoint": str(tmp_path / "again")},
    )

    def work(config: RunConfig, name: str, metric: str) -> RunRecord:
        study = study_of(experiment_of(name=name, baseline=config, metric=metric))
        folder = folder_of(store.folder_of(study, out), study, {})
        execution = Execution(folder=folder, cache=tmp_path / "cache", checkpoint_every_s=0.0)
        run = RunSpec(name, "baseline", 0, config, execution=execution)
        child.work(run)
        return RunRecord.read(run.record)

    def exported(run: str, folder: Path) -> int:
        return cli.main(["study", "export", run, str(folder), "--out", str(out)])

    with quickly(tmp_path):
        work(first, "masked", "loss")
        assert exported("masked/baseline/seed-0", weights) == 0
        told = capsys.readouterr().out
        assert f"masked/baseline/seed-0 after step 4: a model of type bert in {weights}." in told
        assert f"model.checkpoint={weights}" in told
        record = work(second, "tuned", "accuracy")
        assert known(record.end).status == "done"
        # And on from there, from MNLI to RTE; the table of positions is the first run's still.
        assert exported("tuned/baseline", tmp_path / "again") == 0
        assert "tilelab.models.bert loads it" in capsys.readouterr().out
        assert exported("tuned/baseline", tmp_path / "again") == 2
        assert "config.json, model.safetensors; required: a folder that is empty" in (
            capsys.readouterr().err
        )
    pretrained = bert.load(weights, head=None)
    assert (pretrained.head.kind, pretrained.shape.context) == ("masked", 24)
    again = bert.load(tmp_path / "again", head=None)
    assert (again.head, again.shape.context) == (bert.Head("classes", 3, "mean"), 24)
    data = third.learning.prepare(third, tmp_path)
    model = third.learning.model(third, data, 0, CPU)
    assert model.drawn == ("classifier.weight", "classifier.bias")
    assert torch.equal(model.tokens.weight, again.tokens.weight)
    assert not torch.equal(again.tokens.weight, pretrained.tokens.weight)


def test_what_cannot_be_exported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    trained(language(tmp_path, **{"attention.variant": "alibi"}), run)
    with pytest.raises(Unsupported, match=r"gpt2 with attention.variant alibi.*\n.*only causal"):
        export(record_of(run), run / CHECKPOINT, out)
    for path in run.iterdir():
        if path.is_file():
            path.unlink()
    trained(language(tmp_path), run)
    record = record_of(run)
    assert record.end is not None
    (tmp_path / "text").write_text("")
    for folder, words in (
        (tmp_path, r"folder: got .* with .*; required: a folder that is empty"),
        (tmp_path / "text", r"folder: got .*text, a file"),
        (tmp_path / "text" / "below", r"folder: got .*below .*Not a directory"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            export(record, run / CHECKPOINT, folder)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr("tilelab.models.folders.save_file", full)
        with pytest.raises(InvalidArgument, match=r"folder: got .*full \(I/O error: No space left"):
            export(record, run / CHECKPOINT, tmp_path / "full")
    with pytest.raises(CheckpointError, match="nothing is left of the weights of toy/arm/seed-1"):
        export(record, run / "none", out)
    ended = record.end
    record.end = type(ended)("done", ended.step, "", "0" * 64, ended.state_sha256)
    with pytest.raises(CheckpointError, match="not those that the run ended with"):
        export(record, run / CHECKPOINT, out)
    record.end = type(ended)("diverged", 3, "the loss of step 3 is nan", "", "")
    with pytest.raises(InvalidArgument, match=r"diverged: the loss of step 3.*one that is done"):
        export(record, run / CHECKPOINT, out)
    record.end = None
    with pytest.raises(InvalidArgument, match=r"toy/arm/seed-1, which is not over"):
        export(record, run / CHECKPOINT, out)
    record.end = ended
    record.start.config["model"]["norm"] = "rms"
    with pytest.raises(Unsupported, match=r"is not the gpt2 of .*\n.*differ in .*norm.bias"):
        export(record, run / CHECKPOINT, out)
    assert not out.exists()
