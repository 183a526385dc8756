"""A run that goes on from a shorter one's steps ends with the bits of one that took them itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.train.toys import (
    CPU,
    Killed,
    bits_of,
    finished,
    killed_after,
    record_of,
    run_of,
    tokens_of,
)
from tilelab.study.ask.run import Execution
from tilelab.study.records.events import RunRecord
from tilelab.study.train.costs import PeakMeter
from tilelab.study.train.session import Session
from tilelab.study.train.state import CheckpointError, branch_step
from tilelab.study.train.trainer import Trainer

STABLE: dict[str, Any] = {"schedule": {"name": "constant", "warmup": 0.0}}
LONGER: dict[str, Any] = {**STABLE, "budget.steps": 10}


def session_in(study: Path, name: str, changes: dict[str, Any], seed: int = 0) -> Session:
    run = replace(run_of(changes, seed), experiment=name, branches=True)
    run = run.executed(Execution(folder=study))
    folder = run.folder(study)
    folder.mkdir(parents=True, exist_ok=True)
    data = tokens_of()
    return Session(
        Trainer(run, data, CPU),
        data,
        folder,
        PeakMeter(CPU),
        peak_flops_s=1e9,
        checkpoint_every_s=0.0,
    )


def ran(study: Path, name: str, changes: dict[str, Any], seed: int = 0) -> RunRecord:
    session_in(study, name, changes, seed).work()
    return record_of(study / "runs" / name / "arm" / f"seed-{seed}")


@pytest.mark.parametrize(
    "choice", [{}, {"optimizer.name": "muon"}, {"model.dropout.residual": 0.1}]
)
def test_the_longer_run_has_the_same_bits(tmp_path: Path, choice: dict[str, Any]) -> None:
    ran(tmp_path, "short", STABLE | choice)
    longer = ran(tmp_path, "long", LONGER | choice)
    assert longer.start.shared_steps == 6
    assert bits_of(longer) == bits_of(finished(tmp_path / "alone", LONGER | choice))
    assert sum(step.cpu_s for step in longer.steps[:6]) > 0.0, "it costs what it would alone"


def test_a_stop_after_the_branch_changes_no_bit(tmp_path: Path) -> None:
    ran(tmp_path, "short", STABLE)
    session = session_in(tmp_path, "long", LONGER)
    with killed_after(8), pytest.raises(Killed):
        session.work()
    longer = ran(tmp_path, "long", LONGER)
    assert [each.from_step for each in longer.starts] == [6, 8]
    assert bits_of(longer) == bits_of(finished(tmp_path / "alone", LONGER))


@pytest.mark.parametrize(
    ("other", "seed"),
    [
        ({"optimizer.lr": 0.02}, 0),
        ({"schedule": {"name": "constant", "warmup": 0.5}}, 0),
        ({"schedule": {"name": "linear"}}, 0),
        ({}, 1),
    ],
)
def test_other_runs_take_their_own_steps(tmp_path: Path, other: dict[str, Any], seed: int) -> None:
    ran(tmp_path, "short", STABLE)
    assert ran(tmp_path, "long", LONGER | other, seed).start.shared_steps == 0


def test_a_trunk_without_its_record_is_left_alone(tmp_path: Path) -> None:
    ran(tmp_path, "short", STABLE)
    (tmp_path / "runs" / "short" / "arm" / "seed-0" / "record.jsonl").unlink()
    assert ran(tmp_path, "long", LONGER).start.shared_steps == 0


def test_a_damaged_trunk_is_an_error(tmp_path: Path) -> None:
    ran(tmp_path, "short", STABLE)
    (path,) = (tmp_path / "trunks").iterdir()
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        ran(tmp_path, "long", LONGER)


def test_a_schedule_branches_where_its_length_begins_to_show() -> None:
    assert branch_step(run_of(STABLE).config) == 6
    assert branch_step(run_of({"schedule": {"name": "linear"}}).config) == 0
