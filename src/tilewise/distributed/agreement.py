"""The first message of a call: all processes make the same call, or all of them raise.

Its numbers say whether a process has refused its call, and what the call is. Where these differ,
or one has refused, a second message says what each of them has. So all know, and nobody waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.distributed.peers import LostPeer, Peers
from tilewise.errors import InvalidArgument

_NUMBERS = 4  # of each process, the same in every call: messages of other lengths end a process
_BLOCK_BYTES = 1 << 22


class _First(NamedTuple):
    """The first message of a process, with the length in bytes and a digest of its text."""

    refused: bool
    length: int
    digest: int
    numbers: tuple[int, ...]


@contextmanager
def refusals_told(groups: Sequence[Peers], q: Tensor) -> Iterator[None]:
    """Tell the other processes of an error that is raised within, so that they raise too.

    Args:
        groups: as in ``agreed``, which is called next if there is no error.
        q: on the device on which messages travel.
    """
    device = q.device if isinstance(q, Tensor) else torch.device("cpu")
    try:
        yield
    except Exception as error:
        try:
            _compared(groups, f"{type(error).__name__}: {error}", (), device, refused=True)
        except LostPeer as lost:
            error.add_note(f"The other processes were not told, and may wait: {lost}")
        raise


def agreed(
    groups: Sequence[Peers], call: Mapping[str, str], numbers: Sequence[int], device: torch.device
) -> list[tuple[int, ...]]:
    """Return the whole numbers of every process, in their order, if all make the same call.

    All processes know of all before one of them raises. So all of them raise.

    Args:
        groups: of this process; of a mesh of two dimensions, its last one first.
        call: what has to be the same, by name.
        numbers: of this process, four at the most.
        device: on which they travel.

    Raises:
        InvalidArgument: another process makes another call, or has refused its own.
        LostPeer: one did not answer.
    """
    text = "\n".join(f"{name}: {value}" for name, value in call.items())
    every, texts = _compared(groups, text, numbers, device)
    position = 0
    for peers in reversed(groups):
        position = position * peers.count + peers.position
    for other, first in enumerate(every):
        if first.refused:
            came = f"an error at position {other}: {texts[other]}"
            raise InvalidArgument("call", came, "a call that no process refuses")
    differing = [
        other for other, first in enumerate(every) if first.digest != every[position].digest
    ]
    if differing:
        theirs = dict(line.split(": ", 1) for line in texts[differing[0]].split("\n"))
        names = [name for name in {**call, **theirs} if call.get(name) != theirs.get(name)]
        here, there = (
            ", ".join(f"{name} {given.get(name, 'none')}" for name in names)
            for given in (call, theirs)
        )
        came = f"position {position}: {here}; another one at positions {differing}: {there}"
        raise InvalidArgument("call", came, "the same call on every process, but for rows")
    return [first.numbers[: len(numbers)] for first in every]


def _compared(
    groups: Sequence[Peers],
    text: str,
    numbers: Sequence[int],
    device: torch.device,
    refused: bool = False,
) -> tuple[list[_First], list[str]]:
    """Return the first message of every process; and their texts, where not all are the same."""
    content = text.encode()
    digest = int.from_bytes(hashlib.sha256(content).digest()[:7], "big")
    padded = *numbers, *([0] * (_NUMBERS - len(numbers)))
    own = [int(refused), len(content), digest, *padded]
    found = _everyone(groups, "sizes", own, device)
    every = [_First(bool(x[0]), x[1], x[2], tuple(x[3:])) for x in found]
    if len({first.digest for first in every}) == 1 and not any(first.refused for first in every):
        return every, []
    longest = max(first.length for first in every)
    found = _everyone(groups, "errors", content.ljust(longest), device)
    return every, [bytes(each).decode().rstrip() for each in found]


def _everyone(
    groups: Sequence[Peers], phase: str, own: Sequence[int], device: torch.device
) -> list[list[int]]:
    """Return as many whole numbers of every process, in their order."""
    every, width = [list(own)], len(own)
    for peers in groups:
        found = peers.gathered(phase, list(chain(*every)), device)
        every = [part[at : at + width] for part in found for at in range(0, len(part), width)]
    return every


def in_words(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return what tensors are, by name: dtype, shape and a digest of their values."""
    return {
        name: f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} of digest {_digest(x):016x}"
        for name, x in named.items()
    }


def _digest(x: Tensor) -> int:
    """Return 64 bits that tell tensors of one shape apart, however they lie in memory.

    Bytes of a row are taken as words of 8. The digest is the sum of all words, each times a weight
    for its place in every dimension, modulo 2^64. A dimension that is expanded is read once.
    """
    if not x.numel():
        return 0
    x = x.detach().resolve_neg()
    x = x[None] if x.dim() == 0 else x
    shape, strides = x.shape, x.stride()[:-1]
    for dim, stride in enumerate(strides):
        x = x.narrow(dim, 0, 1) if stride == 0 else x
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    many = max(1, _BLOCK_BYTES // (rows.shape[1] * rows.element_size()))
    sums = torch.cat([_row_sums(some) for some in torch.split(rows, many)]).view(x.shape[:-1])
    for dim, stride in reversed(list(enumerate(strides))):
        weights = _weights(shape[dim], x.device)
        sums = (sums * (weights.sum() if stride == 0 else weights)).sum(-1)
    return int(sums) & (1 << 64) - 1


def _row_sums(rows: Tensor) -> Tensor:
    """Return the weighted sum of each row's words."""
    # A dimension of one entry may have any stride, also where the memory is in one piece.
    content = rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
    if content.shape[1] % 8:
        content = torch.nn.functional.pad(content, (0, -content.shape[1] % 8))
    flat = content.flatten()
    # A slice may begin anywhere in its memory; words begin at multiples of 8 bytes.
    flat = flat.clone() if flat.storage_offset() % 8 else flat
    words = flat.view(torch.int64).view(len(rows), -1)
    weights = _weights(words.shape[1], words.device)
    # On a GPU torch has no product of a matrix of whole numbers and a vector.
    return words @ weights if words.is_cpu else (words * weights).sum(-1)


@lru_cache(maxsize=64)
def _weights(count: int, device: torch.device) -> Tensor:
    """Return odd numbers without a pattern, int64 [count]: splitmix64 (Steele et al., 2014)."""
    x = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return (x ^ (x >> 31)) | 1
