"""The held-out loss: the sum that the definition says, in nats, bits per byte and per word."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.lab.study.data.texts import tokens_of
from tilelab.study.data.order import Windows, evaluation_windows, strided
from tilelab.study.data.tokens import Tokens
from tilelab.study.tasks import language as module
from tilelab.study.tasks.language import Score, evaluate, word_perplexity


class Bigram(nn.Module):
    """Logits that depend on the last token alone; remembers what it was shown."""

    def __init__(self, vocabulary: int = 11) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(vocabulary, vocabulary, generator=generator))
        self.dropout = nn.Dropout(0.5)
        self.shapes: list[tuple[int, ...]] = []
        self.modes: list[bool] = []

    def forward(self, tokens: Tensor) -> Tensor:
        self.shapes.append(tuple(tokens.shape))
        self.modes.append(self.training)
        out: Tensor = self.dropout(nn.functional.one_hot(tokens, 11).float() @ self.table)
        return out


def _text(length: int = 50, **changes: Any) -> Tokens:
    drawn = np.random.default_rng(3).integers(0, 11, length).astype(np.uint16)
    sizes = np.arange(1, 12, dtype=np.int64)
    return tokens_of(drawn[:0], drawn, 11, token_bytes=sizes, **changes)


def _nats(model: Bigram, text: Tokens, targets: range) -> float:
    """By the definition, in float64."""
    table = model.table.detach().double().log_softmax(dim=1)
    return -sum(table[int(text.held_out[at - 1]), int(text.held_out[at])].item() for at in targets)


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_a_strided_pass_is_the_sum_over_all_tokens_but_the_first(stride: int) -> None:
    model, text = Bigram(), _text()
    score = evaluate(model, strided(text.held_out, 8, stride), text)
    assert score.tokens == 49
    assert score.bytes == int((text.held_out[1:].astype(int) + 1).sum())
    assert score.nats == pytest.approx(_nats(model, text, range(1, 50)), rel=1e-6)


def test_windows_count_their_own_targets() -> None:
    model, text = Bigram(), _text()
    windows = evaluation_windows(text.held_out, 8, 3)
    expected = [at for start in windows.starts for at in range(start + 1, start + 9)]
    score = evaluate(model, windows, text)
    nats = sum(_nats(model, text, range(at, at + 1)) for at in expected)
    assert score.tokens == 24
    assert score.bytes == sum(int(text.held_out[at]) + 1 for at in expected)
    assert score.nats == pytest.approx(nats, rel=1e-6)
    assert score.loss == score.nats / 24
    assert score.bits_per_byte == pytest.approx(score.nats / math.log(2) / score.bytes)


def test_groups_are_small_enough_for_their_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = Bigram(), _text(200)
    windows = evaluation_windows(text.held_out, 8, 20)
    whole = evaluate(model, windows, text)
    assert model.shapes == [(8, 8), (8, 8), (4, 8)]
    for allowed, rows in ((3 * 8 * 11 * 4, 3), (1, 1)):
        model.shapes.clear()
        monkeypatch.setattr(module, "_LOGITS_BYTES", allowed)
        score = evaluate(model, windows, text)
        assert model.shapes[0] == (rows, 8)
        assert score == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_run_is_disturbed(training: bool) -> None:
    model, text = Bigram().train(training), _text()
    before = torch.get_rng_state()
    first = evaluate(model, strided(text.held_out, 8, 4), text)
    assert first == evaluate(model, strided(text.held_out, 8, 4), text)  # no dropout
    assert model.training is training
    assert not any(model.modes)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.table.grad is None


def test_the_mode_comes_back_after_an_error() -> None:
    model, text = Bigram(), _text()
    windows = strided(text.held_out, 8, 4)
    model.table.data = torch.zeros(3, 3)
    with pytest.raises(RuntimeError):
        evaluate(model, windows, text)
    assert model.training


def test_autocast_is_for_the_model_alone() -> None:
    model, text = Bigram(), _text()
    windows = strided(text.held_out, 8, 4)
    exact, rounded = (evaluate(model, windows, text, each) for each in (None, torch.bfloat16))
    table = model.table.data.bfloat16().float()
    assert rounded != exact
    model.table.data = table
    assert rounded == evaluate(model, windows, text)  # one-hot rows: only the table is rounded


def test_a_loss_that_is_not_finite_comes_through() -> None:
    model, text = Bigram(), _text()
    model.table.data[4] = math.nan
    score = evaluate(model, strided(text.held_out, 8, 4), text)
    assert math.isnan(score.nats)
    assert math.isnan(score.bits_per_byte)


def test_word_perplexity_is_megatrons_for_the_full_pass() -> None:
    model, text = Bigram(), _text(held_out_words=17)
    text = _text(held_out_words=17, held_out_bytes=int(text.token_bytes[text.held_out].sum()))
    score = evaluate(model, strided(text.held_out, 8, 2), text)
    # exp(loss * ratio), ratio = (tokens - 1) / (words - 1), from the unscaled loss
    adjusted = math.exp(score.loss * (len(text.held_out) - 1) / (17 - 1))
    assert word_perplexity(score, text) == pytest.approx(adjusted, rel=1e-12)


def test_word_perplexity_of_a_sample_is_scaled_by_bytes() -> None:
    text = _text(held_out_words=21, held_out_bytes=400)
    first = int(text.token_bytes[text.held_out[0]])
    score = Score(nats=30.0, tokens=12, bytes=60)
    expected = math.exp(30 / 60 * (400 - first) / 20)
    assert word_perplexity(score, text) == pytest.approx(expected)
    assert word_perplexity(Score(1e6, 1, 1), text) == math.inf
    assert word_perplexity(score, _text()) is None


@pytest.mark.thorough
def test_the_loss_of_a_real_model_is_that_of_the_reference(shared_data: Path) -> None:
    pytest.importorskip("safetensors")
    from tilelab.models.gpt2 import load

    folder = shared_data / "models" / "tiny-gpt2-bytes-wikitext"
    with gzip.open(shared_data / "wikitext" / "wikitext103.valid.tokens.txt.gz") as file:
        text = np.frombuffer(file.read(400 * 256), np.uint8)
    starts = np.arange(400, dtype=np.int64) * 256  # the first byte of each window is not scored
    windows = Windows(text, 255, starts, np.zeros(400, np.int64))
    score = evaluate(load(folder), windows, tokens_of(text[:0], text, 257))
    expected = json.loads((folder / "reference_loss.json").read_text())["nats_per_byte_float64"]
    assert score.tokens == score.bytes == 400 * 255
    assert score.loss == pytest.approx(expected, abs=2e-6)
    assert score.bits_per_byte == pytest.approx(expected / math.log(2), abs=3e-6)
