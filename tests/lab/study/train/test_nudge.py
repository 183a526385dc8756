"""The nudge: every weight, one unit in the last place, by a coin of its own."""

from __future__ import annotations

import torch

from tests.lab.study.train.toys import trainer_of
from tilelab.study.tasks.nudge import nudge
from tilelab.study.train.trainer import Trainer

NUDGED = {"model.nudge": True}


def _ulps(trainer: Trainer, other: Trainer) -> torch.Tensor:
    """How many representable numbers lie between the weights, as int64 of their bits."""
    pairs = zip(trainer.model.parameters(), other.model.parameters(), strict=True)
    return torch.cat(
        [
            (a.view(torch.int32).long() - b.view(torch.int32).long()).flatten()
            for a, b in pairs
            if (b != 0).all()
        ]
    )


def test_every_weight_moves_to_a_neighbour_by_a_fair_coin() -> None:
    moved = _ulps(trainer_of(NUDGED), trainer_of())
    assert moved.abs().eq(1).all()
    assert 0.45 < moved.gt(0).float().mean() < 0.55


def test_weights_of_zero_move_too() -> None:
    layer = torch.nn.Linear(4, 50)
    torch.nn.init.zeros_(layer.bias)
    nudge(layer, 0)
    assert (layer.bias != 0).all()
    assert layer.bias.abs().max() < 1e-44


def test_the_coin_is_the_seeds_and_not_the_weights() -> None:
    seeds = [trainer_of(NUDGED, seed) for seed in (0, 0, 1)]
    first, again, other = (_ulps(each, trainer_of(seed=each.run.seed)) for each in seeds)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    # A coin that fell with the sign or the size of the weights would be no coin.
    weights = torch.cat(
        [each.flatten() for each in trainer_of().model.parameters() if (each != 0).all()]
    )
    assert abs(torch.corrcoef(torch.stack([weights, first.sign() * weights.sign()]))[0, 1]) < 0.05


def test_a_nudged_run_stays_close_and_is_not_the_same() -> None:
    nudged, plain = trainer_of(NUDGED), trainer_of()
    pairs = [(nudged.step().loss, plain.step().loss) for _ in range(3)]
    assert all(abs(a - b) < 1e-5 * b for a, b in pairs)
    assert _ulps(nudged, plain).any()


def test_the_same_with_every_attention() -> None:
    arms = [
        trainer_of({**NUDGED, "attention.implementation": name}) for name in ("plain", "tilewise")
    ]
    assert not _ulps(*arms).any()
