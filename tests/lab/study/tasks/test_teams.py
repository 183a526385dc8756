"""BERT by several processes: taken up by two, a run of one goes on to the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.tasks.small import WORDS, config_of, write_glue
from tests.lab.study.train.toys import Killed, killed_after
from tilelab.study.ask.config import RunConfig, change
from tilelab.study.ask.run import Execution, RunSpec, Strategy
from tilelab.study.conduct.process import Process
from tilelab.study.data.corpus import data_folder
from tilelab.study.records.events import RunRecord
from tilelab.study.train import child

pytest.importorskip("tokenizers")
_FOLDER = data_folder()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        _FOLDER is None or not (_FOLDER / "vocab" / "bert-base-uncased").exists(),
        reason="no vocab/bert-base-uncased in TILEWISE_DATA",
    ),
]
DROPOUT: dict[str, Any] = {"model.dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1}}


def _config(task: str, folder: Path) -> RunConfig:
    """Four steps of two micro-batches, which differ in tokens or in what is hidden."""
    if task == "glue":
        return config_of(write_glue(folder / "glue", "cola"), **DROPOUT)
    path = folder / "text.txt"
    path.write_text("\n".join(" ".join(WORDS) for _ in range(120)) + "\n")
    masked = {"task": {"name": task, "probability": 0.2}}
    fewer = {"data.held_out": 0.2, "evaluation.windows": 3}
    return change(config_of(path, **DROPOUT), {**masked, **fewer})


def _execution(tmp_path: Path, study: str, processes: int, strategy: Strategy = "ddp") -> Execution:
    return Execution(
        folder=tmp_path / study,
        cache=tmp_path / "cache",
        processes=processes,
        strategy=strategy,
        checkpoint_every_s=0.0,
    )


def _losses(record: RunRecord) -> tuple[list[Any], list[Any]]:
    return (
        [(each.step, each.loss, each.gradient_norm, each.tokens) for each in record.steps],
        [(each.step, each.tokens, each.loss, each.metrics) for each in record.evaluations],
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
        assert _losses(both) == _losses(one)
        assert both.end == one.end  # the weights and the optimizer's state, to the bit
        return
    for mine, theirs in zip(one.steps, both.steps, strict=True):
        assert theirs.loss == pytest.approx(mine.loss, rel=1e-5)
        assert theirs.tokens == mine.tokens
    assert both.evaluations[-1].loss == pytest.approx(one.evaluations[-1].loss, rel=1e-5)
