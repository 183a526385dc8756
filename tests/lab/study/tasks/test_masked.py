"""Masked language modelling: what is hidden and how often, the same in every arm; it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.lab.study.records_of import known
from tests.lab.study.tasks.small import FOLDER, masked_config, needs_wordpiece
from tests.lab.study.train.toys import record_of, session_for
from tilelab.study.ask.config import change
from tilelab.study.data.tokenizers import WordPiece, tokenizer, wordpiece
from tilelab.study.need import parameters
from tilelab.study.tasks.language import mask
from tilewise.errors import InvalidArgument

pytestmark = needs_wordpiece


@pytest.fixture(scope="module")
def pieces() -> WordPiece:
    return wordpiece(FOLDER)


def test_the_vocabulary(pieces: WordPiece) -> None:
    assert (pieces.vocabulary, pieces.first, pieces.border, pieces.mask) == (30522, 101, 102, 103)
    assert pieces.encode(["Hello, world!", ""]) == [[7592, 1010, 2088, 999], []]
    assert pieces.encode(["Unaffable"]) == [[14477, 20961, 3468]]  # una ##ffa ##ble
    assert pieces.decode([7592, 2088]) == "hello world"
    assert not {0, 1, 100, 101, 102, 103} & set(pieces.ordinary)
    found = tokenizer("wordpiece")
    assert found.encode(b"Hello,\nworld").tolist() == [7592, 1010, 2088]
    assert found.token_bytes.sum() == 0
    with pytest.raises(InvalidArgument, match=r"data.tokenizer.*bert-base-uncased/vocab.txt"):
        wordpiece(None)
    with pytest.raises(InvalidArgument, match=r"UTF-8 for data.tokenizer=wordpiece"):
        found.encode(b"\xff")


def test_shares_of_what_is_hidden(pieces: WordPiece) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.choice(np.array(pieces.ordinary), (200, 250)).astype(np.int64)
    found = mask(tokens, pieces, 0.15, seed=1, index=0)
    seen, flat = found.tokens.flatten(), tokens.flatten()
    count = len(found.wanted)
    assert abs(count / flat.size - 0.15) < 0.008  # five standard deviations
    assert np.array_equal(found.targets, flat[found.wanted])
    rest = np.setdiff1d(np.arange(flat.size), found.wanted)
    assert np.array_equal(seen[rest], flat[rest])
    shown = seen[found.wanted]
    assert abs((shown == pieces.mask).mean() - 0.8) < 0.025
    kept = shown == found.targets
    assert abs(kept.mean() - 0.1) < 0.02
    other = shown[(shown != pieces.mask) & ~kept]
    assert abs(len(other) / count - 0.1) < 0.02
    assert set(other.tolist()) <= set(pieces.ordinary)
    assert len(set(other.tolist())) > 0.9 * len(other)  # from the whole vocabulary
    assert np.array_equal(found.tokens, mask(tokens, pieces, 0.15, seed=1, index=0).tokens)
    for seed, index in ((2, 0), (1, 1)):
        drawn = mask(tokens, pieces, 0.15, seed=seed, index=index)
        assert not np.array_equal(found.tokens, drawn.tokens)
    rare = mask(tokens[:1, :2], pieces, 1e-9, seed=1, index=0)
    assert rare.wanted.tolist() == [0]  # never nothing to learn


def test_windows_stand_between_their_special_tokens(tmp_path: Path, pieces: WordPiece) -> None:
    config = masked_config(tmp_path)
    data = config.learning.prepare(config, tmp_path)
    batches = config.learning.batches(config, data, seed=1)
    (packed, wanted), targets = batches(0)[0].inputs, batches(0)[0].targets
    rows = packed.tokens.view(4, 24)
    assert set(rows[:, 0].tolist()) == {pieces.first}
    assert set(rows[:, -1].tolist()) == {pieces.border}
    at = wanted % 24
    assert bool(((at > 0) & (at < 23)).all())
    shown = packed.tokens[wanted]
    kept = (shown != pieces.mask) & (shown == targets)
    assert bool(((shown == pieces.mask) | kept | (shown != targets)).all())
    # Where nothing is hidden the text reads on as it was.
    text = data.train.tolist()
    hidden = set(wanted.tolist())
    first = next(at for at in range(1, 20) if not {at, at + 1, at + 2} & hidden)
    run = packed.tokens[first : first + 3].tolist()
    assert any(text[at : at + 3] == run for at in range(len(text)))
    assert not torch.equal(packed.tokens, batches(1)[0].inputs[0].tokens)


def test_it_learns(tmp_path: Path) -> None:
    config = masked_config(
        tmp_path,
        **{"budget.steps": 60, "evaluation.every": 60, "optimizer.lr": 0.01, "model.width": 32},
    )
    data = config.learning.prepare(config, tmp_path)
    session = session_for(config, tmp_path, data=data, checkpoint_every_s=10.0)
    session.work()
    record = record_of(tmp_path)
    first, last = record.evaluations[0], record.evaluations[-1]
    assert first.loss is not None
    assert first.loss == pytest.approx(np.log(30522), rel=0.05)
    assert known(last.loss) < 3.0 < first.loss  # of twelve words: log 12 is 2.5
    assert list(last.metrics) == ["accuracy"]
    assert last.bits_per_byte is None
    (layer,) = known(last.softmaxes)
    assert 0 < known(layer.entropy) < np.log(24)
    assert last.tokens == 60 * config.tokens_per_step
    found = sum(each.numel() for each in session.trainer.model.parameters())
    # The head has a bias for each token, which the estimate leaves out.
    assert abs(parameters(config) + 30522 - found) <= 200


def test_what_no_run_could_do_is_refused(tmp_path: Path) -> None:
    config = masked_config(tmp_path)
    for changes, words in (
        ({"model.context": 7}, r"model.context: got 7.*8 or more"),
        ({"evaluation.final_stride": 4}, r"final_stride: got 4"),
        ({"training.compile": True}, r"training.compile: got true"),
        ({"data.tokenizer": "bytes"}, r"data.tokenizer: got 'bytes'"),
        ({"data.packing": "padded"}, r"data.packing: got 'padded'"),
        ({"task.probability": 0.0}, r"task.probability"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            change(config, changes)
