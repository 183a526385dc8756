"""Runs with documents, padding and growing lengths; and what they record of their attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lab.study.train.toys import (
    CPU,
    STEPS,
    Killed,
    bits_of,
    killed_after,
    record_of,
    run_of,
    session_of,
    tokens_of,
)
from tilelab.study.data.tokens import Documents, Tokens
from tilelab.study.records.events import RunRecord
from tilelab.study.train.trainer import Trainer

WARM = {"training.length_warmup": {"start": 4, "steps": 4}}
CHANGES: list[dict[str, Any]] = [
    WARM,
    {"data.packing": "documents"},
    {"data.packing": "documents", "attention.implementation": "plain", **WARM},
    {"data.packing": "documents", "model.positions": "rotary", "training.checkpointing": True},
    {"data.packing": "padded", "model.dropout.attention": 0.1, "training.label_smoothing": 0.1},
    {"attention.variant": {"name": "bigbird", "block": 2}, **WARM},
    {"model.kv_heads": 1, "model.norm": "rms", "model.qk_norm": True, "model.positions": "none"},
]


def _tokens() -> Tokens:
    """The toy text in documents of 1 to 40 tokens."""
    whole = tokens_of()
    sizes = np.random.default_rng(1).integers(1, 40, len(whole.train))
    begins = np.concatenate([[0], np.cumsum(sizes)])
    found = Documents(*(begins[begins < len(each)] for each in (whole.train, whole.held_out)))
    return replace(whole, find_documents=lambda: found)


def _finished(folder: Path, changes: dict[str, Any]) -> RunRecord:
    folder.mkdir()
    session_of(folder, changes, tokens=_tokens()).work()
    return record_of(folder)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_an_interrupted_run_ends_with_the_samebits_of(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    whole = _finished(tmp_path / "whole", changes)
    folder = tmp_path / "killed"
    folder.mkdir()
    with killed_after(3), pytest.raises(Killed):
        session_of(folder, changes, tokens=_tokens()).work()
    session_of(folder, changes, tokens=_tokens()).work()
    killed = record_of(folder)
    assert bits_of(killed) == bits_of(whole)
    assert [each.softmaxes for each in killed.evaluations] == [
        each.softmaxes for each in whole.evaluations
    ]
    assert [each.tokens for each in killed.steps] == [each.tokens for each in whole.steps]


@pytest.mark.parametrize("packing", ["stream", "documents", "padded"])
def test_tokens_are_those_that_have_a_target(packing: str, tmp_path: Path) -> None:
    record = _finished(tmp_path / "run", {"data.packing": packing, **WARM})
    trainer = Trainer(run_of({"data.packing": packing, **WARM}), _tokens(), CPU)
    counts = [each.tokens or 0 for each in record.steps]
    for step, count in enumerate(counts):
        targets = [each.targets for each in trainer._batches.at(step)]
        assert count == sum(int((each >= 0).sum()) for each in targets)
    whole = 2 * 2 * 16
    assert len(counts) == STEPS
    if packing == "stream":
        assert counts == [whole] * STEPS
    else:
        assert sum(counts) < STEPS * whole
    known = {each.step: each.tokens for each in record.evaluations}
    assert known == {step: sum(counts[:step]) for step in (0, 2, 4, 6)}
    piece = record.start.flops_per_token["full"] - 6 * (
        record.start.parameters["total"] - record.start.parameters["embedding"]
    )
    # Twelve for each of two layers, sixteen channels and the mean length of a row or its piece.
    mean, found = (4 + 4 + 8 + 8 + 16 + 16) / 6, piece / (12 * 2 * 16)
    assert found == pytest.approx(mean) if packing == "stream" else 1 < found < mean


def test_a_step_is_the_mean_over_its_tokens_in_whichever_micro_batch() -> None:
    common = {"data.packing": "padded", "training.z_loss": 1e-3}
    whole = Trainer(
        run_of({**common, "training.batch": 4, "training.accumulation": 1}), _tokens(), CPU
    )
    parts = Trainer(
        run_of({**common, "training.batch": 1, "training.accumulation": 4}), _tokens(), CPU
    )
    for _ in range(3):
        one, other = whole.step(), parts.step()
        assert one.tokens == other.tokens
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


@pytest.mark.parametrize("implementation", ["plain", "sdpa", "tilewise"])
def test_implementations_learn_the_same_from_documents(implementation: str) -> None:
    def losses(name: str) -> list[float]:
        changes = {"data.packing": "documents", "attention.implementation": name}
        trainer = Trainer(run_of(changes), _tokens(), CPU)
        return [trainer.step().loss for _ in range(STEPS)]

    assert losses(implementation) == pytest.approx(losses("plain"), rel=1e-5)


def test_evaluations_are_the_same_whatever_the_packing(tmp_path: Path) -> None:
    """Before the first step; and documents apart are another evaluation, for all arms."""

    def first(number: int, changes: dict[str, Any]) -> float | None:
        return _finished(tmp_path / str(number), changes).evaluations[0].loss

    packings = ("stream", "documents", "padded")
    stream = {first(at, {"data.packing": each}) for at, each in enumerate(packings)}
    apart = {
        first(at, {"data.packing": each, "evaluation.documents": True})
        for at, each in enumerate(packings, 3)
    }
    assert len(stream) == len(apart) == 1
    assert stream != apart


def test_attention_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    watched = _finished(tmp_path / "watched", {})
    without = _finished(tmp_path / "without", {"evaluation.attention_windows": 0})
    plain = _finished(tmp_path / "plain", {"attention.implementation": "plain"})
    assert watched.end is not None
    assert without.end is not None
    assert watched.end.weights_sha256 == without.end.weights_sha256
    assert [each.loss for each in watched.evaluations] == [
        each.loss for each in without.evaluations
    ]
    for record in (without, plain):
        assert [each.softmaxes for each in record.evaluations] == [None] * 4
    for each in watched.evaluations:
        assert each.softmaxes is not None
        assert [layer.layer for layer in each.softmaxes] == [0, 1]
        for layer in each.softmaxes:
            assert layer.entropy is not None
            assert layer.lowest_head is not None
            assert layer.max_logit is not None
            assert 0 < layer.lowest_head <= layer.entropy < np.log(16)
    assert watched.evaluations[0].softmaxes != watched.evaluations[-1].softmaxes
