"""BERT by several processes: taken up by two, a run of one goes on to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.tasks.small import config_of, masked_config, needs_wordpiece, write_glue
from tests.lab.study.train.toys import Killed, bits_of, killed_after
from tilelab.study.ask.config import RunConfig
from tilelab.study.ask.run import Execution, RunSpec, Strategy
from tilelab.study.conduct.process import Process
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child

pytestmark = [pytest.mark.slow, needs_wordpiece]
DROPOUT: dict[str, Any] = {"model.dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1}}


def _config(task: str, folder: Path) -> RunConfig:
    """Four steps of two micro-batches, which differ in tokens or in what is hidden."""
    if task == "glue":
        return config_of(write_glue(folder / "glue", "cola"), **DROPOUT)
    return masked_config(folder, **DROPOUT)


def _execution(tmp_path: Path, study: str, processes: int, strategy: Strategy = "ddp") -> Execution:
    return Execution(
        folder=tmp_path / study,
        cache=tmp_path / "cache",
        processes=processes,
        strategy=strategy,
        checkpoint_every_s=0.0,
    )


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        ("masked-language-modelling", "ddp"),
        ("glue", "ddp"),
        ("masked-language-modelling", "fsdp"),
    ],
)
def test_two_processes_take_up_what_one_began(
    task: str, strategy: Strategy, tmp_path: Path
) -> None:
    run = RunSpec("e", "arm", 0, _config(task, tmp_path))
    whole, parts = (run.executed(_execution(tmp_path, each, 1)) for each in ("whole", "parts"))
    child.work(whole)
    with killed_after(2), pytest.raises(Killed):
        child.work(parts)
    process = Process(run.executed(_execution(tmp_path, "parts", 2, strategy)))
    try:
        outcome = process.outcome()
    finally:
        process.close()
    assert outcome.code == 0, outcome.lines
    one, both = RunRecord.read(whole.record), RunRecord.read(parts.record)
    assert [each.environment["processes"] for each in both.starts] == [1, 2]
    assert [each.from_step for each in both.starts] == [0, 2]
    if strategy == "ddp":
        assert bits_of(both, kernels=False) == bits_of(one, kernels=False)
        return
    for mine, theirs in zip(one.steps, both.steps, strict=True):
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)
        assert theirs.tokens == mine.tokens
    assert both.evaluations[-1].loss == pytest.approx(one.evaluations[-1].loss, rel=1e-5)
