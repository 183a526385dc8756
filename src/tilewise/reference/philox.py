"""Philox4x32-10, the counter-based generator behind dropout, and the dropout mask itself.

Layout (the same on every backend, so that a mask never has to be stored)::

    key     = (seed & 0xffffffff, (seed >> 32) & 0xffffffff)        seed: any 64-bit integer
    counter = (n >> 2, m, h, b)
    word    = philox4x32(counter, key)[n & 3]
    keep    = word >= threshold,   threshold = min(round(p * 2**32), 2**32 - 1)

with ``b`` the batch entry (the sequence's index in a variable-length call), ``h`` the query head,
``m`` the query and ``n`` the key within its sequence, all counted from 0. ``round`` goes to the
nearest, halves to even. One call of the generator serves four neighbouring keys.

Golden words: zero counter and zero key give ``6627e8d5 e169c58d bc57ac4c 9b00dbd8``.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011,
section 3.3, and the known-answer vectors of Random123.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of ``a * b`` for 32-bit values held in int64.

    ``a`` is split in 16-bit halves, since the 64-bit product itself would overflow a signed int64.
    """
    upper = (a >> 16) * b
    lower = (a & 0xFFFF) * b
    high = (upper + (lower >> 16)) >> 16
    low = (((upper & 0xFFFF) << 16) + lower) & _MASK32
    return high, low


def philox4x32(
    counter: Sequence[Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four pseudo-random 32-bit words for every counter.

    Args:
        counter: four int64 tensors of one broadcastable shape, values in [0, 2**32).
        key: two 32-bit integers, or int64 tensors of one element with their values.

    Returns:
        Four int64 tensors of the broadcast shape, values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK32, (k1 + _WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def seed_tensor(seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the 64 bits of a seed as an int64 tensor of one element on a device."""
    if isinstance(seed, Tensor):
        return seed
    signed = seed - 2**64 if seed >= 2**63 else seed
    return torch.full((), signed, dtype=torch.int64, device=device)


def split_seed(seed: int | Tensor) -> tuple[int | Tensor, int | Tensor]:
    """Return the two key words (low, high) of a 64-bit seed, signed or not."""
    return seed & _MASK32, (seed >> 32) & _MASK32


def threshold(dropout_p: float) -> int:
    """Return the word below which an element is dropped: ``min(round(p * 2**32), 2**32 - 1)``."""
    return min(round(dropout_p * 2**32), _MASK32)


def keep_mask(
    seed: int | Tensor,
    dropout_p: float,
    *,
    batches: range,
    heads: range,
    queries: range,
    keys: range,
) -> Tensor:
    """Return the dropout mask of a block: True where the probability is kept.

    ``seed`` has 64 bits, as a number or an int64 tensor of one element, which stays on its device.
    ``dropout_p`` is the probability of dropping, in [0, 1). The ranges are the block's places, each
    of step 1.

    Returns:
        bool ``[len(batches), len(heads), len(queries), len(keys)]``, on the seed's device.
    """
    device = seed.device if isinstance(seed, Tensor) else None
    first, last = keys.start >> 2, -(-keys.stop // 4)
    counter = (
        torch.arange(first, max(last, first), device=device),
        torch.arange(queries.start, queries.stop, device=device)[:, None],
        torch.arange(heads.start, heads.stop, device=device)[:, None, None],
        torch.arange(batches.start, batches.stop, device=device)[:, None, None, None],
    )
    words = torch.stack(philox4x32(counter, split_seed(seed)), dim=-1).flatten(-2)
    offset = keys.start - 4 * first
    return words[..., offset : offset + len(keys)] >= threshold(dropout_p)
