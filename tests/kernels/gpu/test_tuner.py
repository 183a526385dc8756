"""The tuner's worker on interpreted kernels: what it calls exact, wrong, and failed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests.lab.gpu_check.records import Event
from tilelab.gpu_check.record import Row
from tilelab.gpu_check.setting import Setting
from tilelab.gpu_check.worker import do
from tilelab.tune import worker
from tilelab.tune.worker import large_cases, read_job
from tilewise.kernels.gpu import Launch, run
from tilewise.kernels.gpu.config import Pass

SETTING = Setting(self_test=True)
WRITES: dict[Pass, set[str]] = {
    "forward": {"out", "lse"},
    "dkdv": {"grad of k", "grad of v"},
    "dq": {"grad of q", "grad of captured 0"},
    "decode": {"out", "lse"},
}


def ask(step: str, job: str) -> Row:
    (row,) = do(SETTING, step, job, worker.perform)
    return row


@pytest.fixture(autouse=True)
def fresh() -> None:
    worker._small.cache_clear()
    worker._large.cache_clear()


@pytest.mark.parametrize("pass_name", WRITES)
def test_all_that_a_pass_writes_is_compared(pass_name: Pass) -> None:
    """Of scores with captured tensors too: their kernels take the blocks of dq."""
    row = ask("check", f"{pass_name} float16 64 + 16x16/4/1")
    assert (row.status, row.note, row.values["spills"]) == ("ok", "", 0)
    assert {key.partition(", ")[2] for key in row.values["ratios"]} == WRITES[pass_name]
    problems = {key.partition(", ")[0] for key in row.values["ratios"]}
    more = {
        "forward": {"causal varlen", "causal in pages"},
        "decode": {"causal in pages"},
    }.get(pass_name, {"causal varlen"})
    assert problems == {"causal alibi softcap", "bias", "causal dropout"} | more


def test_float8_is_judged_by_its_output() -> None:
    row = ask("check", "forward float8_e4m3fn 64 plain 16x16/4/1")
    assert row.status == "ok", row.note
    assert {key.partition(", ")[2] for key in row.values["ratios"]} == {"out"}


def test_what_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although the blocks before it wrote the right values into the same memory."""
    job = "dq float16 64 * 16x16/4/1"
    assert ask("check", job).status == "ok"

    def nothing(launches: Iterable[Launch]) -> int:
        return 0

    monkeypatch.setattr(worker, "spills_in", nothing)
    row = ask("check", job)
    assert row.status == "wrong"
    assert row.note.startswith("document: grad of q: NaN in the wrong places")


def test_a_wrong_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(launches: list[Launch]) -> int:
        run(launches)
        out: torch.Tensor = launches[0].arguments["call"].outputs[0]
        out[0, 0, 3, 1] += 0.01
        return 0

    monkeypatch.setattr(worker, "spills_in", spoilt)
    row = ask("check", "forward float16 64 plain 16x16/4/1")
    assert row.status == "wrong"
    assert "largest error" in row.note


def test_a_wrong_forward_pass_spoils_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """They share the problem; the backward pass reads the result in the table's blocks."""
    with monkeypatch.context() as patch:
        patch.setattr(worker, "spills_in", lambda launches: 0)
        assert ask("check", "forward float16 64 plain 16x16/4/1").status == "wrong"
    assert ask("check", "dkdv float16 64 plain 16x16/4/1").status == "ok"


def test_spills_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Compiled:
        n_spills = 3

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda **arguments: Compiled()

    from tilelab.tune.worker import spills_in

    launches = [Launch(Kernel(), grid, {}, {}) for grid in ((2,), (0,), (1, 1))]
    assert spills_in(launches) == 6


def test_blocks_are_timed_in_turn_and_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker._timed

    def timed(works: Any, job: Any, blocks: Any) -> list[Launch]:
        if blocks.stages == 9:
            raise RuntimeError("out of resources")
        return real(works, job, blocks)

    monkeypatch.setattr(worker, "_timed", timed)
    row = ask("measure", "dq float16 64 * 64x32/4/1 16x16/4/1 16x16/4/9")
    assert row.status == "ok"
    assert set(row.values["samples_s"]) == {"64x32/4/1", "16x16/4/1"}
    assert row.values["failed"] == {"16x16/4/9": "RuntimeError: out of resources"}
    assert ask("measure", "dq float16 64 * 16x16/4/9 64x32/4/1").status == "error"


@pytest.mark.parametrize(
    ("pass_name", "kernel"), [("dq", "query_kernel"), ("decode", "attend_split")]
)
def test_only_the_kernel_of_the_pass_is_timed(pass_name: str, kernel: str) -> None:
    job, (blocks,) = read_job(f"{pass_name} float16 64 * 16x16/4/1")
    own = worker._timed(worker._large(SETTING, job), job, blocks)
    assert [launch.kernel.__name__ for launch in own] == [kernel]


def test_what_only_runs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, with a stub for ``torch.cuda``: real sizes made small, timed by events."""
    stubs = {"_sleep": lambda cycles: None, "synchronize": lambda: None, "Event": Event}
    for name, stub in stubs.items():
        monkeypatch.setattr(torch.cuda, name, stub)
    monkeypatch.setattr(Setting, "device", property(lambda self: torch.device("cpu")))
    for name, size in (("_HIDDEN", 16), ("_BATCH", 1), ("_LENGTH", 32)):
        monkeypatch.setattr(worker, name, size)
    case = large_cases(read_job("dq float16 128 *")[0], tiny=False)[0]
    assert (case.head_dim, case.value_dim, case.queries, case.keys) == (128, 128, 32, 32)
    (row,) = do(Setting(), "measure", "dq float16 64 * 64x32/4/1 16x16/4/1", worker.perform)
    assert row.status == "ok", row.note
    assert all(len(each) >= 5 for each in row.values["samples_s"].values())
