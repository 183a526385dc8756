"""The generator: published vectors, the counter's layout, and its statistics."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.philox import keep_mask, philox4x32, threshold

FULL = 0xFFFFFFFF
# Random123's known answers for philox4x32 with ten rounds: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL, FULL), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def _words(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    return tuple(int(word) for word in philox4x32([torch.tensor(c) for c in counter], key))


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """Word for word."""
    assert _words(counter, key) == words


@pytest.mark.parametrize("seed", [0, 5, -1, 2**64 - 1, 0x1234_5678_9ABC_DEF0])
def test_layout(seed: int) -> None:
    """counter = (n >> 2, m, h, b), key = (seed low, seed high), word n & 3, keep >= threshold."""
    p = 0.37
    ranges = {
        "batches": range(1, 3),
        "heads": range(2, 4),
        "queries": range(5, 8),
        "keys": range(3, 14),
    }
    mask = keep_mask(seed, p, **ranges)
    assert mask.shape == (2, 2, 3, 11)
    for i, b in enumerate(ranges["batches"]):
        for j, h in enumerate(ranges["heads"]):
            for x, m in enumerate(ranges["queries"]):
                for y, n in enumerate(ranges["keys"]):
                    key = (seed & FULL, seed >> 32 & FULL)
                    word = _words((n >> 2, m, h, b), key)[n & 3]
                    assert bool(mask[i, j, x, y]) == (word >= round(p * 2**32))


def test_threshold() -> None:
    """Rounded to the nearest word, and never past the last one."""
    assert threshold(0.0) == 0
    assert threshold(0.5) == 1 << 31
    assert threshold(3 * 2.0**-32) == 3
    assert threshold(math.nextafter(1.0, 0.0)) == FULL


def test_words_are_uniform() -> None:
    """Mean, variance and each bit of many words, within five standard deviations."""
    words = torch.stack(philox4x32([torch.arange(2**16), *[torch.tensor(0)] * 3], (1, 2)))
    count = words.numel()
    uniform = words.double() / 2**32
    assert abs(float(uniform.mean()) - 0.5) < 5 / math.sqrt(12 * count)
    assert abs(float(uniform.var()) - 1 / 12) < 5 * math.sqrt(1 / 180 / count)
    for bit in range(32):
        ones = float(((words >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / math.sqrt(count)
