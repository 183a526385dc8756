"""What a model writes follows its own distribution, the seed, and nothing else."""

from __future__ import annotations

import unicodedata
from typing import Any

import pytest
import torch

from tests.lab.study.train.toys import record_of, session_of
from tilelab.models.gpt2 import GPT2, Shape
from tilelab.study.tasks.language import printable, sample


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


def test_a_model_of_another_kernel_writes_the_same() -> None:
    shape = Shape(layers=2, heads=2, width=32, context=64, vocabulary=50)
    wrote = [
        sample(GPT2(shape, implementation=each), [1], 60, 0)
        for each in ("plain", "sdpa", "tilewise")
    ]
    assert wrote[0] == wrote[1] == wrote[2]


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


def test_a_run_without_one_writes_none(tmp_path: Any) -> None:
    session_of(tmp_path).work()
    assert record_of(tmp_path).sample is None


def test_what_is_not_seen_is_replaced() -> None:
    assert printable("a\x1b[31m\u202eb\n\tc\0") == "a\ufffd[31m\ufffdb\n\tc\ufffd"
