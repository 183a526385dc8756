"""The rows of ``linear_cross_entropy`` in Triton: exact, in place, whatever the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewise
from tests.contract import assert_all_exact, assert_same_bits
from tests.test_cross_entropy import OPTIONS, operands, plain, with_gradients
from tilewise import cross_entropy as module
from tilewise.kernels.cross_entropy import InTorch, Loss, Rows
from tilewise.kernels.gpu import cross_entropy as kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks a row, the last of them not full; some blocks of tokens and of words."""
    monkeypatch.setattr(kernels, "_MOST_WORDS", 256)
    monkeypatch.setattr(module, "_kernel", lambda _: kernels.InTriton())
    for name, size in {"_LEAST_BYTES": 64, "_LEAST_TOKENS": 16, "_LEAST_WORDS": 300}.items():
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(module, "_PART", 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_losses_and_gradients_are_exact(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    leaves, targets, weights = operands(dtype, ignored=options.get("ignore_index", -100))
    leaves[0] = leaves[0].detach()[:20].requires_grad_()
    targets, weights = targets[:20], weights[:20]
    wide = [each.detach().double().requires_grad_() for each in leaves]
    truth = with_gradients(plain(wide, targets, weights, **options), wide)
    naive = with_gradients(plain(leaves, targets, weights, **options), leaves)
    hidden, weight, bias = leaves

    found = tilewise.linear_cross_entropy(
        hidden, weight, targets, bias, token_weights=weights, **options
    )
    names = ("loss", "grad hidden", "grad weight", "grad bias")
    mine = with_gradients(found, leaves)
    assert_all_exact(mine, naive, truth, names)


def logits_of(words: int, **options: Any) -> tuple[Tensor, Tensor, Tensor, Loss]:
    """Strided rows of logits, their targets and scales; the second row is ignored."""
    torch.manual_seed(3)
    logits = torch.randn(5, words + 7)[:, :words] * 3
    targets = torch.randint(0, words, (5,))
    targets[1] = -100
    return logits, targets, torch.rand(5) + 0.5, Loss(**{**_LOSS._asdict(), **options})


_LOSS = Loss(-100, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("words", [1, 2, 255, 256, 257, 700])
def test_any_number_of_words_and_rows_with_gaps(words: int) -> None:
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 5.0}
    logits, targets, scales, loss = logits_of(words, **options)
    expected = InTorch().close(Rows(logits.clone(), targets, scales, loss))
    again = kernels.InTriton().close(Rows(logits.clone(), targets, scales, loss))
    losses, lse, change = kernels.InTriton().close(Rows(logits, targets, scales, loss))
    assert change is logits
    for got, twice in zip((losses, lse, change), again, strict=True):
        assert twice is not None
        assert_same_bits(got, twice, "a result")
    torch.testing.assert_close((losses, lse, change), expected, rtol=1e-5, atol=1e-6)


def test_a_block_of_words_has_its_part_of_the_gradient() -> None:
    logits, targets, scales, loss = logits_of(300, label_smoothing=0.1, softcap=5.0)
    _, lse, whole = InTorch().close(Rows(logits.clone(), targets, scales, loss))
    assert whole is not None
    for first, end in ((0, 140), (140, 150), (150, 300)):
        part = logits[:, first:end]
        found = kernels.InTriton().differentiate(Rows(part, targets, scales, loss), lse, first, 300)
        torch.testing.assert_close(found, whole[:, first:end], rtol=1e-5, atol=1e-7)


def test_rows_that_are_not_finite() -> None:
    """Infinite logits, a target that is no word, and whatever is in a row that is ignored."""
    logits, targets, scales, loss = logits_of(300)
    logits[0, 7] = -torch.inf
    logits[1] = torch.nan
    logits[2, :] = -torch.inf
    logits[2, 250] = targets[2] = 250
    logits[3, 130] = torch.nan
    targets[4] = 300
    given = logits.clone()
    losses, lse, change = kernels.InTriton().close(Rows(logits, targets, scales, loss))
    expected = InTorch().close(Rows(given, targets, scales, loss))
    assert change is not None
    assert expected[2] is not None
    expected[2][1] = 0  # in torch's operations 0 times nan
    torch.testing.assert_close((losses, lse, change), expected, equal_nan=True)
    assert losses.isnan().tolist() == [False, False, False, True, True]
    assert losses[1:3].tolist() == [0, 0]
    assert not change[2].any()


def test_a_small_loss_keeps_its_digits() -> None:
    """As ``lse - z_y`` with both near 16 it would be a multiple of 1.9e-6: 18 and not 17.6."""
    logits = torch.full((1, 300), 0.0)
    logits[0, 9] = 16.0
    losses, _, _ = kernels.InTriton().close(Rows(logits, torch.tensor([9]), None, _LOSS))
    true = (299 * torch.exp(torch.tensor(-16.0, dtype=torch.float64))).log1p()
    torch.testing.assert_close(losses[0].double(), true, rtol=0.01, atol=0)
