"""What only runs on a GPU, run on the processor with a stub for ``torch.cuda``."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.lab.gpu_check.records import Event
from tilelab.common.clock import seconds_of
from tilelab.gpu_check import program, speed, worker
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import TINY, Setting

STUBBED = Setting("tiled")


class Stream:
    """A stream, which waits for nobody."""

    def wait_stream(self, other: Stream) -> None:
        pass


class Graph:
    """A graph that holds what a call gave, and does not know how to do it again."""

    def replay(self) -> None:
        pass


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def nothing(*_: object) -> None:
        pass

    chip = SimpleNamespace(
        name="Chip 9", major=9, minor=0, multi_processor_count=132, total_memory=10**11
    )
    stubs: dict[str, Any] = {
        **dict.fromkeys(("_sleep", "synchronize", "empty_cache"), nothing),
        "reset_peak_memory_stats": nothing,
        "Event": Event,
        "Stream": Stream,
        "CUDAGraph": Graph,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "graph": lambda graph: nullcontext(),
        "memory_allocated": lambda: 1000,
        "max_memory_allocated": lambda: 5000,
        "mem_get_info": lambda: (10**11, 10**11),
        "get_device_properties": lambda device: chip,
    }
    for name, value in stubs.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Setting, "device", property(lambda self: torch.device("cpu")))
    monkeypatch.setattr(Setting, "sizes", property(lambda self: TINY))

    def compiled(function: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
        def attend(q: Tensor, k: Tensor, v: Tensor, **keywords: Any) -> Tensor:
            return scaled_dot_product_attention(q, k, v, enable_gqa=keywords["enable_gqa"])

        return attend

    monkeypatch.setattr(torch, "compile", compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's profiler, that there is no GPU
        yield


def rows_of(step: str, job: str) -> list[Row]:
    rows = worker.do(STUBBED, step, job)
    assert all(row.status == "ok" for row in rows), rows
    return rows


def test_a_call_is_timed_by_events() -> None:
    assert seconds_of(lambda: time.sleep(0.01), "cuda", 2) == pytest.approx(0.01, rel=0.9)


def test_calls_are_timed_in_turn() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    samples = STUBBED.race(calls, budget_s=0.0)
    assert [len(each) for each in samples.values()] == [5, 5]
    blocks = [name for i, name in enumerate(order) if i == 0 or order[i - 1] != name]
    # Once to know how long, then five rounds back and forth: ab, ab ba ab ba ab.
    assert blocks == ["a", "b"] * 4
    long = STUBBED.race(calls, budget_s=1e9)
    assert [len(each) for each in long.values()] == [25, 25]


def test_the_machine_is_described() -> None:
    (row,) = rows_of("smoke", "machine")
    assert row.values["chip"] == "Chip 9"
    assert row.values["capability"] == "9.0"


@pytest.mark.parametrize("job", ["matrix", "copy"])
def test_ceilings(job: str) -> None:
    (row,) = rows_of("ceilings", job)
    assert len(row.values["samples_s"][job]) >= 5


@pytest.mark.parametrize("job", ["D16 causal 64", "D16 document 64", "D16 decode 96"])
def test_speed_and_its_preparation(job: str) -> None:
    (prepared,) = rows_of("prepare", job)
    assert "ours" in prepared.values["first_call_s"]["forward"]
    for row in rows_of("speed", job):
        samples = row.values["samples_s"]
        assert {"ours", "plain"} <= set(samples)
        assert all(len(each) >= 5 for each in samples.values())
        known = set(samples) | set(row.values["absent"])
        assert known >= {"flex"} | ({"cudnn", "flash", "efficient"} if "causal" in job else set())


def test_flex_is_not_waited_for(tmp_path: Any) -> None:
    """A case whose compilation did not end is timed without FlexAttention."""
    job, setting = "D16 full 64", Setting("tiled", scratch=str(tmp_path))
    rows = list(speed.measure("speed", setting, job))
    assert all("did not end" in row.values["absent"]["flex"] for row in rows)
    assert list(speed.prepare(setting, job))
    rows = list(speed.measure("speed", setting, job))
    assert "flex" in rows[0].values["samples_s"]


def test_training() -> None:
    (row,) = rows_of("training", "GPT-2 small")
    assert set(row.values["samples_s"]) == {"plain", "sdpa", "tilewise"}
    assert row.values["peak_bytes"]["tilewise"] == 5000
    losses = row.values["first_loss"].values()
    assert max(losses) - min(losses) < 0.1


@pytest.mark.slow
def test_host() -> None:
    (row,) = rows_of("host", "microseconds")
    assert {len(each) for each in row.values["samples_s"].values()} == {9}
    (row,) = rows_of("host", "launches")
    assert set(row.values["kernels"]) == set(rows_of("host", "microseconds")[0].values["samples_s"])


@pytest.mark.parametrize("job", ["graph of the forward pass", "graph of both passes"])
def test_a_graph_that_is_not_replayed_is_found(job: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = worker.do(STUBBED, "host", job)
    assert (row.status, row.note) == ("wrong", "out of the graph differs")

    def same(values: Tensor) -> Tensor:
        return values.clone()

    monkeypatch.setattr(torch, "randn_like", same)
    (row,) = rows_of("host", job)
    assert {"replay", "call"} == set(row.values["samples_s"])


def test_a_graph_that_drops_the_same_pairs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does in which the seed is a number of the host."""
    (row,) = worker.do(STUBBED, "host", "graph of dropout")
    notes = "out of a replay with another seed differs; every replay drops the same pairs"
    assert (row.status, row.note) == ("wrong", notes)

    def captured(call: Callable[[], dict[str, Tensor]]) -> tuple[Any, dict[str, Tensor]]:
        found = call()

        def replay() -> None:
            for name, values in call().items():
                found[name].copy_(values)

        return SimpleNamespace(replay=replay), found

    monkeypatch.setattr(program, "_captured", captured)
    rows_of("host", "graph of dropout")


def test_memory_over_its_bound_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of("memory", "backward")
    assert row.values["extra_bytes"] == [0, 0]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 10**9)
    (row,) = worker.do(STUBBED, "memory", "forward")
    assert row.status == "wrong"
    assert row.note == "more than a constant for each row at N = 32, 64"


def test_bits_are_repeated_beside_other_work() -> None:
    (row,) = rows_of("repeat", "D16 causal 64")
    assert row.values["times"] == 8


def test_some_cores_are_left() -> None:
    assert 1 <= worker.processes(12, 3) <= 12
    assert worker.processes(12, 10**6) == 1
