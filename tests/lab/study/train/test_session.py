"""A run that is interrupted anywhere ends with the bits of one that is not."""

from __future__ import annotations

import errno
import math
import random
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.lab.study.records_of import known
from tests.lab.study.train.toys import (
    OPTIMIZERS,
    STEPS,
    Killed,
    bits_of,
    finished,
    killed_after,
    record_of,
    session_of,
    tokens_of,
    trainer_of,
)
from tilelab.study.ask.run import RECORD
from tilelab.study.records.events import End, Event, Writer
from tilelab.study.train import state as states
from tilelab.study.train.session import Session
from tilelab.study.train.state import CheckpointError, weights_sha256
from tilelab.study.train.trainer import Trainer

WARM: dict[str, Any] = {"training.length_warmup": {"start": 4, "steps": 4}}
CHOICES: list[dict[str, Any]] = [
    *({"optimizer.name": name} for name in OPTIMIZERS),
    *({"training.precision": name} for name in ("bf16", "fp16")),
    {"model.dropout": {"embedding": 0.1, "attention": 0.1, "residual": 0.1}},
    {"model.dropout.attention": 0.1, "attention.implementation": "sdpa"},
    {"model.dropout.residual": 0.1, "training.checkpointing": True},
    {"optimizer.name": "schedule-free", "training.precision": "bf16"},
    {"optimizer.name": "muon", "training.precision": "fp16", "schedule.name": "wsd"},
    WARM,
    {"data.packing": "documents", "attention.implementation": "plain", **WARM},
    {"data.packing": "documents", "model.positions": "rotary", "training.checkpointing": True},
    {"data.packing": "padded", "model.dropout.attention": 0.1, "training.label_smoothing": 0.1},
    {"attention.variant": {"name": "bigbird", "block": 2}, **WARM},
    {"model.kv_heads": 1, "model.norm": "rms", "model.qk_norm": True, "model.positions": "none"},
]


def _kill_at(session: Session, step: int) -> None:
    """Work, and stop dead when the given step is about to be taken."""
    with killed_after(step), pytest.raises(Killed):
        session.work()


@pytest.mark.parametrize("changes", CHOICES, ids=str)
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_bits(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    whole = finished(tmp_path / "whole", changes)
    folder = tmp_path / "killed"
    folder.mkdir()
    # The last process saves nothing: its step is done again. None knows the old random state.
    for seed, step, checkpoint_every_s in ((99, 2, 0.0), (98, 4, 0.0), (97, 5, 1e9)):
        _kill_at(session_of(folder, changes, checkpoint_every_s=checkpoint_every_s), step)
        torch.manual_seed(seed)
    assert '"step":5,' in (folder / RECORD).read_text()
    killed = finished(folder, changes)
    assert bits_of(killed) == bits_of(whole)
    assert [start.from_step for start in killed.starts] == [0, 2, 4, 4]


@pytest.mark.parametrize("checksums", [True, False])
def test_a_record_that_was_cut_is_trained_again(tmp_path: Path, checksums: bool) -> None:
    """The checkpoint is of the last step, and says nothing of the steps that were cut off."""
    whole = finished(tmp_path / "whole")
    folder = tmp_path / "cut"
    cut = finished(folder)
    lines = (folder / RECORD).read_text().splitlines()
    kept = [each for at, each in enumerate(lines) if at < 4]
    if not checksums:  # as older versions wrote them
        kept = [re.sub(r',"check":"\w+"', "", each) for each in kept]
    (folder / RECORD).write_text("".join(f"{each}\n" for each in kept))
    assert 0 < record_of(folder).whole_steps < len(cut.steps)
    again = finished(folder)
    assert [start.from_step for start in again.starts] == [0, 0]
    assert again.done
    assert bits_of(again) == bits_of(whole)


def test_a_kill_at_any_write_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = finished(tmp_path / "whole")
    write, save = Writer.write, states.write
    generator = random.Random(0)
    for attempt in range(12):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        left = generator.randrange(1, 30)

        def count() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        def torn(self: Any, event: Any) -> None:
            try:
                count()
            except Killed:  # half a line gets to the disk
                line = event.line().encode()
                self._file.write(line[: len(line) // 2])
                raise
            write(self, event)

        def lost(state: Any, path: Path) -> None:
            count()
            save(state, path)
            count()

        with monkeypatch.context() as patch:
            patch.setattr(Writer, "write", torn)
            patch.setattr(states, "write", lost)
            with suppress(Killed):
                session_of(folder).work()
        assert bits_of(finished(folder)) == bits_of(whole), attempt


def test_a_run_that_is_over_is_not_touched(tmp_path: Path) -> None:
    finished(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    finished(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_kill_between_the_last_checkpoint_and_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished(tmp_path / "whole")
    folder, write = tmp_path / "killed", Writer.write

    def killed(self: Writer, event: Event) -> None:
        if isinstance(event, End):
            raise Killed
        write(self, event)

    folder.mkdir()
    with monkeypatch.context() as patch, suppress(Killed):
        patch.setattr(Writer, "write", killed)
        session_of(folder).work()
    again = finished(folder)
    assert again.end == whole.end
    assert again.starts[-1].from_step == STEPS


def test_a_run_that_lost_its_end_is_trained_again(tmp_path: Path) -> None:
    """Its checkpoint has the weights alone, and nothing can go on from them."""
    whole = finished(tmp_path)
    lines = (tmp_path / RECORD).read_bytes().splitlines(keepends=True)
    assert b'"event":"end"' in lines[-1]
    (tmp_path / RECORD).write_bytes(b"".join(lines[:-1]))
    again = finished(tmp_path)
    assert again.end == whole.end
    assert [start.from_step for start in again.starts] == [0, 0]


def test_the_record_of_a_run(tmp_path: Path) -> None:
    record = finished(tmp_path)
    start, memory = record.start, record.memory
    assert (start.run, start.seed, start.from_step) == ("toy/arm/seed-0", 0, 0)
    assert start.corpus["train_tokens"] == 3600
    assert set(start.flops_per_token) == {"full", "causal"}
    assert record.sample is None
    assert [each.step for each in record.steps] == [1, 2, 3, 4, 5, 6]
    assert [each.warmup for each in record.steps] == [True, True, False, False, False, False]
    assert [each.step for each in record.evaluations] == [0, 2, 4, 6]
    last = record.evaluations[-1]
    assert last.tokens == 6 * 2 * 2 * 16
    assert last.train_wall_s == pytest.approx(sum(each.wall_s for each in record.steps))
    assert last.train_cpu_s == pytest.approx(sum(each.cpu_s for each in record.steps))
    assert last.bits_per_byte == pytest.approx(known(last.loss) / math.log(2))
    assert memory is not None
    assert memory.weights_bytes == 4 * start.parameters["total"]
    parts = (memory.activations_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert min(known(each) for each in parts) > 0
    assert [(each.kernel, each.calls) for each in known(record.kernels).layers] == 2 * [
        ("tilewise cpu", 2 * STEPS)
    ]
    assert record.end is not None
    assert (record.end.status, record.end.step) == ("done", STEPS)
    assert record.checkpoint == STEPS


def test_every_start_tells_the_first_weights_and_time_adds_up(tmp_path: Path) -> None:
    first = weights_sha256(trainer_of().model)
    _kill_at(session_of(tmp_path), 4)
    record = finished(tmp_path)
    assert [each.weights_sha256 for each in record.starts] == [first, first]
    assert record.evaluations[-1].train_wall_s == pytest.approx(
        sum(each.wall_s for each in record.steps)
    )


def test_a_final_stride_scores_the_whole_held_out_text(tmp_path: Path) -> None:
    sampled = finished(tmp_path / "sampled")
    whole = finished(tmp_path / "whole", {"evaluation.final_stride": 4})
    losses = [[each.loss for each in record.evaluations] for record in (sampled, whole)]
    assert losses[0][:-1] == losses[1][:-1]
    assert losses[0][-1] != losses[1][-1]
    last, other = sampled.evaluations[-1], whole.evaluations[-1]
    assert other.on_windows == {"loss": last.loss, "bits_per_byte": last.bits_per_byte}
    assert not any(each.on_windows for each in (last, *whole.evaluations[:-1]))


def test_a_full_disk_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(states, "write", full)
        with pytest.raises(OSError, match="No space left"):
            session_of(tmp_path).work()
    assert [each.step for each in record_of(tmp_path).steps] == [1]
    assert finished(tmp_path).done


def test_divergence_is_an_end_and_comes_out_the_same_after_a_kill(tmp_path: Path) -> None:
    changes = {"optimizer.name": "sgd", "optimizer.lr": 1e12, "training.clip": 0.0}
    whole = finished(tmp_path / "whole", changes)
    assert whole.diverged
    assert whole.end is not None
    assert "not finite" in whole.end.reason or "is nan" in whole.end.reason
    assert whole.end.step == len(whole.steps) >= 1
    assert whole.kernels is not None
    folder = tmp_path / "killed"
    folder.mkdir()
    _kill_at(session_of(folder, changes), whole.end.step)
    assert bits_of(finished(folder, changes)) == bits_of(whole)


def test_weights_that_are_not_finite_after_the_last_step_are_divergence(tmp_path: Path) -> None:
    session = session_of(tmp_path)
    take = session.trainer.step

    def spoil() -> Any:
        taken = take()
        if session.trainer.over:
            with torch.no_grad():
                session.trainer.model.norm.bias.fill_(math.nan)
        return taken

    session.trainer.step = spoil  # type: ignore[method-assign]
    session.work()
    record = record_of(tmp_path)
    assert record.diverged
    assert known(record.end).reason == f"the held-out loss after step {STEPS} is nan"
    assert record.evaluations[-1].loss is None


def test_a_checkpoint_of_another_config_is_refused(tmp_path: Path) -> None:
    _kill_at(session_of(tmp_path), 3)
    with pytest.raises(CheckpointError, match="checkpoint of another config"):
        finished(tmp_path, {"optimizer.lr": 0.001})


def test_checkpoints_wait_for_their_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = finished(tmp_path / "seldom", checkpoint_every_s=1e9)
    lines = (tmp_path / "seldom" / RECORD).read_text()
    assert lines.count('"event":"checkpoint"') == 1
    assert record.checkpoint == STEPS
    finished(tmp_path / "always")
    assert (tmp_path / "always" / RECORD).read_text().count('"event":"checkpoint"') == STEPS
    # One that takes long is followed by a long time without.
    ticks = iter(np.arange(0.0, 1e6, 30.0))
    monkeypatch.setattr("time.monotonic", lambda: float(next(ticks)))
    finished(tmp_path / "slow", checkpoint_every_s=1.0)
    assert (tmp_path / "slow" / RECORD).read_text().count('"event":"checkpoint"') == 2


TOKENS = tokens_of()


@torch.no_grad()
def _by_hand(trainer: Trainer) -> float:
    """The mean loss of all windows of 16 that tile the held-out text from its start."""
    text = torch.from_numpy(TOKENS.held_out.astype("int64"))
    count = (len(text) - 1) // 16
    inputs, targets = text[: count * 16].view(-1, 16), text[1 : count * 16 + 1].view(-1, 16)
    trainer.model.eval()
    with trainer.autocast():
        logits = trainer.model(inputs).float()
    trainer.model.train()
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_loss_by_hand_and_without_dropout(precision: str, tmp_path: Path) -> None:
    changes = {
        "training.precision": precision,
        "model.dropout.residual": 0.5,
        "evaluation.windows": (len(TOKENS.held_out) - 1) // 16,
    }
    session = session_of(tmp_path, changes)
    trainer = session.trainer
    trainer.step()
    before = trainer.state({}).sha256
    found = session.held_out(whole=False)
    assert found.loss == pytest.approx(_by_hand(trainer), rel=1e-2)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    assert found.word_perplexity is None
    assert trainer.state({}).sha256 == before
    assert trainer.model.training


def test_an_optimizer_that_averages_is_evaluated_at_its_average(tmp_path: Path) -> None:
    changes = {"optimizer.name": "schedule-free", "optimizer.lr": 0.05, "budget.steps": 20}
    session = session_of(tmp_path, changes)
    trainer = session.trainer
    for _ in range(10):
        trainer.step()
    before = trainer.state({}).sha256
    found = session.held_out(whole=False).loss
    assert trainer.state({}).sha256 == before
    # x from its definition, y = (1 - beta) z + beta x, of which y is in the weights and z kept.
    beta = float(trainer.config.optimizer.options["betas"][0])
    other = trainer_of(changes)
    weights = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, target in other.model.named_parameters():
            z = trainer.optimizer.state[weights[name]]["z"]
            target.copy_((weights[name] - (1 - beta) * z) / beta)
    at_average = session_of(tmp_path)
    at_average.trainer.model.load_state_dict(other.model.state_dict())
    assert found == pytest.approx(at_average.held_out(whole=False).loss, rel=1e-5)
    at_average.trainer.model.load_state_dict(trainer.model.state_dict())
    assert found != pytest.approx(at_average.held_out(whole=False).loss, rel=1e-4)
