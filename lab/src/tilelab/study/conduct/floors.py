"""The floors of a study that is over: computed for the experiments that have none yet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import Floor
from tilelab.study.ask.run import RunSpec
from tilelab.study.records import store
from tilelab.study.records.events import RunRecord
from tilelab.study.records.floors import read_floors, write_floors
from tilelab.study.verdict.judge import unfolded
from tilewise.errors import TilewiseError
from tilewise.folders import cache_folder


def complete(study: Study, folder: Path, say: Callable[[str], None]) -> None:
    """Compute and store the floors of each experiment whose baseline has ended with its first seed.

    An experiment that compares kernels alone has none: it asks whether steps are the same, not what
    is learnt in them. Floors are written one experiment after the other, so a study that is stopped
    here goes on here. Data that is missing, or that changed since the runs, is said and has none.
    """
    records = store.readable_records(folder).whole
    known = read_floors(folder)
    for planned in unfolded(study, records)[0]:
        run = RunSpec(planned.name, planned.baseline_name, planned.seeds[0], planned.baseline)
        record = records.get(run.name)
        asks = any(arm.kind == "training" for arm in planned.arms)  # what is learnt
        if not asks or planned.name in known or record is None or not record.done:
            continue
        try:
            known[planned.name] = _floors(planned, record, say)
            write_floors(folder, known)
        except TilewiseError as error:
            say(f"{planned.name}: no floors. {error}")


def _floors(
    planned: Experiment, record: RunRecord, say: Callable[[str], None]
) -> tuple[Floor, ...]:
    config, cache = planned.baseline, cache_folder()
    data = config.learning.prepare(config, cache)
    if data.sha256 != record.start.corpus.get("sha256"):
        raise TilewiseError(f"The data is not that of {record.start.run} any more.")
    if config.learning.learns_text:
        say(f"{planned.name}: scoring tables of counts and compressors on the held-out text.")
    found: tuple[Floor, ...] = config.learning.floors(config, data, planned.seeds[0], cache)
    return found
