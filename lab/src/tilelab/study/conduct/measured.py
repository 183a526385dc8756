"""Set what a dry run predicts beside what runs measured: milliseconds a step, and memory."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.table import Table

from tilelab.common.files import write_atomically
from tilelab.study.ask.config import RunConfig, Study
from tilelab.study.conduct.predict import gpu_named, predict
from tilelab.study.need import gpu_need
from tilelab.study.plan import planned
from tilelab.study.records.events import RunRecord

FILE = "predicted.json"  # in the folder of a study


@dataclass(frozen=True)
class Checked:
    """One arm: the prediction for the study's chip, and what its runs measured."""

    experiment: str
    arm: str
    device: str  # that ran it; the prediction is for the chip of the study
    runs: int  # that are over
    predicted_step_ms: float
    measured_step_ms: float  # the median over the steps of all runs, without warm-up
    predicted_bytes: int  # beside the process itself, as the measured ones
    measured_bytes: int  # the largest peak of its runs


def checked(study: Study, records: Mapping[str, RunRecord]) -> list[Checked]:
    """Return a row for each arm of a study with a chip; arms without a finished run have none.

    A run that took over the record of another one does not count.
    """
    if not study.chip:
        return []
    chip = gpu_named(study.chip)
    found: dict[tuple[str, str], tuple[RunConfig, list[RunRecord]]] = {}
    for run in planned(study, records):
        record = records.get(run.name)
        if record is None or not record.done or record.memory is None or record.start.same_as:
            continue
        if run.phase == "final":
            found.setdefault((run.experiment, run.arm), (run.config, []))[1].append(record)
    rows = []
    for (experiment, arm), (config, ours) in found.items():
        steps = [each.wall_s for one in ours for each in one.steps if not each.warmup]
        if not steps:
            continue
        predicted = predict(config, chip)
        rows.append(
            Checked(
                experiment,
                arm,
                str(ours[0].start.environment.get("device", "")),
                len(ours),
                1e3 * predicted.step_s,
                1e3 * statistics.median(steps),
                gpu_need(config).training,
                max(each.memory.peak_bytes for each in ours if each.memory is not None),
            )
        )
    return rows


def write(rows: Sequence[Checked], folder: Path) -> None:
    """Put the rows into ``predicted.json`` of a study's folder."""
    write_atomically(folder / FILE, json.dumps([asdict(each) for each in rows], indent=1) + "\n")


def table(study: Study, rows: Sequence[Checked]) -> Table:
    """Return the rows for people; ratios are measured over predicted."""
    devices = ", ".join(dict.fromkeys(each.device for each in rows))
    title = f"Predicted for {study.chip}, measured on {devices}"
    made = Table(title=title, title_justify="left")
    for head in ("experiment", "arm"):
        made.add_column(head, overflow="fold")
    for head in ("predicted step", "measured", "ratio", "predicted memory", "measured", "ratio"):
        made.add_column(head, justify="right")
    for each in rows:
        made.add_row(
            each.experiment,
            each.arm,
            f"{each.predicted_step_ms:,.1f} ms",
            f"{each.measured_step_ms:,.1f} ms",
            f"{each.measured_step_ms / each.predicted_step_ms:.2f}",
            f"{each.predicted_bytes / 1e9:,.1f} GB",
            f"{each.measured_bytes / 1e9:,.1f} GB",
            f"{each.measured_bytes / each.predicted_bytes:.2f}",
        )
    return made
