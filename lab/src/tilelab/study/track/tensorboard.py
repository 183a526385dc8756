"""TensorBoard: ``tensorboard --logdir STUDY/tensorboard`` shows the study's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from tilelab.study.track.tracker import AbstractTracker, Point, TrackedRun


class TensorBoard(AbstractTracker):
    """Event files below a folder, in one folder a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def begin(self, run: TrackedRun) -> Mapping[str, int]:
        """See ``AbstractTracker``; what the folder of the run holds is read back."""
        self._drop(run.name)
        known: dict[str, int] = {}
        folder = self._folder / run.name
        if folder.exists():
            kept = EventAccumulator(str(folder), size_guidance={"scalars": 0})
            kept.Reload()
            scalars = kept.Tags()["scalars"]
            known = {tag: max(each.step for each in kept.Scalars(tag)) for tag in scalars}
        if not known:
            described = hparams(dict(run.parameters), {"final/loss": 0.0})  # type: ignore[no-untyped-call]
            experiment, session, _ = described
            for summary in (experiment, session):
                self._writer(run.name).file_writer.add_summary(summary)
        return known

    def _writer(self, name: str) -> Any:
        """Made when there is something to write: looking at a run leaves no file."""
        if name not in self._writers:
            self._writers[name] = SummaryWriter(str(self._folder / name))
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
