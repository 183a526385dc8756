"""Sentences about the results of a suite, computed from its points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from tilelab.bench.steps import Point, SuiteRecord, amount_of, groups
from tilelab.bench.suites import CURE, DOUBLE
from tilelab.peers.methods import OURS
from tilelab.stats.values import listing

_NONE = "none"  # the row of the suite ``variants`` without one
_AHEAD = 1.03  # times faster at the end; less is within the noise


class Crossing(NamedTuple):
    """The comparison of one method with another by length."""

    first: int  # these two: the shortest and the longest length at which both were measured
    last: int
    # The length from which on it is faster, interpolated; ``first`` if it always is, None if it is
    # not at ``last``, or hardly.
    at: float | None
    gain: float  # times faster at the last length (less than 1: slower)


def crossing(exact: Mapping[int, float], other: Mapping[int, float]) -> Crossing | None:
    """Return from which length on ``other`` is faster and stays so; None without a common length.

    Between two lengths, both times are taken to be powers of the length.
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


def crossings_in_words(what: str, exact: str, found: Mapping[str, Crossing]) -> str:
    """Return all crossings of one case, in a sentence."""
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
        parts.append(f"{listing(ways)} {_be(ways)} faster than {exact}")
    if always:
        first = min(found[name].first for name in always)
        parts.append(f"{listing(always)} {_be(always)} faster at every length from {first} on")
    if never:
        last = max(found[name].last for name in never)
        if parts:
            parts.append(f"{listing(never)} {_be(never)} not, up to {last}")
        else:
            parts.append(f"up to {last} none is faster than {exact}: {listing(never)}")
    return f"{what}: {'; '.join(parts)}."


def _be(words: Sequence[str]) -> str:
    return "is" if len(words) == 1 else "are"


def _near(length: float) -> int:
    """Two digits: an interpolated length is worth no more."""
    digits = max(0, math.floor(math.log10(length)) - 1)
    return int(round(length, -digits))


def sentences(record: SuiteRecord, suite: str) -> list[str]:
    """Return the sentences about a suite, problems first."""
    points = record.of(suite)
    makers = {
        "paper": (_crossings, _sparse, _memory),
        "memory": (_memory, _double, _cure),
        "accuracy": (_accuracy,),
        "variants": (_faster, _extra),
        "list-memory": (_grown,),
    }.get(suite, (_faster,))
    return [*_wrong(points), *(line for maker in makers for line in maker(points))]


def lead(record: SuiteRecord) -> str:
    """Return the one ratio that matters, in a sentence; empty where a record has none.

    Time against the fastest other exact method if there are times, else memory against plain
    attention, else the share of the allowed error.
    """
    ratios = [each.other / each.ours for each in _exact(record.points)]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        return (
            f"{mean:.2f}x the speed of the fastest other exact method: geometric mean of "
            f"{len(ratios)} case{'s' if len(ratios) > 1 else ''}, each at its longest length"
        )
    saved = _held(record.points)
    if saved:
        most = max(saved, key=lambda each: each.length)
        return (
            f"{most.other / most.ours:.3g}x less memory than plain attention: "
            f"{amount_of(most.ours, 'bytes')} and {amount_of(most.other, 'bytes')} beyond the "
            f"operands ({most.case})"
        )
    used = _shares(record.points).get(OURS)
    return f"{max(used):.0%} of the allowed error: the most that {OURS} uses" if used else ""


class _Beside(NamedTuple):
    """Medians of ours and of the best of some others, at the longest length that both have."""

    case: str
    length: int
    ours: float
    other: float
    name: str

    @property
    def words(self) -> str:
        return f"{self.case} at {self.length}; {self.name}"


def _beside(points: Iterable[Point], ours: str, is_other: Callable[[str], bool]) -> list[_Beside]:
    """Return one of our methods against others, case by case."""
    found = []
    for (case, dtype, _), own in groups(points).items():
        medians = medians_of(own)
        others = {name: times for name, times in medians.items() if is_other(name)}
        mine = medians.get(ours, {})
        lengths = [n for n in mine if any(n in times for times in others.values())]
        if lengths:
            last = max(lengths)
            best = min((times[last], name) for name, times in others.items() if last in times)
            found.append(_Beside(f"{case}, {dtype}", last, mine[last], *best))
    return found


def _exact(points: Iterable[Point]) -> list[_Beside]:
    """Return ours against the fastest other exact method."""
    exact = (point for point in points if point.exact and point.quantity == "seconds")
    return _beside(exact, OURS, lambda name: name != OURS)


def _held(points: Iterable[Point]) -> list[_Beside]:
    """Return the bytes of ours against those of plain attention."""
    held = (point for point in points if point.quantity == "bytes")
    return _beside(held, OURS, lambda name: name == "plain")


def _shares(points: Iterable[Point]) -> dict[str, list[float]]:
    """Return the shares of the allowed error that each method used."""
    found: dict[str, list[float]] = {}
    for point in points:
        if point.samples and point.allowed:
            found.setdefault(point.method, []).append(max(point.samples) / point.allowed)
    return found


def _wrong(points: Sequence[Point]) -> list[str]:
    bad = [point for point in points if point.status in ("wrong", "failed")]
    names = list(dict.fromkeys(point.method for point in bad if point.status == "wrong"))
    found = []
    if names:
        found.append(f"Breaks the 2x rule somewhere, and is not timed there: {listing(names)}.")
    failed = list(dict.fromkeys(point.case for point in bad if point.status == "failed"))
    if failed:
        found.append(f"Failed: {listing(failed)}.")
    return found


def _faster(points: Sequence[Point]) -> list[str]:
    ratios = sorted((each.other / each.ours, each.words) for each in _exact(points))
    if not ratios:
        return []
    ahead = sum(ratio > 1 for ratio, _ in ratios)
    low, high = ratios[0], ratios[-1]
    return [
        f"Against the fastest other exact method, {OURS} is faster in {ahead} of {len(ratios)} "
        f"cases: from {low[0]:.2f} times ({low[1]}) to {high[0]:.2f} times ({high[1]})."
    ]


def _crossings(points: Sequence[Point]) -> list[str]:
    """Return where each approximate method crosses over ours in the first case; a table has all."""
    found = crossings(points)
    if not found:
        return []
    words, where = next(iter(found.items()))
    return [crossings_in_words(words, OURS, where)]


def _accuracy(points: Sequence[Point]) -> list[str]:
    parts = [f"{name} {max(used):.0%}" for name, used in _shares(points).items()]
    if not parts:
        return []
    return [f"Largest share of the allowed error that was used: {listing(parts)}."]


def _memory(points: Sequence[Point]) -> list[str]:
    return [
        f"{each.case}: at {each.length}, plain attention holds {amount_of(each.other, 'bytes')} "
        f"beyond the operands and {OURS} {amount_of(each.ours, 'bytes')}, "
        f"{each.other / each.ours:.3g} times less."
        for each in _held(points)
    ]


def _grown(points: Sequence[Point]) -> list[str]:
    """Return what each method holds at the shortest and at the longest length that it did."""
    found = []
    for case, method in dict.fromkeys((p.case, p.method) for p in points if p.median):
        own = {p.length: p.median or 0 for p in points if (p.case, p.method) == (case, method)}
        held = {length: amount_of(own[length], "bytes") for length in own if own[length]}
        first, last = min(held), max(held)
        found.append(f"{case}, {method}: {held[first]} at {first} keys, {held[last]} at {last}.")
    return found


def _sparse(points: Sequence[Point]) -> list[str]:
    """Our block-sparse kernels against every other method, at the longest length of each case."""
    timed = [point for point in points if point.quantity == "seconds"]
    found = []
    for name in dict.fromkeys(p.method for p in timed if p.method.startswith(f"{OURS} ")):
        ratios = [
            (each.other / each.ours, each.words)
            for each in _beside(timed, name, lambda other: not other.startswith(f"{OURS} "))
        ]
        if ratios:
            low, high = min(ratios), max(ratios)
            found.append(
                f"{name} against the fastest of the others, exact or not, at the longest length of "
                f"a case: faster in {sum(ratio > 1 for ratio, _ in ratios)} of {len(ratios)} "
                f"cases, {low[0]:.2f} times ({low[1]}) to {high[0]:.2f} times ({high[1]})."
            )
    return found


def _double(points: Sequence[Point]) -> list[str]:
    """Return the peak at the softmax, in matrices."""
    held = {p.method: p for p in points if p.case == DOUBLE and p.median and p.predicted}
    if not {"scores", "softmax"} <= held.keys():
        return []
    scores, softmax = held["scores"], held["softmax"]
    highest = max(held.values(), key=lambda point: point.median or 0.0)
    return [
        f"Plain attention at {scores.length}, step by step: the scores take "
        f"{amount_of(scores.median or 0, 'bytes')}, and the softmax, which has its input and its "
        f"output at once, {amount_of(softmax.median or 0, 'bytes')}, "
        f"{(softmax.median or 0) / (scores.median or 1):.2f} times as much; the highest of all is "
        f"{highest.method} with {amount_of(highest.median or 0, 'bytes')}."
    ]


def _cure(points: Sequence[Point]) -> list[str]:
    """Return the memory that fewer rows at a time save, and the time that they cost."""
    own = [point for point in points if point.case == CURE and point.median]
    held = [point for point in own if point.quantity == "bytes"]
    took = {point.method: point.median or 0.0 for point in own if point.quantity == "seconds"}
    if len(held) < 2:
        return []
    few, whole = held[0], held[-1]
    slower = took[few.method] / took[whole.method]
    return [
        f"The cure, {few.method} at a time: {amount_of(few.median or 0, 'bytes')} in the place of "
        f"{amount_of(whole.median or 0, 'bytes')}, and {slower:.2f} times the time."
    ]


def _extra(points: Sequence[Point]) -> list[str]:
    """Return the extra time of our scores over no variant."""
    medians = {
        (p.case, p.dtype): p.median for p in points if p.method == OURS and p.median and p.length
    }
    found = []
    for (case, dtype), base in medians.items():
        name, _, direction = case.rpartition(", ")
        if name != _NONE or not base:
            continue
        costs = [
            f"{other.rpartition(', ')[0]} {(time or 0) / base - 1:+.0%}"
            for (other, kind), time in medians.items()
            if kind == dtype and other != case and other.endswith(f", {direction}")
        ]
        if costs:
            found.append(f"Time over no variant, {direction}, {dtype}: {'; '.join(costs)}.")
    return found
