"""One process for all runs: the same bits, one compilation, and a limit of time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.lab.study.conduct.conducting import Conducted, conductor_of
from tests.lab.study.records_of import Behaviour, config_of, experiment_of, known, records_of
from tests.lab.study.records_of import folder_of as written
from tests.lab.study.train.toys import bits_of, run_of, run_of_file, text_file
from tilelab.study.ask.config import Study
from tilelab.study.ask.run import RECORD, Execution, RunSpec
from tilelab.study.conduct.conductor import GO_ON, report_again
from tilelab.study.conduct.pool import Pool, RunError
from tilelab.study.conduct.predict import PREDICTED, checked, gpu_named, predict
from tilelab.study.conduct.process import Local, OneProcess
from tilelab.study.plan import Agenda, planned
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import read_records, read_study, study_folders
from tilelab.study.train.child import Server
from tilelab.study.train.state import CHECKPOINT, step_of
from tilelab.study.verdict.judge import judge
from tilewise import cli
from tilewise.errors import InvalidArgument


def _study(place: Path, changes: dict[str, Any] | None = None) -> Study:
    run = run_of_file(place, changes)
    experiment = experiment_of("same", baseline=run.config, seeds=(0,))
    return Study(name="toy", question="?", experiments=(experiment,))


def _work(study: Study, folder: Path, *, one: bool, **fields: Any) -> Agenda:
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    place = Local(Execution(folder=folder, cache=folder.parent / "cache", **fields))
    agenda = Agenda(study, read_records(folder))
    served = OneProcess(place)
    try:
        Pool(served if one else place, 1, folder).work(agenda, [])
    finally:
        served.close()
    return agenda


@pytest.mark.thorough
def test_runs_of_one_process_have_the_bits_of_their_own(tmp_path: Path) -> None:
    study = _study(tmp_path, {"model.dropout.residual": 0.1})
    alone = _work(study, tmp_path / "alone", one=False).records
    one = _work(study, tmp_path / "one", one=True).records
    assert len(one) == 2
    assert {name: bits_of(each) for name, each in one.items()} == {
        name: bits_of(each) for name, each in alone.items()
    }


@pytest.mark.thorough
def test_a_run_that_fails_in_one_process_is_said(tmp_path: Path) -> None:
    study = _study(tmp_path, {"data.source": "/nowhere/at/all.txt"})
    with pytest.raises(RunError, match=r"optimizers/baseline/seed-0.*/nowhere/at/all.txt"):
        _work(study, tmp_path / "one", one=True)


@pytest.mark.thorough
def test_time_that_is_up_stops_a_run_at_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of_file(tmp_path, {"model.dropout.residual": 0.1})
    server = Server()

    def work(folder: Path, until: float | None = None) -> RunRecord:
        execution = Execution(folder=folder, cache=tmp_path / "cache", until=until)
        server.work(run.executed(execution))
        return RunRecord.read(run.folder(folder) / RECORD)

    assert work(tmp_path / "late", time.time() - 1.0).steps == []
    clock = iter([False, False, True])  # two steps, and then time is up
    with monkeypatch.context() as patch:
        patch.setattr(RunSpec, "time_is_up", property(lambda _: next(clock)))
        stopped = work(tmp_path / "stopped", time.time())
    assert (stopped.done, len(stopped.steps)) == (False, 2)
    assert step_of(run.folder(tmp_path / "stopped") / CHECKPOINT) == 2
    assert bits_of(work(tmp_path / "stopped")) == bits_of(work(tmp_path / "whole"))


def test_a_study_whose_time_is_up_says_so_and_goes_on(tmp_path: Path) -> None:
    conducted = Conducted(tmp_path)
    assert conducted.go(minutes=0.0) == GO_ON
    assert "Time is up, 0 of 4 runs are done. The same command goes on" in conducted.said
    assert conducted.go(minutes=5.0) == 0
    assert "the same command without --minutes computes them" in conducted.said


def test_without_packages_of_the_report_the_records_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conducted = Conducted(tmp_path)
    with monkeypatch.context() as patch:
        for name in [each for each in sys.modules if each.startswith("tilelab.study.report")]:
            patch.delitem(sys.modules, name)
        patch.delattr("tilelab.study.report")
        patch.setitem(sys.modules, "jinja2", None)
        assert conducted.go() == 0
    assert "No report: the package jinja2 is not installed here" in conducted.said
    assert not (conducted.folder / "report.html").exists()
    assert all(each.done for each in conducted.records.values())
    report_again(conducted.folder, Console())
    assert (conducted.folder / "report.html").exists()


def test_one_process_does_one_run_at_a_time_here(tmp_path: Path) -> None:
    study = _study(tmp_path)
    for wrong in ({"jobs": 2}, {"processes": 2}, {"on": "ray"}):
        with pytest.raises(InvalidArgument, match="--one-process with"):
            conductor_of(study, tmp_path, one_process=True, **wrong).conduct(Console())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
def test_another_seed_schedule_or_optimizer_compiles_nothing(tmp_path: Path) -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters
    compiled = {"data": text_file(tmp_path).model_dump(), "training.compile": True}
    compiled["training.loss_tokens"] = 16
    server = Server()

    def graphs_after(name: str, changes: dict[str, Any], seed: int = 0) -> int:
        toy = run_of({**compiled, "model.layers": 1, **changes}, seed)
        run = RunSpec("toy", name, seed, toy.config)
        server.work(run.executed(Execution(folder=tmp_path, cache=tmp_path / "cache")))
        return int(counters["stats"]["unique_graphs"])

    first = graphs_after("adamw", {})
    assert first > 0
    assert graphs_after("adamw", {}, seed=1) == first
    assert graphs_after("wsd", {"schedule.name": "wsd"}) == first
    for optimizer in ("lion", "muon"):
        assert graphs_after(optimizer, {"optimizer.name": optimizer}) == first
    # Another graph: the compiler forgets the first one, and does it again.
    assert graphs_after("dropout", {"model.dropout.residual": 0.1}) != first


def test_predictions_stand_beside_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = config_of(**{"training.precision": "bf16"})
    experiment = experiment_of("lion", baseline=baseline, seeds=(0, 1))
    study = Study(name="x", question="?", experiments=(experiment,), chip="h100")
    records = records_of(study, {"lion": Behaviour(pace=0.5)})
    rows = {each.arm: each for each in checked(study, records)}
    assert {each.runs for each in rows.values()} == {2}
    expected = predict(baseline, gpu_named("h100")).step_s * 1e3
    assert rows["baseline"].predicted_step_ms == pytest.approx(expected)
    ratio = rows["lion"].measured_step_ms / rows["baseline"].measured_step_ms
    assert ratio == pytest.approx(2.0, rel=0.2)
    peak = max(known(each.memory).peak_bytes for each in records.values())
    assert max(each.measured_bytes for each in rows.values()) == peak
    assert checked(study.model_copy(update={"chip": ""}), records) == []
    folder = written(tmp_path / "x-1", study, records)
    report_again(folder, Console(width=200))
    assert "Predicted for h100, measured on" in capsys.readouterr().out
    assert len(json.loads((folder / PREDICTED).read_text())) == 2
    for record in records.values():  # as condensed: a line stands for several steps
        record.steps[:] = [replace(each, wall_s=8 * each.wall_s, of=8) for each in record.steps]
    for each in checked(study, records):
        assert each.measured_step_ms == pytest.approx(rows[each.arm].measured_step_ms)


@pytest.mark.slow
def test_half_an_hour_of_a_gpu_at_a_tiny_size_in_two_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("TILEWISE_CACHE", str(tmp_path / "cache"))
    words = ["study", "gpu30", "--tiny", "true", "--one-process", "--out", str(tmp_path / "out")]
    assert cli.main([*words, "--minutes", "0.5"]) == GO_ON
    (folder,) = study_folders(tmp_path / "out")
    before = {name for name, each in read_records(folder).items() if each.done}
    study = read_study(folder).study
    assert len(before) < len(planned(study))
    assert cli.main([*words, "--minutes", "9"]) == 0
    records = read_records(folder)
    assert {run.name for run in planned(study)} == set(records)
    assert all(each.done for each in records.values())
    assert all(len(records[name].starts) == 1 for name in before)
    twin = records["choices/adamw+linear/seed-0"]
    assert twin.start.same_as == "noise/adamw+linear/seed-0"
    exact = {each.arm: each for each in judge(study, records).experiments[2].arms}
    assert exact["tilewise"].agrees
    assert exact["wrong-scale"].flagged
    assert (folder / "report.html").exists()


def test_the_conductor_and_its_child_need_few_packages() -> None:
    code = (
        "import sys, tilelab.study.train.child, tilelab.study.command\n"
        "slow = {'scipy', 'matplotlib', 'jinja2', 'schedulefree', 'tokenizers'}\n"
        "slow |= {'mlflow', 'tensorboard', 'ray'}\n"
        "print(sorted(slow & sys.modules.keys()))"
    )
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=path, check=True
    )
    assert found.stdout.strip() == "[]"
