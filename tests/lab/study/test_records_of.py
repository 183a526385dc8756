"""The builder of records: what it writes is what it made, and behaviours are obeyed."""

from __future__ import annotations

from pathlib import Path

from tests.lab.study.records_of import Behaviour, experiment_of, records_of, study_of, write
from tilelab.study.ask.config import Sweep
from tilelab.study.ask.run import RECORD
from tilelab.study.records.events import RunRecord


def test_records_come_back_from_their_files(tmp_path: Path) -> None:
    sweep = Sweep(values={"baseline": (1e-3, 3e-3), "lion": (1e-4, 3e-4)})
    study = study_of(experiment_of("lion", sweep=sweep))
    behaviours = {
        "lion": Behaviour(diverged={1: 7}, stopped={2: 5}, absent=(0,), survives=2e-4),
        "baseline": Behaviour(starts=(12,), spikes=(30,), word_perplexity=True),
    }
    records = records_of(study, behaviours)
    write(tmp_path, records)
    assert len(records) == 4 + 3 + 2
    for name, record in records.items():
        assert RunRecord.read(tmp_path / "runs" / name / RECORD) == record, name


def test_behaviours_are_obeyed_and_repeatable() -> None:
    study = study_of()
    lion = Behaviour(effect=-0.1, noise=0, diverged={1: 7}, stopped={2: 5}, pace=2.0)
    records = records_of(study, {"lion": lion, "baseline": Behaviour(noise=0)})
    assert records == records_of(study, {"lion": lion, "baseline": Behaviour(noise=0)})
    base, good, broken, partial = (
        records[f"optimizers/{name}"]
        for name in ("baseline/seed-0", "lion/seed-0", "lion/seed-1", "lion/seed-2")
    )
    ends = [(each.evaluations[-1].bits_per_byte or 0) for each in (good, base)]
    assert abs(ends[0] - ends[1] + 0.1) < 1e-9
    assert broken.diverged
    assert broken.steps[-1].loss is None
    assert len(broken.steps) == 7
    assert not partial.done
    assert len(partial.steps) == 5
    assert good.steps[9].wall_s == base.steps[9].wall_s / 2
