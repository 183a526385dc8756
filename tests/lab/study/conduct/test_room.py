"""How many runs at once, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.study.records_of import config_of, experiment_of, study_of
from tilewise.lab.study.conduct.room import NotEnoughMemoryError, available_bytes, room_for
from tilewise.lab.study.config import Arm
from tilewise.lab.study.need import need
from tilewise.lab.study.plan import planned


def tasks_of(**changes: Any) -> Any:
    arms = (Arm(name="wide", changes={"attention.implementation": "plain", **changes}),)
    return planned(study_of(experiment_of(*arms, baseline=config_of(), seeds=(0,))))


def test_as_many_at_once_as_there_is_room_for() -> None:
    tasks = tasks_of()
    one = max(need(task.run.config).total for task in tasks)
    assert room_for(tasks, 2, 2 * one) == 2
    assert room_for(tasks, 2, int(1.5 * one)) == 1
    assert room_for(tasks, 8, None) == 8
    assert room_for([], 8, 0) == 8


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model.context": 65536}, "N x N matrices of its attention.*implementation=tilewise"),
        ({"attention.implementation": "tilewise", "training.batch": 50_000}, "checkpointing=true"),
        ({"attention.implementation": "tilewise", "model.width": 60_000}, "smaller model.width"),
    ],
)
def test_too_little_memory_names_the_arm_and_the_remedy(changes: Any, words: str) -> None:
    message = rf"arm wide of optimizers needs about [\d.]+ GB.*4\.0 GB are free.*{words}"
    with pytest.raises(NotEnoughMemoryError, match=message):
        room_for(tasks_of(**changes), 2, 4_000_000_000)


def test_memory_of_this_machine_is_known_on_linux() -> None:
    found = available_bytes("cpu")
    assert found is None or found > 10**8
