"""Rows of logits as losses and gradients, by the compiled core: in place, in their own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.core import core
from tilewise.kernels.cpu.forks import threads
from tilewise.kernels.cross_entropy import Loss, wide

# By their code in the core.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class InCore:
    """The two steps of ``RowKernel`` over CPU tensors."""

    in_place = True

    def close(
        self, logits: Tensor, targets: Tensor, scales: Tensor | None, loss: Loss
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``RowKernel``."""
        losses = logits.new_empty(len(logits), dtype=wide(logits.dtype))
        lse = torch.empty_like(losses)
        _run(logits, targets, losses, lse, scales, loss, 0, logits.shape[1])
        return losses, lse, None if scales is None else logits

    def differentiate(
        self,
        logits: Tensor,
        targets: Tensor,
        scales: Tensor,
        lse: Tensor,
        loss: Loss,
        first: int,
        words: int,
    ) -> Tensor:
        """See ``RowKernel``."""
        _run(logits, targets, None, lse, scales, loss, first, words)
        return logits


def _run(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor | None,
    lse: Tensor,
    scales: Tensor | None,
    loss: Loss,
    first: int,
    words: int,
) -> None:
    # The core believes these.
    assert logits.stride(1) == 1
    assert all(each is None or each.is_contiguous() for each in (targets, losses, lse, scales))
    sizes = (*logits.shape, logits.stride(0), first, words)
    arrays = (logits, targets, losses, lse, scales)
    addresses = tuple(0 if each is None else each.data_ptr() for each in arrays)
    core().cross_entropy(DTYPES[logits.dtype], threads(), sizes, addresses, *loss)
