"""The demo's model and trainer: one argument is the only difference, rounding the only drift."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.lab.demo.corpus import Windows
from tilewise.lab.demo.model import GPT, nudge, write
from tilewise.lab.demo.settings import Settings
from tilewise.lab.demo.worker import Job, Trainer, schedule
from tilewise.lab.study.train.memory_split import saved_bytes

SMALL = Settings(steps=12, context=40, batch=2, layers=2, heads=2, width=16)
TEXT = b"".join(b"def f%d(x):\n    return x + %d\n" % (n, n) for n in range(300))


def _trainer(implementation: Any, nudge_seed: int | None = None) -> Trainer:
    job = Job(SMALL.as_json(), "", implementation, nudge_seed)
    return Trainer(SMALL, Windows(TEXT, SMALL.context, 1), job)


def test_arms_start_from_the_same_weights() -> None:
    plain, tilewise = (GPT(16, 2, 2, name, seed=3) for name in ("plain", "tilewise"))
    assert plain.state_dict().keys() == tilewise.state_dict().keys()
    for name, weight in plain.state_dict().items():
        assert torch.equal(weight, tilewise.state_dict()[name]), name


def test_a_model_sees_no_later_byte() -> None:
    model = GPT(16, 2, 2, "tilewise", seed=0)
    tokens = torch.randint(0, 256, (1, 30))
    changed = tokens.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_training_lowers_the_loss_and_the_arms_agree() -> None:
    plain, tilewise = _trainer("plain"), _trainer("tilewise")
    losses = [(plain.step(), tilewise.step()) for _ in range(SMALL.steps)]
    assert losses[-1][0] < losses[0][0] - 0.2
    assert max(abs(a - b) / a for a, b in losses) < 1e-5
    assert abs(plain.held_out() - tilewise.held_out()) < 1e-4
    assert plain.held_out() < 5.4


def test_training_is_repeatable_to_the_bit() -> None:
    first, second = _trainer("tilewise"), _trainer("tilewise")
    assert [first.step() for _ in range(4)] == [second.step() for _ in range(4)]


def test_a_nudge_moves_every_weight_by_one_ulp_up_or_down() -> None:
    before, after = GPT(16, 2, 1, "plain", seed=0), GPT(16, 2, 1, "plain", seed=0)
    nudge(after, seed=5)
    ups = 0
    for one, other in zip(before.parameters(), after.parameters(), strict=True):
        up = torch.nextafter(one, torch.tensor(torch.inf)) == other
        down = torch.nextafter(one, torch.tensor(-torch.inf)) == other
        assert bool((up ^ down).all())
        ups += int(up.sum())
    total = sum(weight.numel() for weight in before.parameters())
    assert 0.4 < ups / total < 0.6


def test_a_nudged_arm_differs_from_the_start() -> None:
    assert _trainer("plain").step() == pytest.approx(_trainer("plain", 9).step(), rel=1e-5)
    weights = [next(_trainer("plain", seed).model.parameters()) for seed in (None, 9, 10)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


def test_sampling_is_deterministic_and_keeps_to_the_context() -> None:
    model = GPT(16, 2, 1, "tilewise", seed=0)
    texts = [write(model, b"def ", 30, 8, seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].startswith(b"def ")
    assert len(texts[0]) == 34


def test_the_schedule_warms_up_and_ends_near_zero() -> None:
    rates = [schedule(step, 60) for step in range(60)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1.0
    assert rates[9] == rates[29] == 1.0
    assert rates[-1] == pytest.approx(1 / 30)
    assert all(
        rate > 0 for steps in (1, 2, 3) for rate in [schedule(s, steps) for s in range(steps)]
    )


def _kept(implementation: Any, tokens: torch.Tensor) -> int:
    model = GPT(16, 2, 1, implementation, seed=0)
    return saved_bytes(lambda: model(tokens), list(model.parameters()))[1]


def test_plain_keeps_the_matrix_and_tilewise_does_not() -> None:
    tokens = torch.randint(0, 256, (1, 256))
    plain, tilewise = _kept("plain", tokens), _kept("tilewise", tokens)
    matrices = 2 * 256 * 256 * 4
    assert plain - tilewise > 0.9 * matrices
    assert tilewise < 1.5 * matrices
