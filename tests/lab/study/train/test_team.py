"""One run by several processes: the same losses, resumed by any number of them, one writer."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.conftest import ROOT
from tests.lab.study.train.toys import Killed, bits_of, killed_after, run_of, run_of_file
from tilelab.study.ask.run import Execution, RunSpec, Strategy
from tilelab.study.conduct.process import Process
from tilelab.study.data.order import micro_batch_seed
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child
from tilelab.study.train.child import EXPECTED_ERROR
from tilelab.study.train.state import CHECKPOINT
from tilelab.study.train.team import ALONE, Team, check, cut_like, local, whole
from tilewise.errors import InvalidArgument

DROPOUT = {"model.dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1}}


def _execution(
    tmp_path: Path, study: str, processes: int = 2, strategy: Strategy = "ddp", **fields: Any
) -> Execution:
    return Execution(
        folder=tmp_path / study,
        cache=tmp_path / "cache",
        processes=processes,
        strategy=strategy,
        **{"checkpoint_every_s": 0.0, **fields},
    )


def _alone(tmp_path: Path, study: str, run: RunSpec) -> RunRecord:
    """The run, or the rest of it, in this process."""
    run = run.executed(_execution(tmp_path, study, 1))
    child.work(run)
    return RunRecord.read(run.record)


@contextmanager
def _together(run: RunSpec) -> Iterator[Process]:
    process = Process(run)
    try:
        yield process
    finally:
        process.close()


def _finished(execution: Execution, run: RunSpec) -> RunRecord:
    run = run.executed(execution)
    with _together(run) as process:
        outcome = process.outcome()
    assert outcome.code == 0, outcome.lines
    return RunRecord.read(run.record)


def _in_parts(
    tmp_path: Path, run: RunSpec, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> RunRecord:
    """One process is killed after the second step, two after the third; one does the rest."""
    monkeypatch.setenv("TILEWISE_TEST_FAILS", "killed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with killed_after(2), pytest.raises(Killed):
        _alone(tmp_path, "parts", run)
    failing = "tests.lab.study.train.failing_child"
    two = _execution(tmp_path, "parts", 2, strategy, module=failing)
    with _together(run.executed(two)) as process:
        assert process.outcome().code == -signal.SIGKILL, process.outcome().lines
    record = _alone(tmp_path, "parts", run)
    assert [start.environment["processes"] for start in record.starts] == [1, 2, 1]
    assert [start.from_step for start in record.starts] == [0, 2, 3]
    return record


@pytest.mark.thorough
def test_two_processes_of_one_micro_batch_each_give_the_bits_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    run = run_of_file(tmp_path, DROPOUT)
    # In a process of its own too, as the study runs it.
    one = _finished(_execution(tmp_path, "one", 1), run)
    two = _finished(_execution(tmp_path, "two"), run)
    assert bits_of(two, kernels=False) == bits_of(one, kernels=False)
    assert len(two.starts) == 1  # one process writes
    environment = two.start.environment
    assert (environment["processes"], environment["strategy"]) == (2, "ddp")
    assert environment["core"] is None
    assert one.start.environment["processes"] == 1
    files = {path.name for path in run.folder(tmp_path / "two").iterdir()}
    assert files == {path.name for path in run.folder(tmp_path / "one").iterdir()}
    assert CHECKPOINT in files
    assert not list(scratch.iterdir()), "nothing is left behind"


@pytest.mark.thorough
def test_a_process_that_aborts_after_its_work_does_not_fail_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As threads of Gloo do at the end of the interpreter, about once in a hundred runs."""
    monkeypatch.setenv("TILEWISE_TEST_FAILS", "teardown")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    failing = "tests.lab.study.train.failing_child"
    record = _finished(_execution(tmp_path, "two", module=failing), run_of_file(tmp_path))
    assert record.done


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "changes"),
    [
        # Three micro-batches' gradients are added up in another order: (0 + 2) + (1 + 3).
        ("ddp", {"training.accumulation": 4}),
        ("ddp", {"optimizer.name": "muon", "training.precision": "bf16"}),
        ("ddp", {"training.loss_tokens": 7, "model.tied": False}),
        ("fsdp", {**DROPOUT}),
        ("fsdp", {"optimizer.name": "sgd", "training.precision": "bf16"}),
        ("fsdp", {"optimizer.name": "lion", "training.accumulation": 4}),
    ],
    ids=str,
)
def test_other_sums_differ_by_rounding_alone(
    strategy: Strategy, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of_file(tmp_path, changes)
    one = _alone(tmp_path, "one", run)
    two = _finished(_execution(tmp_path, "two", strategy=strategy), run)
    # The first losses are of the same weights, and are added up in the same order.
    assert two.steps[0].loss == one.steps[0].loss
    assert two.evaluations[0].loss == one.evaluations[0].loss
    for mine, theirs in zip(one.steps, two.steps, strict=True):
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)
        assert theirs.gradient_norm == pytest.approx(mine.gradient_norm, rel=1e-4)
    assert two.evaluations[-1].loss == pytest.approx(one.evaluations[-1].loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_goes_on_with_another_number_of_processes(
    strategy: Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process, then two (with fsdp each holds half of everything), then one."""
    run = run_of_file(tmp_path, DROPOUT if strategy == "ddp" else {})
    parts, whole = _in_parts(tmp_path, run, strategy, monkeypatch), _alone(tmp_path, "whole", run)
    assert [start.environment["strategy"] for start in parts.starts] == [None, strategy, None]
    if strategy == "ddp":
        assert bits_of(parts, kernels=False) == bits_of(whole, kernels=False)
    for mine, theirs in zip(whole.steps, parts.steps, strict=True):
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("fails", "code", "words"),
    [
        ("wrong", EXPECTED_ERROR, "the text is gone: get it back"),
        pytest.param("crash", 1, "ValueError: a bug of ours", marks=pytest.mark.slow),
        pytest.param("killed", -9, "process 1 was ended by signal 9", marks=pytest.mark.slow),
    ],
)
def test_when_one_process_fails_the_run_ends_with_its_reason(
    fails: str, code: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TILEWISE_TEST_FAILS", fails)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    run = run_of_file(tmp_path, {"budget.steps": 1000})
    run = run.executed(_execution(tmp_path, "study", module="tests.lab.study.train.failing_child"))
    with _together(run) as process:
        outcome = process.outcome()  # of a lead that waits for ever there would be none
    assert outcome.code == code, outcome.lines
    assert words in outcome.lines[-1]
    # The lead is gone too: its lock is free, and the run goes on from its checkpoint.
    with child.locked(run.record.parent):
        assert RunRecord.read(run.record).checkpoint == 3


@pytest.mark.parametrize(
    ("strategy", "changes", "message"),
    [
        ("ddp", {"training.accumulation": 1}, r"accumulation=2 and training.batch=1"),
        ("ddp", {"training.accumulation": 3}, r"a divisor of training.accumulation=3"),
        ("ddp", {"training.compile": True}, r"training.compile"),
        ("fsdp", {"optimizer.name": "muon"}, r"fsdp with muon; .*--strategy ddp"),
        ("fsdp", {"training.precision": "fp16"}, r"fp16; .*--strategy ddp"),
        ("fsdp", {"training.loss_tokens": 8}, r"loss_tokens; .*--strategy ddp"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(
    strategy: Strategy, changes: dict[str, Any], message: str
) -> None:
    config = run_of(changes).config
    check(config, 1, strategy)
    with pytest.raises(InvalidArgument, match=message):
        check(config, 2, strategy)


def test_micro_batches_are_dealt_out_and_draw_their_own_numbers() -> None:
    items = list(range(6))
    assert [list(Team(rank, 3).share(items)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert list(ALONE.share(items)) == items
    assert ALONE.total(2.5, torch.device("cpu")) == 2.5
    assert ALONE.agreed("x") == "x"
    model = nn.Linear(3, 2)
    ALONE.spread(model)
    assert ALONE.wrapped(model) is model
    weight = model.weight
    assert local(weight) is whole({"weight": weight})["weight"] is weight
    assert cut_like(weight, weight) is weight
    seeds = [
        micro_batch_seed(seed, step, index)
        for seed in (0, 1, -1)
        for step in range(20)
        for index in range(8)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= each < 2**63 for each in seeds)


def test_torchrun_is_told_what_to_do_instead(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tilelab.study import command

    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    assert command.main([]) == 2
    assert "--processes N" in capsys.readouterr().err


SHARED = {"training.accumulation": 1, "model.positions": "rotary"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "strategy", "changes"),
    [
        (2, "ddp", SHARED),
        (2, "fsdp", {"training.accumulation": 1}),
        (4, "ddp", {"training.loss_tokens": 7}),
    ],
    ids=str,
)
def test_processes_that_share_sequences_have_the_losses_of_one(
    processes: int, strategy: Strategy, changes: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of_file(tmp_path, changes)
    one = _alone(tmp_path, "one", run)
    execution = _execution(tmp_path, "shared", processes, strategy, context=2)
    shared = _finished(execution, run)
    assert shared.start.environment["context"] == 2
    for mine, theirs in zip(one.steps, shared.steps, strict=True):
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)
        assert theirs.gradient_norm == pytest.approx(mine.gradient_norm, rel=1e-4)
    assert shared.evaluations[-1].loss == pytest.approx(one.evaluations[-1].loss, rel=1e-5)
    assert shared.kernels is not None
    assert {each.kernel for each in shared.kernels.layers} == {"tilewise cpu"}


@pytest.mark.parametrize(
    ("processes", "context", "changes", "message"),
    [
        (3, 2, {}, r"--context-parallel: got 2; required: a divisor of 3"),
        (4, 2, {"training.accumulation": 3}, r"divisor of training.accumulation=3"),
        (2, 2, DROPOUT, r"model.dropout.embedding: got 0.1"),
        (2, 2, {"attention.implementation": "sdpa"}, r"attention.implementation: got 'sdpa'"),
    ],
)
def test_what_cannot_be_shared_is_refused(
    processes: int, context: int, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check(run_of(changes).config, processes, "ddp", context)
