"""Small texts, runs and sessions that train in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.lab.study.data import texts
from tests.lab.study.records_of import known
from tilelab.study.ask.config import Budget, Data, Evaluation, Model, RunConfig, Training, change
from tilelab.study.ask.run import RECORD, RunSpec
from tilelab.study.ask.values import names
from tilelab.study.data.tokens import Documents, Tokens
from tilelab.study.records.events import RunRecord
from tilelab.study.tasks.task import Prepared
from tilelab.study.train.costs import PeakMeter
from tilelab.study.train.session import Session
from tilelab.study.train.trainer import Taken, Trainer

CPU = torch.device("cpu")
OPTIMIZERS = names("optimizer")
STEPS = 6

CONFIG = RunConfig(
    model=Model(layers=2, heads=2, width=16, context=16),
    training=Training(batch=2, accumulation=2),
    budget=Budget(steps=STEPS),
    evaluation=Evaluation(every=2, windows=4),
)


def run_of(changes: dict[str, Any] | None = None, seed: int = 0) -> RunSpec:
    """A run of a tiny model, with some values changed."""
    return RunSpec("toy", "arm", seed, change(CONFIG, changes or {}))


def text(size: int = 4000) -> bytes:
    """Bytes in which there is a little to learn."""
    words = [b"tile", b"wise", b"soft", b"max", b"row", b"key"]
    order = np.random.default_rng(0).integers(0, len(words), size)
    return b" ".join(words[each] for each in order)[:size]


def tokens_of(data: bytes = text()) -> Tokens:
    """The bytes as a corpus in documents of 1 to 40 bytes, a tenth of it held out."""
    numbers = np.frombuffer(data, np.uint8)
    split = len(numbers) // 10
    parts = numbers[split:], numbers[:split]
    begins = np.cumsum([0, *np.random.default_rng(1).integers(1, 40, len(numbers))])
    found = Documents(*(begins[begins < len(each)] for each in parts))
    return texts.tokens_of(*parts, name="toy", source="toy", find_documents=lambda: found)


def trainer_of(changes: dict[str, Any] | None = None, seed: int = 0) -> Trainer:
    """A trainer of such a run on the toy text."""
    return Trainer(run_of(changes, seed), tokens_of(), CPU)


def session_of(
    folder: Path,
    changes: dict[str, Any] | None = None,
    *,
    checkpoint_every_s: float = 0.0,
    tokens: Tokens | None = None,
) -> Session:
    """A session of such a run that works in a folder, saving after every step."""
    tokens = tokens or tokens_of()
    return session_for(
        run_of(changes).config, folder, data=tokens, checkpoint_every_s=checkpoint_every_s
    )


def session_for(
    config: RunConfig,
    folder: Path,
    *,
    seed: int = 0,
    data: Prepared | None = None,
    checkpoint_every_s: float = 0.0,
) -> Session:
    """A session of any run that works in a folder; the task prepares the data if none is given."""
    data = config.learning.prepare(config, folder) if data is None else data
    return Session(
        Trainer(RunSpec("toy", "arm", seed, config), data, CPU),
        data,
        folder,
        PeakMeter(CPU),
        peak_flops_s=1e9,
        checkpoint_every_s=checkpoint_every_s,
    )


def bits_of(record: RunRecord, *, kernels: bool = True) -> tuple[Any, ...]:
    """All of a record that must not depend on interruptions.

    Args:
        record: of a run that is over.
        kernels: with the calls of kernels, of which each of several processes has a part.
    """
    return (
        known(record.end),
        [(each.step, each.loss, each.lr, each.gradient_norm, each.tokens) for each in record.steps],
        [
            (each.step, each.tokens, each.loss, each.bits_per_byte, each.metrics, each.softmaxes)
            for each in record.evaluations
        ],
        record.kernels if kernels else None,
    )


def record_of(folder: Path) -> RunRecord:
    """What a session has written."""
    return RunRecord.read(folder / RECORD)


def finished(folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> RunRecord:
    """The record of such a run, which works in a folder until it is over."""
    folder.mkdir(exist_ok=True)
    session_of(folder, changes, **options).work()
    return record_of(folder)


def text_file(folder: Path) -> Data:
    """The toy text as a file that a process can read."""
    path = folder / "toy.txt"
    path.write_bytes(text())
    return Data(source=str(path), held_out=0.1)


def run_of_file(folder: Path, changes: dict[str, Any] | None = None) -> RunSpec:
    """A toy run whose text is a file that another process can read."""
    return run_of({"data": text_file(folder).model_dump(), **(changes or {})})


class Killed(BaseException):
    """Like SIGKILL: nothing that trains may catch it."""


@contextmanager
def killed_after(step: int) -> Iterator[None]:
    """Training in this process raises ``Killed`` when it has done so many steps of a run."""
    take = Trainer.step

    def killed(self: Trainer) -> Taken:
        if self.done == step:
            raise Killed
        return take(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        yield
