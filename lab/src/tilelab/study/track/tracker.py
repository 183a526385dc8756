"""The base of trackers: places that show the curves of runs, such as TensorBoard or MLflow.

A study needs none: its records are the truth, and a tracker is filled from them, while runs train
and afterwards. A tracker gets nothing twice and may be late: it says itself what it has already
(``begin``), and gets the rest. Those that ship import their packages when they are made.
"""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tilelab.study.ask.metrics import undirected
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.ask.values import nearest
from tilelab.study.plan import Watcher
from tilelab.study.recipes import function_of
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import flat
from tilewise.errors import InvalidArgument

__all__ = ["AbstractTracker", "Point", "TrackedRun"]


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it.

    Args:
        study: name and hash of its study, the name of its folder.
        name: in the study, ``experiment/arm/seed-0``; with ``study`` it is the run's identity.
        parameters: its seed and everything of its config by dotted path, e.g. ``optimizer.lr``.
    """

    study: str
    name: str
    parameters: Mapping[str, str | int | float | bool]


class Point(NamedTuple):
    """One number of a curve.

    Args:
        metric: the curve, e.g. ``"train/loss"``, ``"held_out/loss"``, ``"by_tokens/train/loss"``.
        step: where it is on the axis: optimizer steps, or tokens for the curves ``by_tokens/...``.
        value: finite.
        time_s: when, seconds since 1970.
    """

    metric: str
    step: int
    value: float
    time_s: float


class AbstractTracker(ABC):
    """Keeps runs somewhere. The study reports whatever it raises to the user, and goes on."""

    @abstractmethod
    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        """Find the run where the tracker keeps runs, or make it, with its parameters.

        Returns:
            for each curve that it has already, the largest step on it; points up to there will not
            be sent again.
        """

    @abstractmethod
    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """Add points to a run that was begun; those of one curve come in order."""

    @abstractmethod
    def end(self, run: TrackedRun, status: Literal["done", "diverged"]) -> None:
        """The run is over, and all its points were added. It may be said of one more than once."""

    @abstractmethod
    def close(self) -> None:
        """The study stops here: write out what is held back, for runs that are not over too."""


_TAG = "tilewise.run"  # of MLflow: with the experiment it is the run's identity
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one message, MLflow's own limits
_STATUS = {"done": "FINISHED", "diverged": "FAILED"}


class Mlflow(AbstractTracker):
    """An experiment of MLflow a study, and a run in it a run.

    The folder is that of a file store, where ``MLFLOW_TRACKING_URI`` names no other.
    """

    def __init__(self, folder: Path) -> None:
        from mlflow import entities, tracking

        address = os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri()
        if address.startswith("file:"):
            # From version 3.7 on MLflow refuses file stores unless it is told that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._entities: Any = entities
        self._client: Any = tracking.MlflowClient(tracking_uri=address)
        self._runs: dict[str, str] = {}
        self._open: set[str] = set()  # names of runs that MLflow takes to be running

    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        """See ``AbstractTracker``; the run is found by its tag."""
        client, study = self._client, run.study
        known = client.get_experiment_by_name(study)
        experiment = str(known.experiment_id if known else client.create_experiment(study))
        query = f"tags.`{_TAG}` = '{run.name}'"
        found = client.search_runs([experiment], filter_string=query)
        if found:
            kept, history = found[0], client.get_metric_history
            self._runs[run.name] = kept.info.run_id
            if kept.info.status == "RUNNING":  # whoever filled it was killed
                self._open.add(run.name)
            return {
                name: max(each.step for each in history(kept.info.run_id, name))
                for name in kept.data.metrics
            }
        made = client.create_run(experiment, tags={_TAG: run.name}, run_name=run.name)
        self._runs[run.name] = made.info.run_id
        self._open.add(run.name)
        made_of = self._entities.Param
        parameters = iter([made_of(key, str(value)) for key, value in run.parameters.items()])
        while part := list(islice(parameters, _MOST_PARAMETERS)):
            client.log_batch(made.info.run_id, params=part)
        return {}

    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """See ``AbstractTracker``; a run that was stopped before runs again."""
        if run.name not in self._open:
            self._client.update_run(self._runs[run.name], status="RUNNING")
            self._open.add(run.name)
        made_of = self._entities.Metric
        metrics = iter(
            made_of(each.metric, each.value, int(1000 * each.time_s), each.step) for each in points
        )
        while part := list(islice(metrics, _MOST_METRICS)):
            self._client.log_batch(self._runs[run.name], metrics=part)

    def end(self, run: TrackedRun, status: Literal["done", "diverged"]) -> None:
        """See ``AbstractTracker``."""
        self._terminate(run.name, _STATUS[status])

    def close(self) -> None:
        """See ``AbstractTracker``: runs that are not over were stopped, and can go on."""
        for name in list(self._open):
            self._terminate(name, "KILLED")

    def _terminate(self, name: str, status: str) -> None:
        if name in self._open:
            self._client.set_terminated(self._runs[name], status=status)
            self._open.remove(name)


class TensorBoard(AbstractTracker):
    """Event files below a folder, in one folder a run."""

    def __init__(self, folder: Path) -> None:
        from torch.utils import tensorboard

        self._folder, self._tensorboard = folder, tensorboard
        self._writers: dict[str, Any] = {}

    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        """See ``AbstractTracker``; what the folder of the run holds is read back."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self._drop(run.name)
        known: dict[str, int] = {}
        folder = self._folder / run.name
        if folder.exists():
            kept = EventAccumulator(str(folder), size_guidance={"scalars": 0})
            kept.Reload()
            scalars = kept.Tags()["scalars"]
            known = {tag: max(each.step for each in kept.Scalars(tag)) for tag in scalars}
        if not known:
            hparams: Any = self._tensorboard.summary.hparams
            experiment, session, _ = hparams(dict(run.parameters), {"final/loss": 0.0})
            for summary in (experiment, session):
                self._writer(run.name).file_writer.add_summary(summary)
        return known

    def _writer(self, name: str) -> Any:
        """Made when there is something to write: looking at a run leaves no file."""
        if name not in self._writers:
            self._writers[name] = self._tensorboard.SummaryWriter(str(self._folder / name))
        return self._writers[name]

    def _drop(self, name: str) -> None:
        if name in self._writers:
            self._writers.pop(name).close()

    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """See ``AbstractTracker``."""
        writer = self._writer(run.name)
        for point in points:
            writer.add_scalar(point.metric, point.value, point.step, walltime=point.time_s)
        writer.flush()

    def end(self, run: TrackedRun, status: Literal["done", "diverged"]) -> None:
        """See ``AbstractTracker``."""
        self._drop(run.name)

    def close(self) -> None:
        """See ``AbstractTracker``."""
        for name in list(self._writers):
            self._drop(name)


TRACKERS: dict[str, Callable[[Path], AbstractTracker]]
TRACKERS = {"mlflow": Mlflow, "tensorboard": TensorBoard}  # each is made with a folder of its own


def trackers(names: Sequence[str], folder: Path) -> dict[str, AbstractTracker]:
    """Return the trackers of these names, each once and with a folder of its own.

    A name is one of ``TRACKERS``, or ``file.py:function`` with a function that takes a folder and
    returns a tracker; the file is the user's own and is run.
    """
    return {name: _made(name, folder) for name in dict.fromkeys(names)}


def _made(name: str, folder: Path) -> AbstractTracker:
    file, colon, function = name.rpartition(":")
    if colon and file.endswith(".py"):
        found = function_of("--track", Path(file), function, callable)(folder / function)
        if not isinstance(found, AbstractTracker):
            came = f"a {type(found).__name__} from {name}"
            raise InvalidArgument("--track", came, "a tilelab.study.track tracker")
        return found
    if name not in TRACKERS:
        required = f"one of {', '.join(TRACKERS)}, or file.py:function"
        raise InvalidArgument("--track", repr(name), required, nearest(name, TRACKERS))
    try:
        return TRACKERS[name](folder / name)
    except ImportError as error:
        came, fix = f"{name}, and it cannot be imported ({error})", "pip install 'tilewise[track]'"
        raise InvalidArgument("--track", came, f"a Python with the package {name}", fix) from None


_FLUSH_S = 2.0  # the least between two messages to a tracker
_STEP = ("loss", "lr", "gradient_norm")
_NO_METRIC = ("event", "step", "tokens", "metrics", "softmaxes")
_OF_A_LAYER = ("entropy", "lowest_head", "max_logit")
_BY_TOKENS = "by_tokens/"


class Tracking(Watcher):
    """The trackers of a study. ``say`` is told what goes wrong."""

    def __init__(
        self, folder: Path, trackers: Mapping[str, AbstractTracker], say: Callable[[str], None]
    ) -> None:
        self._folder, self._trackers, self._say = folder, dict(trackers), say
        self._followed: dict[str, _Followed] = {}
        self._next = 0.0
        self.failed = False

    def catch_up(self, runs: Mapping[str, RunRecord]) -> None:
        """Bring the trackers up to runs that are over already; the others come when they start."""
        for name, record in runs.items():
            if self._trackers and record.end is not None:
                self._begin(name, record)
                self._end(name, record)

    def started(self, run: RunSpec) -> None:
        """Find the run in the trackers and add what its record has and they have not."""
        record = RunRecord.read(run.folder(self._folder) / RECORD)
        self._begin(run.name, record, run)

    def event(self, run: RunSpec, values: dict[str, Any]) -> None:
        """Keep what a line of the record adds to the curves."""
        if self._trackers:
            self._followed[run.name].event(values)

    def ended(self, run: RunSpec, record: RunRecord) -> None:
        """Add what was missed, and the last numbers."""
        if self._trackers:
            self._followed[run.name].replay(record)
            self._end(run.name, record)

    def tick(self) -> None:
        """Send what there is, now and then."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _FLUSH_S
            for followed in self._followed.values():
                self._send(followed)

    def close(self) -> None:
        """Send what there is, and close the trackers."""
        for followed in self._followed.values():
            self._send(followed)
        self._all(lambda _, tracker: tracker.close())
        self._trackers.clear()

    def _begin(self, name: str, record: RunRecord, run: RunSpec | None = None) -> None:
        if not self._trackers:
            return
        if run is None:
            config, seed = record.start.config, record.start.seed
        else:
            config, seed = run.config.model_dump(mode="json"), run.seed
        parameters = {
            path: each if isinstance(each, (str, int, float, bool)) else str(each)
            for path, each in flat(config)
        }
        tracked = TrackedRun(self._folder.name, name, {"seed": seed, **parameters})
        followed = self._followed[name] = _Followed(tracked, config)
        self._all(followed.begin_in)
        followed.replay(record)
        self._send(followed)

    def _end(self, name: str, record: RunRecord) -> None:
        assert record.end is not None
        status, followed = record.end.status, self._followed.pop(name)
        followed.finish(record)
        self._send(followed)
        self._all(lambda _, tracker: tracker.end(followed.run, status))

    def _send(self, followed: _Followed) -> None:
        self._all(followed.send_to)
        followed.points.clear()

    def _all(self, do: Callable[[str, AbstractTracker], object]) -> None:
        """Do something with each tracker; report one that fails, and leave it out from then on."""
        for name, tracker in list(self._trackers.items()):
            try:
                do(name, tracker)
            except Exception as error:  # of any library: the study's records hold all of it
                self.failed = True
                del self._trackers[name]
                self._say(
                    f"The tracker {name} failed and is left out from here on "
                    f"({type(error).__name__}: {error}). The same command, when it works again, "
                    "brings it up to date."
                )


class _Followed:
    def __init__(self, run: TrackedRun, config: Mapping[str, Any]) -> None:
        self.run = run
        training, model = config["training"], config["model"]
        self._usual = training["batch"] * training["accumulation"] * model["context"]
        self._tokens = {0: 0}  # learnt from, by the steps done
        self._known: dict[str, dict[str, int]] = {}  # tracker -> curve -> last step
        self.points: list[Point] = []

    def begin_in(self, name: str, tracker: AbstractTracker) -> None:
        self._known[name] = dict(tracker.begin(self.run))

    def replay(self, record: RunRecord) -> None:
        """Everything of a record; what was sent before is left out later."""
        begun = time.time()
        for step in record.steps:
            self.event({"event": "step", **asdict(step)}, begun)
        for evaluation in record.evaluations:
            self.event({"event": "evaluation", **asdict(evaluation)}, begun)

    def event(self, values: Mapping[str, Any], now: float | None = None) -> None:
        step, now = values.get("step", 0), time.time() if now is None else now
        if values["event"] == "step":
            done = self._tokens.get(step - 1, (step - 1) * self._usual)
            learnt = values.get("tokens") or self._usual
            tokens = self._tokens[step] = done + learnt
            pairs = [(f"train/{key}", values[key]) for key in _STEP]
            if not values["warmup"] and values["wall_s"] > 0:
                pairs.append(("train/tokens_per_s", learnt / values["wall_s"]))
        elif values["event"] == "evaluation":
            pairs, tokens = list(_held_out(values)), values["tokens"]
            self._add(list(_attention(values)), step, now)
        else:
            return
        self._add(pairs, step, now)
        losses = [(f"{_BY_TOKENS}{name}", value) for name, value in pairs if _is_learning(name)]
        self._add(losses, tokens, now)

    def finish(self, record: RunRecord) -> None:
        """The numbers that a run is judged by."""
        assert record.end is not None
        pairs: list[tuple[str, Any]] = []
        if record.evaluations:
            last = asdict(record.evaluations[-1])
            pairs = [(f"final/{name.partition('/')[2]}", value) for name, value in _held_out(last)]
        if record.memory is not None:
            pairs.append(("final/peak_bytes", record.memory.peak_bytes))
        self._add(pairs, record.end.step, time.time())

    def send_to(self, name: str, tracker: AbstractTracker) -> None:
        """Send the points that are new to a tracker, which has them from here on."""
        known, found = self._known[name], []
        for point in self.points:
            if point.step > known.get(point.metric, -1):
                known[point.metric] = point.step
                found.append(point)
        if found:
            tracker.add(self.run, found)

    def _add(self, pairs: list[tuple[str, Any]], step: int, now: float) -> None:
        self.points += [
            Point(name, step, float(value), now)
            for name, value in pairs
            if isinstance(value, (int, float)) and math.isfinite(value)
        ]


def _held_out(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    numbers = {key: value for key, value in values.items() if key not in _NO_METRIC}
    for key, value in {**numbers, **values.get("metrics", {})}.items():
        yield f"held_out/{undirected(key)}", value


def _attention(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield a curve for each number of each attention layer, where the evaluation has them."""
    for layer in values.get("softmaxes") or ():
        for key in _OF_A_LAYER:
            yield f"attention/layer_{layer['layer']}/{key}", layer[key]


def _is_learning(name: str) -> bool:
    """Return whether a curve is worth seeing over tokens: losses and metrics, not times."""
    kind, _, metric = name.partition("/")
    return metric == "loss" if kind == "train" else not metric.endswith("_s")
