"""MLflow: a file store in the study's folder, or the server that ``MLFLOW_TRACKING_URI`` names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from tilelab.study.track.tracker import AbstractTracker, Point, TrackedRun

_TAG = "tilewise.run"  # with the experiment it is the run's identity
_MOST_METRICS, _MOST_PARAMETERS = 1000, 100  # of one message, MLflow's own limits
_STATUS = {"done": "FINISHED", "diverged": "FAILED"}


class Mlflow(AbstractTracker):
    """An experiment of MLflow a study, and a run in it a run.

    The folder is that of a file store, where ``MLFLOW_TRACKING_URI`` names no other.
    """

    def __init__(self, folder: Path) -> None:
        address = os.environ.get("MLFLOW_TRACKING_URI") or folder.absolute().as_uri()
        if address.startswith("file:"):
            # From version 3.7 on MLflow refuses file stores unless it is told that they are meant.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client: Any = MlflowClient(tracking_uri=address)
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
        parameters = iter([Param(key, str(value)) for key, value in run.parameters.items()])
        while part := list(islice(parameters, _MOST_PARAMETERS)):
            client.log_batch(made.info.run_id, params=part)
        return {}

    def add(self, run: TrackedRun, points: Sequence[Point]) -> None:
        """See ``AbstractTracker``; a run that was stopped before runs again."""
        if run.name not in self._open:
            self._client.update_run(self._runs[run.name], status="RUNNING")
            self._open.add(run.name)
        metrics = iter(
            [Metric(each.metric, each.value, int(1000 * each.time_s), each.step) for each in points]
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
