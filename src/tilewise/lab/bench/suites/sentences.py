"""What a suite found, in sentences that are computed from its points."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilewise.lab.bench.suites.crossover import Crossing, crossing, listed, told
from tilewise.lab.bench.suites.methods import OURS
from tilewise.lab.bench.suites.point import Point, Record
from tilewise.lab.bench.suites.tables import amount_of, groups

__all__ = ["sentences"]


def sentences(record: Record, suite: str) -> list[str]:
    """What is to be said of a suite; what is wrong comes first."""
    points = record.of(suite)
    maker = {"paper": _crossings, "memory": _memory, "accuracy": _accuracy}.get(suite, _faster)
    return [*_wrong(points), *maker(points)]


def _wrong(points: Sequence[Point]) -> list[str]:
    bad = [point for point in points if point.status in ("wrong", "failed")]
    names = list(dict.fromkeys(point.method for point in bad if point.status == "wrong"))
    found = []
    if names:
        found.append(f"Breaks the 2x rule somewhere, and is not timed there: {listed(names)}.")
    failed = list(dict.fromkeys(point.case for point in bad if point.status == "failed"))
    if failed:
        found.append(f"Failed: {listed(failed)}.")
    return found


def _medians(points: Iterable[Point]) -> dict[str, dict[int, float]]:
    """Medians by method, then by length."""
    found: dict[str, dict[int, float]] = {}
    for point in points:
        if point.status == "ok" and point.median:
            found.setdefault(point.method, {})[point.length] = point.median
    return found


def _faster(points: Sequence[Point]) -> list[str]:
    """Ours against the best other exact method, at the longest length that both have."""
    exact = [point for point in points if point.exact and point.quantity == "seconds"]
    ratios: list[tuple[float, str]] = []
    for (case, dtype, _), own in groups(exact).items():
        found = _medians(own)
        ours = found.pop(OURS, {})
        lengths = sorted(n for n in ours if any(n in times for times in found.values()))
        if lengths:
            last = lengths[-1]
            best = min((times[last], name) for name, times in found.items() if last in times)
            words = f"{case}, {dtype} at {last} ({best[1]})"
            ratios.append((best[0] / ours[last], words))
    if not ratios:
        return []
    ratios.sort()
    ahead = sum(ratio > 1 for ratio, _ in ratios)
    low, high = ratios[0], ratios[-1]
    return [
        f"Against the fastest other exact method, {OURS} is faster in {ahead} of {len(ratios)} "
        f"cases: from {low[0]:.2f} times ({low[1]}) to {high[0]:.2f} times ({high[1]})."
    ]


def _crossings(points: Sequence[Point]) -> list[str]:
    """Where each method that is not exact crosses over ours."""
    found = []
    for (case, dtype, quantity), own in groups(points).items():
        if quantity != "seconds":
            continue
        medians = _medians(own)
        ours = medians.get(OURS, {})
        approximate = {point.method for point in own if not point.exact}
        crossings: dict[str, Crossing] = {}
        for name, times in medians.items():
            where = crossing(ours, times) if name in approximate else None
            if where is not None:
                crossings[name] = where
        if crossings:
            found.append(told(f"{case}, {dtype}", OURS, crossings))
    return found


def _accuracy(points: Sequence[Point]) -> list[str]:
    """How much of what is allowed was used."""
    shares: dict[str, list[float]] = {}
    for point in points:
        if point.samples and point.allowed:
            shares.setdefault(point.method, []).append(max(point.samples) / point.allowed)
    if not shares:
        return []
    parts = [f"{name} {max(used):.0%}" for name, used in shares.items()]
    return [f"Largest share of the allowed error that was used: {listed(parts)}."]


def _memory(points: Sequence[Point]) -> list[str]:
    """Ours against plain attention at the longest common length, and how well it is predicted."""
    found = []
    held = [point for point in points if point.quantity == "bytes"]
    for (case, dtype, _), own in groups(held).items():
        medians = _medians(own)
        plain, ours = medians.get("plain", {}), medians.get(OURS, {})
        common = sorted(plain.keys() & ours.keys())
        if common:
            n = common[-1]
            times = plain[n] / ours[n]
            found.append(
                f"{case}, {dtype}: at {n}, plain attention holds {amount_of(plain[n], 'bytes')} "
                f"beyond the operands and {OURS} {amount_of(ours[n], 'bytes')}, {times:.3g} times "
                "less."
            )
    return found
