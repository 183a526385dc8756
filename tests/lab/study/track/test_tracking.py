"""Trackers: every number once, whatever was stopped and taken up again."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.lab.study.conduct.conducting import Conducted
from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    known,
    record_of,
    records_of,
    study_of,
    write,
)
from tilelab.study.ask.run import RunSpec
from tilelab.study.records.events import LayerSoftmax, RunRecord
from tilelab.study.track.tracker import AbstractTracker, Point, TrackedRun, Tracking, trackers
from tilewise.errors import InvalidArgument

STEPS, EVERY = 40, 10
TOKENS = 4 * 64  # of a step of ``config_of``


def _needs(package: str) -> Any:
    absent = importlib.util.find_spec(package) is None
    reason = f"needs {package}: pip install --no-deps -r .ci/track.txt"
    return pytest.param(package, marks=pytest.mark.skipif(absent, reason=reason))


@pytest.fixture(params=["memory", _needs("tensorboard"), _needs("mlflow")])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return str(request.param)


class Memory(AbstractTracker):
    """Keeps everything in a dictionary, as a server would."""

    def __init__(self, kept: dict[str, Any] | None = None, fails: bool = False) -> None:
        self.kept, self.fails = {} if kept is None else kept, fails

    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        new: dict[str, Any] = {"parameters": dict(run.parameters), "curves": {}, "status": ""}
        curves = self.kept.setdefault(run.name, new)["curves"]
        return {metric: points[-1][0] for metric, points in curves.items()}

    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        if self.fails:
            raise ConnectionError("the server is away")
        for point in points:
            curve = self.kept[run.name]["curves"].setdefault(point.metric, [])
            curve.append((point.step, point.value))

    def end(self, run: TrackedRun, status: Literal["done", "diverged"]) -> None:
        self.kept[run.name]["status"] = status

    def close(self) -> None:
        self.kept["closed"] = True


SERVER: dict[str, dict[str, Any]] = {}


def _tracker(kind: str, folder: Path) -> AbstractTracker:
    if kind == "memory":
        return Memory(SERVER.setdefault(str(folder), {}))
    return trackers([kind], folder)[kind]


def _curves(kind: str, folder: Path, name: str) -> dict[str, list[tuple[int, float]]]:
    """What a tracker shows of a run."""
    if kind == "memory":
        found: dict[str, list[tuple[int, float]]] = SERVER[str(folder)][name]["curves"]
        return found
    if kind == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        kept = EventAccumulator(str(folder / kind / name), size_guidance={"scalars": 0})
        kept.Reload()
        return {
            tag: [(each.step, each.value) for each in kept.Scalars(tag)]
            for tag in kept.Tags()["scalars"]
        }
    client, run = _mlflow(folder, name)
    return {
        metric: sorted(
            (each.step, each.value) for each in client.get_metric_history(run.info.run_id, metric)
        )
        for metric in run.data.metrics
    }


def _mlflow(folder: Path, name: str) -> tuple[Any, Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=(folder / "mlflow").as_uri())
    experiment = client.get_experiment_by_name(folder.name)
    (run,) = (
        each
        for each in client.search_runs([known(experiment).experiment_id])
        if each.info.run_name == name
    )
    return client, run


def _parameters(kind: str, folder: Path, name: str) -> dict[str, Any]:
    if kind == "memory":
        found: dict[str, Any] = SERVER[str(folder)][name]["parameters"]
        return found
    if kind == "mlflow":
        return dict(_mlflow(folder, name)[1].data.params)
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    found = {}
    for path in (folder / kind / name).iterdir():
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag == "_hparams_/session_start_info":
                    assert not found, "told twice"
                    data = HParamsPluginData.FromString(value.metadata.plugin_data.content)
                    given = data.session_start_info.hparams
                    found = {
                        key: getattr(each, each.WhichOneof("kind")) for key, each in given.items()
                    }
    return found


def _run() -> RunSpec:
    return RunSpec("optimizers", "lion", 1, config_of())


def _told(tracking: Tracking, run: RunSpec, record: RunRecord, first: int, last: int) -> None:
    """Steps after ``first`` as they happen, each with its evaluation; 0 with that before it."""
    evaluations = {each.step: each for each in record.evaluations}
    steps = {each.step: each for each in record.steps}
    for at in range(first + 1 if first else 0, last + 1):
        if at in steps:
            tracking.event(run, {"event": "step", **asdict(steps[at])})
        if at in evaluations:
            tracking.event(run, {"event": "evaluation", **asdict(evaluations[at])})
        tracking.tick()


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_a_run_that_is_taken_up_again_goes_on_in_the_same_curves(
    kind: str, end: str, tmp_path: Path
) -> None:
    folder, run = tmp_path / "study-1", _run()
    whole = record_of(run, Behaviour())
    said: list[str] = []
    whole.evaluations = [
        replace(each, softmaxes=[LayerSoftmax(0, 2.5, 0.25, 1.0 * each.step)])
        for each in whole.evaluations
    ]
    gone = LayerSoftmax(0, 2.5, 0.25, None)  # it was not finite
    whole.evaluations[2] = replace(whole.evaluations[2], softmaxes=[gone])

    tracking = Tracking(folder, {kind: _tracker(kind, folder)}, said.append)
    tracking.started(run)
    _told(tracking, run, whole, 0, 15)
    stopped = record_of(run, Behaviour(stopped={1: 15}))
    stopped.evaluations = [each for each in whole.evaluations if each.step <= 15]
    write(folder, {run.name: stopped})
    if end == "stopped":
        tracking.close()  # one that is killed keeps what it has not sent yet

    # The last checkpoint was after step 10: five steps are done again.
    tracking = Tracking(folder, {kind: _tracker(kind, folder)}, said.append)
    tracking.started(run)
    tracking.event(run, {"event": "start", "from_step": 10})
    _told(tracking, run, whole, 10, STEPS)
    tracking.ended(run, whole)
    tracking.close()
    assert said == []
    assert not tracking.failed

    curves = _curves(kind, folder, run.name)
    steps = list(range(1, STEPS + 1))
    losses = [step.loss for step in whole.steps]
    assert [step for step, _ in curves["train/loss"]] == steps
    assert [value for _, value in curves["train/loss"]] == pytest.approx(losses, rel=1e-6)
    assert [at for at, _ in curves["by_tokens/train/loss"]] == [TOKENS * step for step in steps]
    assert [step for step, _ in curves["train/lr"]] == steps
    evaluated = list(range(0, STEPS + 1, EVERY))
    assert [step for step, _ in curves["held_out/bits_per_byte"]] == evaluated
    assert [at for at, _ in curves["by_tokens/held_out/loss"]] == [TOKENS * at for at in evaluated]
    assert "held_out/word_perplexity" not in curves  # it has none
    assert curves["attention/layer_0/entropy"] == [(step, 2.5) for step in evaluated]
    assert curves["attention/layer_0/lowest_head"] == [(step, 0.25) for step in evaluated]
    finite = [(step, float(step)) for step in evaluated if step != 2 * EVERY]
    assert curves["attention/layer_0/max_logit"] == finite
    assert not [name for name in curves if "attention" in name and name.startswith("by_tokens")]
    last = whole.evaluations[-1].loss
    ((step, value),) = curves["final/loss"]
    assert step == STEPS
    assert value == pytest.approx(last, rel=1e-6)
    parameters = _parameters(kind, folder, run.name)
    assert float(parameters["optimizer.lr"]) == run.config.optimizer.options["lr"]
    assert float(parameters["seed"]) == 1
    assert parameters["schedule.name"] == "linear"
    assert parameters["optimizer.betas"] == "[0.9, 0.95]", "a list in words"


def test_runs_that_are_over_are_caught_up_with_once(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "study-1"
    study = study_of(experiment_of("lion", seeds=(0,)))
    records = records_of(study, {"lion": Behaviour(diverged={0: 7})})
    write(folder, records)
    for _ in range(2):
        tracking = Tracking(folder, {kind: _tracker(kind, folder)}, pytest.fail)
        tracking.catch_up(records)
        tracking.close()
    found = _curves(kind, folder, "optimizers/baseline/seed-0")
    assert [step for step, _ in found["train/loss"]] == list(range(1, STEPS + 1))
    lost = _curves(kind, folder, "optimizers/lion/seed-0")
    # The loss that is not finite is no point.
    assert [step for step, _ in lost["train/loss"]] == list(range(1, 7))
    if kind == "mlflow":
        status = [_mlflow(folder, name)[1].info.status for name in records]
        assert status == ["FINISHED", "FAILED"]


def test_a_tracker_that_fails_is_said_and_costs_nothing(tmp_path: Path) -> None:
    folder, run = tmp_path / "study-1", _run()
    whole, said = record_of(run, Behaviour()), list[str]()
    good, bad = Memory(), Memory(fails=True)
    tracking = Tracking(folder, {"bad": bad, "good": good}, said.append)
    tracking.started(run)
    _told(tracking, run, whole, 0, STEPS)
    tracking.ended(run, whole)
    tracking.close()
    assert tracking.failed
    (words,) = said
    assert words.startswith("The tracker bad failed and is left out")
    assert "ConnectionError: the server is away" in words
    assert len(good.kept[run.name]["curves"]["train/loss"]) == STEPS
    assert good.kept[run.name]["status"] == "done"

    bad.fails = False
    write(folder, {run.name: whole})
    tracking = Tracking(folder, {"bad": bad}, said.append)
    tracking.catch_up({run.name: whole})
    assert bad.kept[run.name]["curves"] == good.kept[run.name]["curves"]
    kept = Memory()
    tracking = Tracking(tmp_path / "study-2", {"memory": kept}, pytest.fail)
    tracking.started(run)
    for step in whole.steps[:3]:
        tracking.event(run, {"event": "step", **asdict(step), "tokens": 7})
    tracking.close()
    curves = kept.kept[run.name]["curves"]
    assert [at for at, _ in curves["by_tokens/train/loss"]] == [7, 14, 21], "as the steps say"
    after, told = Memory(), replace(run, seed=2)  # what came before the first step is not known
    tracking = Tracking(tmp_path / "study-2", {"memory": after}, pytest.fail)
    tracking.started(told)
    tracking.event(told, {"event": "step", **asdict(whole.steps[2]), "tokens": 7})
    tracking.close()
    at_tokens = [(2 * TOKENS + 7, whole.steps[2].loss)]
    assert after.kept[told.name]["curves"]["by_tokens/train/loss"] == at_tokens
    # The first two warm up.
    assert curves["train/tokens_per_s"] == [(3, 7 / whole.steps[2].wall_s)]


OWN = """
from tests.lab.study.track.test_tracking import SERVER, Memory

class Own(Memory):
    def __init__(self, folder):
        super().__init__(SERVER.setdefault(str(folder), {}))

def nothing(folder):
    return folder
"""


@pytest.mark.usefixtures("quick_report")
def test_a_study_with_a_tracker_of_ones_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = place / "own.py"
    own.write_text(OWN)
    conducted = Conducted(place, options={"track": (f"{own}:Own",)}, seeds=(0,))
    for _ in range(2):  # the second time all is done, and told
        assert conducted.go() == 0
        kept = SERVER[str(conducted.folder / "Own")]
        for arm in ("baseline", "lion"):
            curves = kept[f"optimizers/{arm}/seed-0"]["curves"]
            names = ("train/loss", "held_out/loss", "final/loss")
            assert [len(curves[name]) for name in names] == [3, 2, 1]

    wrong = {
        f"{own}:nothing": "a PosixPath from",
        f"{own}:absent": "which is no function",
        f"{place}/absent.py:f": "which is no file",
        "mlfow": "Did you mean 'mlflow'",
    }
    for name, words in wrong.items():
        with pytest.raises(InvalidArgument, match=words):
            conducted.go(track=(name,))
    for module in ("mlflow", "mlflow.entities"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InvalidArgument, match=r"--track.*pip install 'tilewise\[track\]'"):
        trackers(["mlflow"], place)
