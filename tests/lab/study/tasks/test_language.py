"""The objective, the held-out loss and the scores by their definitions; what a model writes."""

from __future__ import annotations

import gzip
import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from tests.lab.study.data.texts import tokens_of
from tests.lab.study.records_of import config_of
from tests.lab.study.train.toys import record_of, session_of
from tilelab.models.gpt2 import GPT2, Shape, load
from tilelab.study.ask.config import Training
from tilelab.study.data.order import Windows, evaluation_windows, strided
from tilelab.study.data.tokens import Tokens
from tilelab.study.tasks import language as module
from tilelab.study.tasks import scores
from tilelab.study.tasks.language import (
    Features,
    LanguageModelling,
    Score,
    chunked_losses,
    evaluate,
    printable,
    sample,
    word_perplexity,
)
from tilelab.study.tasks.task import losses


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
    model.table.data[4] = math.nan
    score = evaluate(model, strided(text.held_out, 8, 4), text)
    assert math.isnan(score.nats)
    assert math.isnan(score.bits_per_byte)
    model.table.data = torch.zeros(3, 3)
    with pytest.raises(RuntimeError):
        evaluate(model, strided(text.held_out, 8, 4), text)
    assert model.training is training, "after an error too"


def test_autocast_is_for_the_model_alone() -> None:
    model, text = Bigram(), _text()
    windows = strided(text.held_out, 8, 4)
    exact, rounded = (evaluate(model, windows, text, each) for each in (None, torch.bfloat16))
    table = model.table.data.bfloat16().float()
    assert rounded != exact
    model.table.data = table
    assert rounded == evaluate(model, windows, text)  # one-hot rows: only the table is rounded


def test_word_perplexity_is_megatrons_for_the_full_pass() -> None:
    model, text = Bigram(), _text(held_out_words=17)
    text = _text(held_out_words=17, held_out_bytes=int(text.token_bytes[text.held_out].sum()))
    score = evaluate(model, strided(text.held_out, 8, 2), text)
    # exp(loss * ratio), ratio = (tokens - 1) / (words - 1), from the unscaled loss
    adjusted = math.exp(score.loss * (len(text.held_out) - 1) / (17 - 1))
    assert word_perplexity(score, text) == pytest.approx(adjusted, rel=1e-12)
    # That of a sample is scaled by bytes.
    text = _text(held_out_words=21, held_out_bytes=400)
    first = int(text.token_bytes[text.held_out[0]])
    score = Score(nats=30.0, tokens=12, bytes=60)
    expected = math.exp(30 / 60 * (400 - first) / 20)
    assert word_perplexity(score, text) == pytest.approx(expected)
    assert word_perplexity(Score(1e6, 1, 1), text) == math.inf
    assert word_perplexity(score, _text()) is None


def test_floors_of_wikitext_have_a_word_perplexity(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    train, held_out = (draw.integers(97, 101, size=each, dtype=np.uint8) for each in (400, 90))
    config = config_of(**{"model.context": 8, "budget.steps": 2})
    floors = LanguageModelling().floors
    for words in (21, None):
        text = tokens_of(train, held_out, held_out_words=words)
        found = floors(config, text, 0, tmp_path)
        assert {each.text for each in found} == {"none", "seen", "all"}
        for each in found:
            # Neither the first byte nor the first word is predicted.
            per_word = each.value * math.log(2) * 89 / 20
            expected = None if words is None else pytest.approx(math.exp(per_word), rel=1e-9)
            assert each.word_perplexity == expected


@pytest.mark.thorough
def test_the_loss_of_a_real_model_is_that_of_the_reference(shared_data: Path) -> None:
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


def model(**changes: Any) -> GPT2:
    shape = {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocabulary": 50}
    return GPT2(Shape(**{**shape, **changes}))


def test_it_draws_from_the_distribution_of_the_model() -> None:
    """The first of many tokens has the frequencies that the logits give it."""
    few = model(vocabulary=4)
    with torch.no_grad():
        few.tokens.weight.mul_(20)  # far from uniform
        expected = few(torch.tensor([[1, 2]]))[0, -1].softmax(0)
    drawn = [sample(few, [1, 2], 1, seed)[0] for seed in range(2000)]
    found = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    # Five standard deviations of the frequency of a token.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / len(drawn)).sqrt()).all()


def test_it_depends_on_the_seed_alone_and_leaves_no_trace() -> None:
    ours = model(embedding_dropout=0.5)
    before = torch.random.get_rng_state()
    first = sample(ours, [3], 40, seed=7)  # longer than the context
    torch.rand(5)
    assert sample(ours, [3], 40, seed=7) == first
    assert sample(ours, [3], 40, seed=8) != first
    assert ours.training
    torch.random.set_rng_state(before)
    state = torch.random.get_rng_state()
    sample(ours, [3], 4, seed=0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(first) == 40
    assert set(first) <= set(range(50))


@pytest.mark.parametrize("optimizer", ["adamw", "schedule-free"])
def test_a_run_ends_with_a_sample_of_the_weights_that_are_evaluated(
    optimizer: str, tmp_path: Any
) -> None:
    changes = {"evaluation.sample_tokens": 12, "optimizer.name": optimizer}
    session = session_of(tmp_path, changes)
    session.work()
    record = record_of(tmp_path)
    assert record.done
    assert record.sample is not None
    assert 0 < len(record.sample.text) <= 12  # two bytes may be one character
    assert len(record.sample.prompt) == min(64, session.trainer.config.model.context)
    assert all(unicodedata.category(each) != "Cc" or each in "\n\t" for each in record.sample.text)


def test_what_is_not_seen_is_replaced() -> None:
    assert printable("a\x1b[31m\u202eb\n\tc\0") == "a\ufffd[31m\ufffdb\n\tc\ufffd"


CLASSES = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)
NUMBERS = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(-5, 5)).map(lambda pair: (pair[0] / 2, pair[1] / 2)),
    min_size=3,
    max_size=40,
)


def test_by_hand() -> None:
    true = np.array([1, 1, 1, 0, 0, 0, 0, 0])
    predicted = np.array([1, 1, 0, 1, 0, 0, 0, 0])  # TP 2, FN 1, FP 1, TN 4
    assert scores.accuracy(predicted, true) == 6 / 8
    assert scores.f1(predicted, true) == 4 / 6
    assert scores.matthews(predicted, true) == pytest.approx(7 / 15)
    assert scores.f1(np.zeros(8, np.int64), true) == 0.0
    x, y = np.array([1.0, math.nan, 2.0]), np.array([1.0, 2.0, 3.0])
    assert math.isnan(scores.pearson(x, y))
    assert math.isnan(scores.spearman(x, y))


@given(CLASSES)
def test_matthews_is_the_correlation_of_the_classes(pairs: list[tuple[int, int]]) -> None:
    predicted, true = np.array(pairs).T
    found = scores.matthews(predicted, true)
    if len(set(predicted)) > 1 and len(set(true)) > 1:
        assert found == pytest.approx(stats.pearsonr(predicted, true).statistic, abs=1e-12)
    else:
        assert found == 0.0


@given(NUMBERS)
def test_correlations_are_scipys(pairs: list[tuple[float, float]]) -> None:
    x, y = np.array(pairs).T
    if len(set(x)) > 1 and len(set(y)) > 1:
        assert scores.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic, abs=1e-12)
        assert scores.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic, abs=1e-12)
    else:
        assert scores.pearson(x, y) == scores.spearman(x, y) == 0.0


LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_objective_is_torchs_and_the_record_stays_plain(smoothing: float) -> None:
    logits, flat = LOGITS.clone().requires_grad_(), TARGETS.flatten()
    objective, plain = losses(logits, TARGETS, label_smoothing=smoothing)
    rows = LOGITS.flatten(0, 1)
    expected = functional.cross_entropy(rows, flat, label_smoothing=smoothing)
    assert objective.item() == pytest.approx(expected.item(), rel=1e-12)
    assert plain.item() == pytest.approx(functional.cross_entropy(rows, flat).item(), rel=1e-12)
    assert objective.requires_grad
    assert not plain.requires_grad


def test_z_loss_adds_the_mean_squared_log_of_the_partition_sum() -> None:
    objective, plain = losses(LOGITS, TARGETS, z_loss=0.5)
    sums = LOGITS.exp().sum(dim=-1).log()
    assert objective.item() == pytest.approx(
        plain.item() + 0.5 * (sums**2).mean().item(), rel=1e-12
    )
    _, without = losses(LOGITS, TARGETS)
    assert plain.item() == pytest.approx(without.item(), rel=1e-12)


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "z_loss": 0.1}])
def test_half_types_are_summed_in_float32(options: dict[str, float]) -> None:
    narrow = LOGITS.bfloat16()
    objective, plain = losses(narrow, TARGETS, **options)
    wide, _ = losses(narrow.float(), TARGETS, **options)
    assert objective.dtype == plain.dtype == torch.float32
    assert objective.item() == wide.item()


@pytest.mark.parametrize(
    "options",
    [{}, {"label_smoothing": 0.1}, {"z_loss": 0.1}, {"label_smoothing": 0.1, "z_loss": 1}],
)
def test_tokens_without_a_target_do_not_count(options: dict[str, float]) -> None:
    targets = TARGETS.clone()
    targets[0, 1:4] = -100
    targets[1, 4] = -100
    found, expected = (
        losses(LOGITS, targets, **options),
        losses(LOGITS[targets >= 0][None], targets[targets >= 0][None], **options),
    )
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.item() == pytest.approx(theirs.item(), rel=1e-12)


@pytest.mark.parametrize("tokens", [1, 4, 14, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_loss_in_chunks_has_the_gradients_of_the_whole(tokens: int, smoothing: float) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in ((2, 7, 5), (11, 5))
    )
    targets = torch.randint(11, (2, 7), generator=generator)
    targets[0, :4] = -100  # a chunk of none
    objective = {"label_smoothing": smoothing, "z_loss": smoothing}
    whole, plain = losses(functional.linear(hidden, head), targets, **objective)
    expected = torch.autograd.grad(3 * whole, (hidden, head))
    training = Training(loss_tokens=tokens, **objective)
    found, seen = chunked_losses(Features(hidden, head), targets, training)
    torch.testing.assert_close((found, seen), (whole, plain))
    assert not seen.requires_grad
    torch.testing.assert_close(torch.autograd.grad(3 * found, (hidden, head)), expected)
