"""The held-out loss: of the weights that count, in the run's precision, leaving no trace."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from tests.lab.study.train.toys import tokens_of, trainer_of
from tilelab.study.train.examiner import Examiner
from tilelab.study.train.trainer import Trainer

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
def test_the_loss_by_hand_and_without_dropout(precision: str) -> None:
    changes = {
        "training.precision": precision,
        "model.dropout.residual": 0.5,
        "evaluation.windows": (len(TOKENS.held_out) - 1) // 16,
    }
    trainer = trainer_of(changes)
    trainer.step()
    before = trainer.state({}).sha256
    found = Examiner(trainer, TOKENS).held_out(whole=False)
    assert found.loss == pytest.approx(_by_hand(trainer), rel=1e-2)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    assert found.word_perplexity is None
    assert trainer.state({}).sha256 == before
    assert trainer.model.training


def test_an_optimizer_that_averages_is_evaluated_at_its_average() -> None:
    changes = {"optimizer.name": "schedule-free", "optimizer.lr": 0.05, "budget.steps": 20}
    trainer = trainer_of(changes)
    for _ in range(10):
        trainer.step()
    before = trainer.state({}).sha256
    found = Examiner(trainer, TOKENS).held_out(whole=False).loss
    assert trainer.state({}).sha256 == before
    # x from its definition, y = (1 - beta) z + beta x, of which y is in the weights and z kept.
    beta = float(trainer.config.optimizer.options["betas"][0])
    other = trainer_of(changes)
    weights = dict(trainer.model.named_parameters())
    with torch.no_grad():
        for name, target in other.model.named_parameters():
            z = trainer.optimizer.state[weights[name]]["z"]
            target.copy_((weights[name] - (1 - beta) * z) / beta)
    at_average = Examiner(trainer_of(), TOKENS)
    at_average._trainer.model.load_state_dict(other.model.state_dict())
    assert found == pytest.approx(at_average.held_out(whole=False).loss, rel=1e-5)
    at_average._trainer.model.load_state_dict(trainer.model.state_dict())
    assert found != pytest.approx(at_average.held_out(whole=False).loss, rel=1e-4)


def test_the_whole_text_is_scored_only_where_the_config_asks() -> None:
    sampled = Examiner(trainer_of(), TOKENS)
    assert sampled.held_out(whole=True) == sampled.held_out(whole=False)
    strided = Examiner(trainer_of({"evaluation.final_stride": 4}), TOKENS)
    assert strided.held_out(whole=False) == sampled.held_out(whole=False)
    assert strided.held_out(whole=True) != sampled.held_out(whole=True)
