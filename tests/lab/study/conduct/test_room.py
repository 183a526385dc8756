"""How many runs at once, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lab.study.records_of import config_of, experiment_of, study_of
from tilelab.study.ask.config import Arm
from tilelab.study.conduct.room import NotEnoughMemoryError, available_bytes, room_for
from tilelab.study.need import gpu_need, host_need, need
from tilelab.study.plan import planned
from tilelab.study.tasks.language import LanguageModelling
from tilelab.study.tasks.task import DataBytes


def tasks_of(**changes: Any) -> Any:
    arms = (Arm(name="wide", changes={"attention.implementation": "plain", **changes}),)
    return planned(study_of(experiment_of(*arms, baseline=config_of(), seeds=(0,))))


def test_as_many_at_once_as_there_is_room_for() -> None:
    tasks = tasks_of()
    one = max(need(run.config).total for run in tasks)
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


def test_data_and_processes_count(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = tasks_of()
    before = max(host_need(run.config).total for run in tasks)
    told = DataBytes(kept=10**10, most=10**10)
    monkeypatch.setattr(LanguageModelling, "data_bytes", lambda self, config: told)
    need_of = host_need(tasks[0].config)
    assert (need_of.data, need_of.reading) == told
    assert max(host_need(run.config).total for run in tasks) == before + 10**10
    with pytest.raises(NotEnoughMemoryError, match=r"10\.0 GB, is its data: use less of it"):
        room_for(tasks, 1, 10**10)
    with pytest.raises(NotEnoughMemoryError, match=r"memory in 3 processes.*30\.0 GB, is its data"):
        room_for(tasks, 1, 3 * 10**10, processes=3)
    assert room_for(tasks, 1, 3 * (before + 10**10), processes=3) == 1
    # While it is read there is no model yet.
    told = DataBytes(kept=1, most=10**10)
    assert host_need(tasks[0].config).total < before + 10**10
    with pytest.raises(NotEnoughMemoryError, match=r"its data while it is read"):
        room_for(tasks, 1, 10**10)


def test_with_a_gpu_the_host_holds_data_and_passes_the_state_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LanguageModelling, "data_bytes", lambda self, config: DataBytes(5, 7))
    config = config_of(**{"attention.implementation": "plain", "training.batch": 64})
    host, gpu = host_need(config, "cuda"), gpu_need(config)
    assert host.training == gpu.state + 5
    assert host.reading == 7
    assert gpu.data == gpu.reading == 0
    assert gpu.total == need(config, "cuda").total > host.total


def test_memory_of_this_machine_is_known_on_linux() -> None:
    found = available_bytes("cpu")
    assert found is None or found > 10**8
