"""What is minimised: against torch's own label smoothing, and z-loss by hand."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tilelab.study.tasks.objective import losses

LOGITS = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(1))


def test_without_options_the_objective_is_the_cross_entropy() -> None:
    logits = LOGITS.clone().requires_grad_()
    objective, plain = losses(logits, TARGETS)
    expected = functional.cross_entropy(LOGITS.flatten(0, 1), TARGETS.flatten())
    assert objective.item() == plain.item() == expected.item()
    assert objective.requires_grad
    assert not plain.requires_grad


def test_label_smoothing_is_that_of_torch_and_the_record_stays_plain() -> None:
    objective, plain = losses(LOGITS, TARGETS, label_smoothing=0.2)
    rows, flat = LOGITS.flatten(0, 1), TARGETS.flatten()
    smoothed = functional.cross_entropy(rows, flat, label_smoothing=0.2)
    assert objective.item() == pytest.approx(smoothed.item(), rel=1e-12)
    assert plain.item() == pytest.approx(functional.cross_entropy(rows, flat).item(), rel=1e-12)


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
