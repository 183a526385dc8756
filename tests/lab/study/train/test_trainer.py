"""One step by hand, what is paired between arms, every option of a step; rows of other kinds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.lab.study.records_of import known
from tests.lab.study.train.toys import CPU, STEPS, finished, run_of, tokens_of, trainer_of
from tilelab.study import need as needs
from tilelab.study.tasks.families import nudge
from tilelab.study.train.state import weights_sha256
from tilelab.study.train.trainer import Diverged, Trainer
from tilewise.errors import InvalidArgument


def _bits(trainer: Trainer) -> str:
    return weights_sha256(trainer.model)


def test_a_step_is_the_one_written_out() -> None:
    changes = {"training.accumulation": 1, "training.clip": 0.5, "optimizer.lr": 0.01}
    trainer, other = trainer_of(changes), trainer_of(changes)
    taken = trainer.step()

    model, batch = other.model, other._batches(0)[0]
    (inputs,), targets = batch.inputs, batch.targets
    loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    no_decay = {name: each for name, each in model.named_parameters() if each.dim() < 2}
    no_decay |= {f"{name}.weight": getattr(model, name).weight for name in ("tokens", "positions")}
    decay = [each for name, each in model.named_parameters() if name not in no_decay]
    # No warm-up fits in so few steps, and a linear schedule starts at the full rate.
    groups = [
        {"params": decay, "weight_decay": 0.1},
        {"params": list(no_decay.values()), "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=taken.lr, betas=(0.9, 0.95)).step()

    assert taken.step == trainer.done == 1
    assert taken.loss == pytest.approx(loss.item(), rel=1e-6)
    assert taken.gradient_norm == pytest.approx(norm.item(), rel=1e-5)
    assert taken.lr == 0.01
    assert taken.wall_s > 0
    assert taken.cpu_s > 0
    for name, weight in trainer.model.named_parameters():
        assert torch.allclose(weight, model.state_dict()[name], rtol=1e-5, atol=1e-7), name


def test_training_learns_and_the_rate_follows_its_schedule() -> None:
    trainer = trainer_of({"budget.steps": 30, "optimizer.lr": 0.01, "schedule.warmup": 0.1})
    taken = [trainer.step() for _ in range(30)]
    assert trainer.over
    assert taken[-1].loss < taken[0].loss - 1.0
    assert [each.lr for each in taken[:4]] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert taken[-1].lr == pytest.approx(0.01 / 27)


ARMS: list[dict[str, Any]] = [
    {"attention.implementation": "plain"},
    {"attention.implementation": "sdpa"},
    {"optimizer.name": "muon"},
    {"schedule.name": "wsd"},
    {"model.dropout.residual": 0.1},
    {"training.label_smoothing": 0.1},
    {"training.precision": "bf16"},
    {"training.checkpointing": True},
    {"training.loss_tokens": 5},
]


@pytest.mark.parametrize("changes", ARMS, ids=str)
def test_a_seed_gives_every_arm_the_same_weights_and_batches(changes: dict[str, Any]) -> None:
    baseline, arm, other = trainer_of(seed=4), trainer_of(changes, seed=4), trainer_of(seed=5)
    assert _bits(baseline) == _bits(arm) != _bits(other)
    for step in range(STEPS):
        batches = baseline._batches(step)
        for one, two in zip(batches, arm._batches(step), strict=True):
            assert torch.equal(one.inputs[0], two.inputs[0])
            assert torch.equal(one.targets, two.targets)
            assert one.counted == two.counted == one.tokens == one.targets.numel()
        assert not torch.equal(batches[0].inputs[0], other._batches(step)[0].inputs[0])


def _three_steps(trainer: Trainer) -> tuple[list[float], str]:
    """Losses, and the hash of all state. A trainer owns torch's random state: one at a time."""
    return [trainer.step().loss for _ in range(3)], trainer.state({}).sha256


def test_options_change_what_is_learnt_and_not_what_is_recorded_first() -> None:
    baseline = trainer_of()
    first = baseline.step().loss
    for changes in (
        {"training.label_smoothing": 0.2},
        {"training.z_loss": 0.1},
        {"training.clip": 0.01},
        {"optimizer.weight_decay": 5.0},
    ):
        other = trainer_of(changes)
        assert other.step().loss == pytest.approx(first, rel=1e-6), changes
        assert _bits(other) != _bits(baseline), changes


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_products_and_wide_weights(precision: str) -> None:
    trainer, wide = trainer_of({"training.precision": precision}), trainer_of()
    with trainer.autocast():
        assert trainer.model(*trainer._batches(0)[0].inputs).dtype == trainer.dtype != torch.float32
    for _ in range(3):
        assert trainer.step().loss == pytest.approx(wide.step().loss, rel=0.02)
    assert all(each.dtype == torch.float32 for each in trainer.model.parameters())
    assert _bits(trainer) != _bits(wide)


def test_an_overflow_of_scaled_gradients_is_a_skipped_step() -> None:
    trainer = trainer_of({"training.precision": "fp16"})
    trainer._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = _bits(trainer)
    assert not math.isfinite(trainer.step().gradient_norm)
    assert _bits(trainer) == before
    assert trainer.done == 1
    assert trainer._scaler.get_scale() == 2.0**39


def test_gradients_that_overflow_at_any_scale_are_divergence() -> None:
    trainer = trainer_of({"training.precision": "fp16"})
    trainer._scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    trainer.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged, match="step 1 is not finite at any scale"):
        trainer.step()


def test_a_loss_or_gradient_that_is_not_finite_is_divergence_and_takes_no_step() -> None:
    trainer = trainer_of()
    trainer.model.norm.bias.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(Diverged, match="norm of the gradient of step 1"):
        trainer.step()
    trainer = trainer_of()
    trainer.step()
    with torch.no_grad():
        trainer.model.norm.bias[0] = math.nan
    before = _bits(trainer)
    with pytest.raises(Diverged, match="the loss of step 2 is nan"):
        trainer.step()
    assert _bits(trainer) == before
    assert trainer.done == 1


def test_where_memory_goes_and_that_asking_changes_nothing() -> None:
    changes = {"model.dropout.residual": 0.2}
    undisturbed = _three_steps(trainer_of(changes))
    trainer = trainer_of(changes)
    losses = [trainer.step().loss]
    split = trainer.split()
    losses += [trainer.step().loss, trainer.step().loss]
    assert (losses, trainer.state({}).sha256) == undisturbed
    weights = 4 * trainer.parameters["total"]
    assert split.weights_bytes == split.gradients_bytes == weights
    assert 2 * weights <= known(split.optimizer_bytes) < 2 * weights + 1024
    assert known(split.activations_bytes) > 0


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_loss_in_chunks_learns_the_same_with_fewer_logits(precision: str, tied: bool) -> None:
    changes = {"training.precision": precision, "model.tied": tied, "training.batch": 8}
    whole, chunked = trainer_of(changes), trainer_of({**changes, "training.loss_tokens": 16})
    for _ in range(STEPS):
        assert chunked.step().loss == pytest.approx(whole.step().loss, rel=2e-4)
    logits = 4 * 8 * 16 * 256  # of a micro-batch
    most, least = (known(each.split().activations_bytes) for each in (whole, chunked))
    assert most - least > logits / 2


def test_a_loss_in_chunks_has_no_scaled_gradients() -> None:
    with pytest.raises(InvalidArgument, match=r"training\.loss_tokens: got 8 with .*fp16"):
        trainer_of({"training.loss_tokens": 8, "training.precision": "fp16"})


def test_parameters_count_the_tied_head_once_and_name_the_positions() -> None:
    trainer = trainer_of()
    d, vocabulary, context = 16, 256, 16
    layer = 4 * (d * d + d) + (8 * d * d + 5 * d) + 4 * d
    total = vocabulary * d + context * d + 2 * layer + 2 * d
    assert trainer.parameters == {"total": total, "embedding": context * d}
    other = trainer_of(FACTORS, seed=7)  # without a table nothing is looked up
    assert other.parameters == {"total": needs.parameters(other.config), "embedding": 0}
    identity = {"config": other.run.config_hash, "seed": "7", "corpus": "0" * 64}
    assert other.identity == identity


FACTORS = {
    "model.positions": "rotary",
    "model.kv_heads": 1,
    "model.norm": "rms",
    "model.qk_norm": True,
}


def test_variants_reach_the_model() -> None:
    window = trainer_of({"attention.variant": {"name": "window", "size": 2}})
    assert _bits(window) == _bits(trainer_of())
    assert window.step().loss != trainer_of().step().loss


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_run_goes_on_to_the_bit_and_learns_the_same() -> None:
    changes = {"training.compile": True, "model.dropout.residual": 0.1}
    whole = trainer_of(changes)
    losses = [whole.step().loss for _ in range(4)]
    first = trainer_of(changes)
    assert [first.step().loss for _ in range(2)] == losses[:2]
    state = first.state({})
    torch.manual_seed(99)
    second = trainer_of(changes)
    second.restore(state)
    assert [second.step().loss for _ in range(2)] == losses[2:]
    assert second.state({}).sha256 == whole.state({}).sha256
    eager, compiled = trainer_of(), trainer_of({"training.compile": True})
    for _ in range(3):
        assert compiled.step().loss == pytest.approx(eager.step().loss, rel=1e-5)
    probed = [("tilewise cpu (eager probe)", 6)] * 2
    assert [(each.kernel, each.calls) for each in compiled.guard.kernels().layers] == probed
    assert known(compiled.split().activations_bytes) > 0


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


def test_a_head_of_its_own_multiplies_and_is_trained_like_an_embedding() -> None:
    """Its table of tokens is looked up; the head's operations are those of the tied one."""
    found = {}
    for tied in (True, False):
        trainer = trainer_of({"model.tied": tied, "optimizer": "muon"})
        numbers = trainer.parameters
        found[tied] = numbers["total"] - numbers["embedding"]
        heads = ["head.weight"] * (not tied)
        assert trainer.groups["no-decay"][-1:] == (heads or ["norm.bias"])
        trainer.step()
        moments = [trainer.optimizer.state[each] for each in trainer.model.parameters()]
        # AdamW's second moments: those of tables, biases and norms, and of the head.
        without = sum("momentum_buffer" in each for each in moments)
        assert without == len(trainer.groups["decay"])
    assert found[True] == found[False]


WARM = {"training.length_warmup": {"start": 4, "steps": 4}}


@pytest.mark.parametrize("packing", ["stream", "documents", "padded"])
def test_tokens_are_those_that_have_a_target(packing: str, tmp_path: Path) -> None:
    record = finished(tmp_path / "run", {"data.packing": packing, **WARM})
    trainer = Trainer(run_of({"data.packing": packing, **WARM}), tokens_of(), CPU)
    counts = [each.tokens or 0 for each in record.steps]
    for step, count in enumerate(counts):
        targets = [each.targets for each in trainer._batches(step)]
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
    cuts = ({"training.batch": rows, "training.accumulation": 4 // rows} for rows in (4, 1))
    whole, parts = (Trainer(run_of({**common, **each}), tokens_of(), CPU) for each in cuts)
    for _ in range(3):
        one, other = whole.step(), parts.step()
        assert one.tokens == other.tokens
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-4)


def test_evaluations_are_the_same_whatever_the_packing(tmp_path: Path) -> None:
    """Before the first step; and documents apart are another evaluation, for all arms."""

    def first(number: int, changes: dict[str, Any]) -> float | None:
        return finished(tmp_path / str(number), changes).evaluations[0].loss

    packings = ("stream", "documents", "padded")
    stream = {first(at, {"data.packing": each}) for at, each in enumerate(packings)}
    apart = {
        first(at, {"data.packing": each, "evaluation.documents": True})
        for at, each in enumerate(packings, 3)
    }
    assert len(stream) == len(apart) == 1
    assert stream != apart


def test_attention_is_recorded_and_changes_nothing(tmp_path: Path) -> None:
    watched = finished(tmp_path / "watched", {})
    without = finished(tmp_path / "without", {"evaluation.attention_windows": 0})
    plain = finished(tmp_path / "plain", {"attention.implementation": "plain"})
    assert known(watched.end).weights_sha256 == known(without.end).weights_sha256
    assert [each.loss for each in watched.evaluations] == [
        each.loss for each in without.evaluations
    ]
    for record in (without, plain):
        assert [each.softmaxes for each in record.evaluations] == [None] * 4
    for each in watched.evaluations:
        assert each.softmaxes is not None
        assert [layer.layer for layer in each.softmaxes] == [0, 1]
        for layer in each.softmaxes:
            assert layer.max_logit is not None
            assert 0 < known(layer.lowest_head) <= known(layer.entropy) < np.log(16)
    assert watched.evaluations[0].softmaxes != watched.evaluations[-1].softmaxes
