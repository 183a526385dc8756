"""Effects when the faster of an arm and the baseline ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.lab.study.records_of import (
    Behaviour,
    config_of,
    experiment_of,
    known,
    records_of,
    study_of,
)
from tilelab.study.ask.config import Arm, Experiment, Ladder
from tilelab.study.records.events import RunRecord
from tilelab.study.verdict.judge import judge
from tilelab.study.verdict.result import ArmVerdict

SLOW = {"optimizers/lion": Behaviour(pace=0.5)}


def curved(
    experiment: Experiment, behaviours: Any = SLOW, at_s: float = 1.0
) -> dict[str, RunRecord]:
    """Records whose metric after 0, 10, 20, 30 and 40 steps of a time is 8, 6, 4, 3 and 2."""
    records = records_of(study_of(experiment), behaviours)
    for at, record in enumerate(records.values()):
        pace = 2.0 if "/lion/" in record.start.run else 1.0
        jitter = at_s + at * 1e-4
        record.evaluations = [
            replace(
                each,
                bits_per_byte=value,
                train_cpu_s=jitter * pace * each.step,
                train_wall_s=7.0 * jitter * pace * each.step,
            )
            for each, value in zip(record.evaluations, (8.0, 6.0, 4.0, 3.0, 2.0), strict=True)
        ]
    return records


def arm_of(experiment: Experiment, records: dict[str, RunRecord]) -> ArmVerdict:
    return judge(study_of(experiment), records).experiments[0].arms[0]


def test_the_slower_one_is_read_at_the_end_of_the_faster_one() -> None:
    experiment = experiment_of("lion")
    arm = arm_of(experiment, curved(experiment))
    found = known(arm.equal_time)
    # After 40 s lion has taken 20 of its steps, and has 4 bits per byte where the baseline has 2.
    assert (found.rung, found.clock) == ("", "cpu")
    assert found.at_s == pytest.approx(40, rel=1e-3)
    assert found.effect == pytest.approx(2, abs=1e-2)
    assert len(found.differences) == 3
    assert "At equal processor time, the 40.0 s of baseline: +2.0" in arm.notes[-1]
    assert "The schedule of lion had not ended by then, which is against it." in arm.notes[-1]
    # After 50 s it is half-way between two evaluations.
    records = curved(experiment)
    for name, record in records.items():
        if "/lion/" in name:
            continue
        record.evaluations = [
            replace(each, train_cpu_s=1.25 * each.train_cpu_s) for each in record.evaluations
        ]
    assert known(arm_of(experiment, records).equal_time).effect == pytest.approx(1.5, abs=1e-2)
    # Several threads: wall time.
    records = curved(experiment)
    for record in records.values():
        where = {**record.start.environment, "threads": 2}
        record.starts = [replace(record.start, environment=where)]
    arm = arm_of(experiment, records)
    assert known(arm.equal_time).clock == "wall"
    assert "At equal wall time" in arm.notes[-1]


def test_there_is_none_where_both_take_as_long_or_a_seed_is_missing() -> None:
    experiment = experiment_of("wsd")
    arm = arm_of(experiment, curved(experiment))
    assert arm.equal_time is None
    assert not any("equal" in note for note in arm.notes)
    experiment = experiment_of("lion")
    records = curved(experiment)
    del records["optimizers/lion/seed-1"]
    assert arm_of(experiment, records).equal_time is None
    systems = experiment_of(Arm(name="lion", kind="systems"))
    assert arm_of(systems, curved(systems)).equal_time is None
    rungs = {str(steps): {"budget.steps": steps} for steps in (20, 40)}
    ladder = experiment_of("lion", ladder=Ladder(rungs=rungs))
    verdict = judge(study_of(ladder), {})
    assert [arm.equal_time for each in verdict.experiments for arm in each.arms] == [None, None]


def test_an_end_that_scores_all_of_the_text_counts_by_the_windows_of_the_others() -> None:
    whole = experiment_of("lion", baseline=config_of(**{"evaluation.final_stride": 32}))
    records = curved(whole)
    assert arm_of(whole, records).equal_time is None, "older records do not have them"
    for record in records.values():
        last = replace(record.evaluations[-1], on_windows={"bits_per_byte": 2.5})
        record.evaluations[-1] = last
    assert known(arm_of(whole, records).equal_time).effect == pytest.approx(1.5, abs=1e-2)
