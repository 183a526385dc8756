"""Other packages beside ours and torch's in ``bench cpu --peers``: gated, and what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from tilelab.common.clock import Call, Samples, Spread, elsewhere
from tilelab.peers.packages import Package, first_line
from tilelab.peers.plain import compare
from tilelab.peers.work import Given, Prepared, Work
from tilewise.inspect.peaks import Clock

_ELSEWHERE = 0.1  # of a call's processor time: more is work on other threads
_PACKING = ", packing"
_MOST_CASES = 3  # named beside a reason


@dataclass(frozen=True)
class PeerResult:
    """A package on one case."""

    name: str  # of the package
    version: str  # of what is installed
    path: str = ""  # the code path that it took, such as "amx"; empty where there is one alone
    why_not: str = ""  # why it was not measured; empty if it was, or is wrong
    wrong: str = ""  # what its result breaks of the 2x rule; it was not timed then
    # Times of one call with its packing, one entry per round.
    samples: Samples = field(default_factory=Samples.of)
    # Times of the packing alone; empty where there is none.
    packing: Samples = field(default_factory=Samples.of)

    def cell(self, clock: Clock, ours_s: float) -> str:
        """Return milliseconds with their spread, the path, the packing in them, and times ours."""
        if self.wrong or self.why_not:
            return "WRONG" if self.wrong else "-"
        spread = Spread.of(_seconds(self.samples, clock))
        packing = _seconds(self.packing, clock)
        packed = f"packing {statistics.median(packing) * 1e3:.3g}" if packing else ""
        apart = "; ".join(filter(None, (self.path, packed)))
        median = f"{spread.median * 1e3:.4g} ±{spread.noise:.0%}"
        return f"{median}{f' ({apart})' if apart else ''}, {spread.median / ours_s:.2f}x"

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the inverse of ``dataclasses.asdict``."""
        sides = {side: Samples(**values[side]) for side in ("samples", "packing")}
        return cls(**{**values, **sides})


def _seconds(samples: Samples, clock: Clock) -> list[float]:
    return samples.cpu_s if clock == "cpu" else samples.wall_s


def standing(packages: Sequence[Package]) -> dict[str, dict[str, str]]:
    """Return each package's version, and why it is not here, for a record."""
    return {each.name: {"version": each.version, "why_not": each.absence()} for each in packages}


def lines(
    record: Mapping[str, Mapping[str, str]], found: Sequence[tuple[str, PeerResult]]
) -> list[str]:
    """Return why packages were not measured, each reason once.

    Args:
        record: what ``standing`` gave.
        found: the cases and what was found on them.
    """
    said = [
        f"peer {name}: not measured: {of['why_not']}"
        for name, of in record.items()
        if of["why_not"]
    ]
    cases: dict[tuple[str, str], list[str]] = {}
    for case, peer in found:
        if peer.wrong or peer.why_not:
            line = f"WRONG: {peer.wrong}" if peer.wrong else f"not measured: {peer.why_not}"
            cases.setdefault((line, peer.name), []).append(case)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for (line, name), of in cases.items():
        merged.setdefault((line, tuple(of)), []).append(name)
    for (line, on), names in merged.items():
        more = f" and {len(on) - _MOST_CASES} more" if len(on) > _MOST_CASES else ""
        said.append(f"peer {', '.join(names)}: {line} ({'; '.join(on[:_MOST_CASES])}{more})")
    return said


class Peers:
    """The packages that are here, on one work.

    Args:
        packages: which to try.
        work, given: the work and its tensors.
        clock: which times count. With "cpu" only those of the calling thread do.
    """

    def __init__(self, packages: Sequence[Package], work: Work, given: Given, clock: Clock) -> None:
        self.calls: dict[str, Call] = {}
        self._found: list[PeerResult] = []
        for package in packages:
            if package.absence():
                continue  # the record of the run says why
            blank = PeerResult(package.name, package.version, why_not=package.refusal(work))
            self._found.append(blank if blank.why_not else self._try(package, work, given, clock))

    def _try(self, package: Package, work: Work, given: Given, clock: Clock) -> PeerResult:
        """Prepare a package, hold it to the 2x rule, and keep its calls if it passes."""
        found = PeerResult(package.name, package.version)
        try:
            prepared: Prepared = package.prepare(work, given)
            found = replace(found, path=prepared.path)
            # In its own layout it has the tensors already.
            wrong = compare(work, given, lambda q, k, v: prepared.call()).complaint
            other = 0.0 if wrong or clock == "wall" else elsewhere(prepared.call)
        except Exception as error:  # each package has errors of its own, and none ends the run
            return replace(found, why_not=first_line(error))
        if wrong:
            return replace(found, wrong=wrong)
        if other > _ELSEWHERE:
            said = f"other threads do {other:.0%} of its work, and the clock counts only one"
            return replace(found, why_not=said)
        self.calls[package.name] = prepared.call
        if prepared.pack is not None:
            self.calls[package.name + _PACKING] = prepared.pack
        return found

    def results(self, samples: Mapping[str, Samples]) -> list[PeerResult]:
        """Return what was found, with the samples of the calls by name."""
        none = Samples.of()
        return [
            replace(
                each,
                samples=samples.get(each.name, none),
                packing=samples.get(each.name + _PACKING, none),
            )
            for each in self._found
        ]
