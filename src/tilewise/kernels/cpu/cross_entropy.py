"""Rows of logits as losses and gradients, by the compiled core: in place, in their own dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.core import core, threads
from tilewise.kernels.cross_entropy import InPlace, Rows

# By their code in the core.
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class InCore(InPlace):
    """The two steps of ``RowKernel`` over CPU tensors."""

    def run(self, rows: Rows, losses: Tensor | None, lse: Tensor, first: int, words: int) -> None:
        """See ``InPlace``."""
        logits, targets, scales, loss = rows
        # The core believes these.
        assert logits.stride(1) == 1
        assert all(each is None or each.is_contiguous() for each in (targets, losses, lse, scales))
        sizes = (*logits.shape, logits.stride(0), first, words)
        arrays = (logits, targets, losses, lse, scales)
        addresses = tuple(0 if each is None else each.data_ptr() for each in arrays)
        core().cross_entropy(DTYPES[logits.dtype], threads(), sizes, addresses, *loss)
