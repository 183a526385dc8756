"""The length from which an approximate method is faster than exact attention, and its sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tilelab.bench.suites.methods import OURS
from tilelab.bench.suites.point import Point, groups

__all__ = ["Crossing", "crossing", "crossings", "listed", "medians_of", "told", "where"]


_AHEAD = 1.03  # times faster at the end; less is within the noise


class Crossing(NamedTuple):
    """The comparison of one method with another by length.

    Args:
        first, last: the shortest and the longest length at which both were measured.
        at: the length from which on it is faster, interpolated; ``first`` if it always is, None if
            it is not at ``last``, or hardly.
        gain: times faster at the last length (less than 1: slower).
    """

    first: int
    last: int
    at: float | None
    gain: float


def crossing(exact: Mapping[int, float], other: Mapping[int, float]) -> Crossing | None:
    """Return from which length on ``other`` is faster and stays so; None without a common length.

    Between two lengths, both times are taken to be powers of the length.

    Args:
        exact: seconds by length.
        other: the same of the method that may be faster.
    """
    lengths = sorted(exact.keys() & other.keys())
    if not lengths:
        return None
    ahead = [math.log(other[n] / exact[n]) for n in lengths]  # below 0: it is faster
    first, last = lengths[0], lengths[-1]
    gain = exact[last] / other[last]
    if gain < _AHEAD:
        return Crossing(first, last, None, gain)
    behind = [index for index, value in enumerate(ahead) if value >= 0]
    if not behind:
        return Crossing(first, last, float(first), gain)
    index = behind[-1]
    share = ahead[index] / (ahead[index] - ahead[index + 1])
    low, high = math.log(lengths[index]), math.log(lengths[index + 1])
    return Crossing(first, last, math.exp(low + share * (high - low)), gain)


def medians_of(points: Iterable[Point]) -> dict[str, dict[int, float]]:
    """Medians by method, then by length."""
    found: dict[str, dict[int, float]] = {}
    for point in points:
        if point.status == "ok" and point.median:
            found.setdefault(point.method, {})[point.length] = point.median
    return found


def crossings(points: Iterable[Point]) -> dict[str, dict[str, Crossing]]:
    """Find where each approximate method crosses over ours: by the case, then by the method."""
    found: dict[str, dict[str, Crossing]] = {}
    for (case, dtype, quantity), own in groups(points).items():
        medians = medians_of(own) if quantity == "seconds" else {}
        approximate = {point.method for point in own if not point.exact}
        each = {
            name: crossing(medians.get(OURS, {}), times)
            for name, times in medians.items()
            if name in approximate
        }
        known = {name: one for name, one in each.items() if one is not None}
        if known:
            found[f"{case}, {dtype}"] = known
    return found


def where(found: Crossing) -> str:
    """Return a crossing in a cell of a table."""
    if found.at is None:
        return f"not up to {found.last}"
    return f"from {found.first}" if found.at == found.first else f"from about {_near(found.at)}"


def told(what: str, exact: str, found: Mapping[str, Crossing]) -> str:
    """Return all crossings of one case, in a sentence.

    Args:
        what: the case.
        exact: name of the exact method.
        found: by the other methods' names.
    """
    if not found:
        return f"{what}: nothing to compare with {exact}."
    always = [name for name, each in found.items() if each.at == each.first]
    later = sorted(
        (each.at, name) for name, each in found.items() if each.at and each.at > each.first
    )
    never = [name for name, each in found.items() if each.at is None]
    parts = []
    if later:
        ways = [f"{name} from about {_near(at)} on" for at, name in later]
        parts.append(f"{listed(ways)} {_be(ways)} faster than {exact}")
    if always:
        first = min(found[name].first for name in always)
        parts.append(f"{listed(always)} {_be(always)} faster at every length from {first} on")
    if never:
        last = max(found[name].last for name in never)
        if parts:
            parts.append(f"{listed(never)} {_be(never)} not, up to {last}")
        else:
            parts.append(f"up to {last} none is faster than {exact}: {listed(never)}")
    return f"{what}: {'; '.join(parts)}."


def _be(words: Sequence[str]) -> str:
    return "is" if len(words) == 1 else "are"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _near(length: float) -> int:
    """Two digits: an interpolated length is worth no more."""
    digits = max(0, math.floor(math.log10(length)) - 1)
    return int(round(length, -digits))
