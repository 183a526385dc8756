"""What happens in a pass of the ring, in which order: the one schedule that is run and predicted.

A **reader** is a position whose rows compute with keys, and an **owner** the position that holds
them. At distance d the owner is d places before the reader. Keys travel from owner to reader,
gradients of keys from reader to owner. At distance 0 both are one position, and nothing travels.

``ring`` runs these events at its position. ``costs`` gives them their bytes and seconds at every
position, and ``replay`` their times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

What: TypeAlias = Literal["keys and values", "gradients of keys and values"]
KEYS: What = "keys and values"
GRADIENTS: What = "gradients of keys and values"


class Event(NamedTuple):
    """An event of a pass, the same at every position.

    Args:
        kind: an exchange starts, or it is waited for; or all compute.
        what: is exchanged; KEYS where all compute.
        distances: between the readers and the owners of these keys.
    """

    kind: Literal["start", "wait", "compute"]
    what: What
    distances: tuple[int, ...]


def owner_of(reader: Any, distance: Any, count: int) -> Any:
    """Return the position whose keys a reader gets; of whole numbers, or of arrays of them."""
    return (reader - distance) % count


def reader_of(owner: Any, distance: Any, count: int) -> Any:
    """Return the position that gets the keys of an owner; likewise."""
    return (owner + distance) % count


def ring_events(count: int, gathers: bool, gradients: bool) -> Iterator[Event]:
    """Yield the events of a pass.

    Args:
        count: of positions.
        gathers: whether all keys come at once. Else those of one distance come in each turn, while
            all compute with those of the turn before.
        gradients: whether gradients of keys go to their owners. Those of a turn travel while all
            compute in the next one.
    """
    every = tuple(range(count))
    turns = [every] if gathers else [every[at : at + 1] for at in every]
    yield Event("start", KEYS, turns[0])
    for number, turn in enumerate(turns):
        yield Event("wait", KEYS, turn)
        if number + 1 < len(turns):
            yield Event("start", KEYS, turns[number + 1])
        yield Event("compute", KEYS, turn)
        if gradients:
            if number > 1:
                yield Event("wait", GRADIENTS, turns[number - 1])
            yield Event("start", GRADIENTS, turn)
            if number in (0, len(turns) - 1):  # the first ones are at home already
                yield Event("wait", GRADIENTS, turn)
