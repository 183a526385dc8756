"""The trackers by name, and how they are filled from records, while runs train and afterwards."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from tilelab.study.ask.metrics import undirected
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.ask.values import nearest
from tilelab.study.plan import Watcher
from tilelab.study.recipes.registry import function_of
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import flat
from tilelab.study.track.tracker import AbstractTracker, Point, TrackedRun
from tilewise.errors import InvalidArgument

# name -> its module and class here, and what to install; it is made with a folder of its own.
TRACKERS = {
    "mlflow": ("mlflow", "Mlflow"),
    "tensorboard": ("tensorboard", "TensorBoard"),
}


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
    module, kind = TRACKERS[name]
    try:
        found = getattr(import_module(f"tilelab.study.track.{module}"), kind)(folder / name)
    except ImportError as error:
        came, fix = f"{name}, and it cannot be imported ({error})", "pip install 'tilewise[track]'"
        raise InvalidArgument("--track", came, f"a Python with the package {name}", fix) from None
    assert isinstance(found, AbstractTracker)
    return found


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
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.close())
        self._trackers.clear()

    def _begin(self, name: str, record: RunRecord, run: RunSpec | None = None) -> None:
        if not self._trackers:
            return
        if run is None:
            start = record.start
            config, seed = start.config, start.seed
        else:
            config, seed = run.config.model_dump(mode="json"), run.seed
        parameters = {
            path: each if isinstance(each, (str, int, float, bool)) else str(each)
            for path, each in flat(config)
        }
        tracked = TrackedRun(self._folder.name, name, {"seed": seed, **parameters})
        followed = self._followed[name] = _Followed(tracked, config)
        for each in list(self._trackers):
            self._try(each, partial(followed.begin_in, each))
        followed.replay(record)
        self._send(followed)

    def _end(self, name: str, record: RunRecord) -> None:
        assert record.end is not None
        status, followed = record.end.status, self._followed.pop(name)
        followed.finish(record)
        self._send(followed)
        for each in list(self._trackers):
            self._try(each, lambda tracker: tracker.end(followed.run, status))

    def _send(self, followed: _Followed) -> None:
        for name in list(self._trackers):
            self._try(name, partial(followed.send_to, name))
        followed.points.clear()

    def _try(self, name: str, do: Callable[[AbstractTracker], object]) -> None:
        """Do something with a tracker; report one that fails, and leave it out from then on.

        It may be a server far away, and its errors are those of its library. Whatever they are,
        they must not cost the study, whose records hold all that the tracker would have got.
        """
        try:
            do(self._trackers[name])
        except Exception as error:
            self.failed = True
            del self._trackers[name]
            self._say(
                f"The tracker {name} failed and is left out from here on ({type(error).__name__}: "
                f"{error}). The same command, when it works again, brings it up to date."
            )


class _Followed:
    """A run, and what is to be sent of it."""

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
            self._tokens[step] = done + learnt
            pairs = [(f"train/{key}", values[key]) for key in _STEP]
            if not values["warmup"] and values["wall_s"] > 0:
                pairs.append(("train/tokens_per_s", learnt / values["wall_s"]))
        elif values["event"] == "evaluation":
            pairs = list(_held_out(values))
            self._add(list(_attention(values)), step, now)
        else:
            return
        tokens = values["tokens"] if values["event"] == "evaluation" else self._tokens[step]
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
