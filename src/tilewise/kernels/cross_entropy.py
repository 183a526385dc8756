"""Rows of logits as losses and gradients: what a kernel of ``linear_cross_entropy`` does."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tilewise.kernels.cpu import fast_products
from tilewise.torch_private import onednn_products

PIECE = 256  # rows, columns and terms of a product by float32: larger ones take memory of MKL
_FEW = 64  # rows or columns


class Loss(NamedTuple):
    """The terms of a token's loss: ``tilewise.linear_cross_entropy`` has the formula."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float  # 0 for none


class Rows(NamedTuple):
    """A block of logits [T', V'] before the softcap, and what it takes to make losses of them.

    Args:
        logits: of some tokens, of all words or of some; the kernels write over them.
        targets: int64 [T'].
        scales: [T'], what the gradients of the losses are multiplied by; None for no gradient.
        loss: of each token.
    """

    logits: Tensor
    targets: Tensor
    scales: Tensor | None
    loss: Loss


class RowKernel(Protocol):
    """The two steps over a block of logits."""

    in_place: bool  # the gradient lies where the logits were, and nothing else of their size

    def close(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return losses and lse [T'] of rows of all words, and with scales their gradients.

        The gradients are of ``sum_t scales_t loss_t``, by the logits and in their dtype.
        """
        ...

    def differentiate(self, rows: Rows, lse: Tensor, first: int, words: int) -> Tensor:
        """Return the gradients by a block of words from ``first`` on, of ``words`` in all."""
        ...


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of losses and sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def write_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Write the logits of hidden states [T', D] and weights [V', D] to ``out`` [T', V'].

    Here and below a second operand with wider numbers is rounded to the dtype of the first.
    """
    if _by_float32(hidden, weight.T):
        _multiply(hidden, weight.T, out, bias)
    elif bias is None:
        torch.mm(hidden, weight.to(hidden.dtype).T, out=out)
    else:
        torch.addmm(bias, hidden, weight.to(hidden.dtype).T, out=out)


def write_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Write ``a @ b`` to ``out``, of the dtype of a."""
    if _by_float32(a, b):
        _multiply(a, b, out)
    else:
        torch.mm(a, b.to(a.dtype), out=out)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """Add ``a @ b`` to ``total``, of the dtype of a or a wider one; the first writes over it."""
    if _by_float32(a, b):
        _multiply(a, b, total, added=not first)
    elif total.dtype == a.dtype:
        total.addmm_(a, b.to(a.dtype), beta=0 if first else 1)
    else:
        # A backward pass may be under autocast to another dtype than that of the forward pass.
        with torch.autocast(a.device.type, enabled=False):
            product = a @ b.to(a.dtype)
        total.copy_(product) if first else total.add_(product)


def _by_float32(a: Tensor, b: Tensor) -> bool:
    """Return whether ``a @ b`` is computed in float32.

    On a CPU without AVX-512 torch multiplies 16 bits at 1 to 27 GFLOP/s, where float32 has 70; on
    an Intel processor with dot products of bfloat16 and no matrix tiles at 83, where it has 150.
    There few tokens are faster as they are: it takes longer to widen the weights.
    """
    if not a.is_cpu or a.dtype.itemsize != 2 or fast_products(a.dtype):
        return False
    return min(*a.shape, b.shape[1]) >= _FEW or not onednn_products(a.dtype)


def _multiply(
    a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None, added: bool = False
) -> None:
    """Write ``a @ b`` to ``out`` or add it, piece by piece in float32."""
    (rows, depth), columns = a.shape, b.shape[1]
    for row, column in product(range(0, rows, PIECE), range(0, columns, PIECE)):
        here = slice(row, row + PIECE), slice(column, column + PIECE)
        into = out[here]
        total = torch.zeros(into.shape, dtype=torch.float32, device=out.device)
        if added:
            total += into
        if bias is not None:
            total += bias[here[1]]
        for at in range(0, depth, PIECE):
            inner = slice(at, at + PIECE)
            total.addmm_(a[here[0], inner].float(), b[inner, here[1]].to(a.dtype).float())
        into.copy_(total)


class InPlace(ABC):
    """The two steps by one kernel, which writes over the logits."""

    in_place = True

    @abstractmethod
    def run(self, rows: Rows, losses: Tensor | None, lse: Tensor, first: int, words: int) -> None:
        """Write losses and lse of rows of all words, or read lse where ``losses`` is None.

        Where there are scales, gradients are written over the logits. ``first`` and ``words``
        are those of ``differentiate``.
        """

    def close(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``RowKernel``."""
        logits = rows.logits
        losses = logits.new_empty(len(logits), dtype=wide(logits.dtype))
        lse = torch.empty_like(losses)
        self.run(rows, losses, lse, 0, logits.shape[1])
        return losses, lse, None if rows.scales is None else logits

    def differentiate(self, rows: Rows, lse: Tensor, first: int, words: int) -> Tensor:
        """See ``RowKernel``."""
        self.run(rows, None, lse, first, words)
        return rows.logits


class InTorch:
    """The two steps in operations of torch, on any device."""

    in_place = False

    def close(self, rows: Rows) -> tuple[Tensor, Tensor, Tensor | None]:
        """See ``RowKernel``."""
        logits, targets, scales, loss = rows
        at = target_logits(logits, targets, loss)
        z = _capped(logits, loss)
        lse = torch.logsumexp(z, 1)
        found = lse + at * (loss.label_smoothing - 1)
        if loss.label_smoothing:
            found -= loss.label_smoothing * z.mean(1)
        if loss.z_loss:
            found += loss.z_loss * lse * lse
        losses = torch.where(targets == loss.ignore_index, 0.0, found)
        if scales is None:
            return losses, lse, None
        change = _gradient(z, targets, scales, lse, loss, 0, z.shape[1])
        return losses, lse, change.to(logits.dtype)

    def differentiate(self, rows: Rows, lse: Tensor, first: int, words: int) -> Tensor:
        """See ``RowKernel``."""
        logits, targets, scales, loss = rows
        assert scales is not None
        z = _capped(logits, loss)
        return _gradient(z, targets, scales, lse, loss, first, words).to(logits.dtype)


def target_logits(logits: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """Return the target's logit of rows of all words, after the softcap; nan if it is no word."""
    known = (targets >= 0) & (targets < logits.shape[1])
    found = logits.gather(1, torch.where(known, targets, 0)[:, None])
    return torch.where(known, _capped(found, loss)[:, 0], math.nan)


def _capped(logits: Tensor, loss: Loss) -> Tensor:
    z = logits.to(wide(logits.dtype))
    return z.div_(loss.softcap).tanh_().mul_(loss.softcap) if loss.softcap else z


def _gradient(
    z: Tensor, targets: Tensor, scales: Tensor, lse: Tensor, loss: Loss, first: int, words: int
) -> Tensor:
    kept = targets != loss.ignore_index
    scales = torch.where(kept, scales, 0.0)
    factor = scales * (1 + 2 * loss.z_loss * lse) if loss.z_loss else scales
    change = (z - lse[:, None]).exp_().mul_(factor[:, None])
    if loss.label_smoothing:
        change.sub_((scales * (loss.label_smoothing / words))[:, None])
    at = targets - first
    inside = (at >= 0) & (at < z.shape[1])
    less = torch.where(inside, scales * (loss.label_smoothing - 1), 0.0)
    change.scatter_add_(1, torch.where(inside, at, 0)[:, None], less[:, None])
    if loss.softcap:
        change.mul_(z.div_(loss.softcap).square_().neg_().add_(1))
    return change
