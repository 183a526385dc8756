"""The algebra of factorial designs of two levels.

Their runs, and which effects a fraction cannot tell apart. In the usual coding a factor is +1 where
it is on and -1 where it is off. A fraction is the part of all combinations on which some products
of factors, the words, are constant. Here it is always the part that has the combination with all
factors off, so that a word of w factors is (-1)^w. Effects whose product is a word are aliases: one
estimate is of both.

Source: Box, Hunter and Hunter, "Statistics for experimenters", chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple, Protocol

from tilelab.stats.errors import invalid

Effect = tuple[str, ...]


class TwoLevels(Protocol):
    """A factorial of two levels, full or a regular fraction."""

    @property
    def factors(self) -> tuple[str, ...]:
        """Names, without ``+``."""

    @property
    def generators(self) -> Mapping[str, tuple[str, ...]]:
        """Factor -> those whose product it is; empty for the full factorial."""

    @property
    def order(self) -> int:
        """Order of the largest interactions that are estimated."""


class Estimate(NamedTuple):
    """An effect that the design estimates."""

    factors: Effect  # one: the main effect; more: their interaction
    aliases: tuple[tuple[int, Effect], ...]  # what it cannot be told apart from, with signs


def arm_name(factors: Iterable[str]) -> str:
    """Return the arm that has these factors on; empty for the baseline."""
    return "+".join(factors)


def combinations_of(design: TwoLevels) -> list[Effect]:
    """Return the factors that each run has on, the run without any first."""
    basic = [each for each in design.factors if each not in design.generators]
    found = []
    for size in range(len(basic) + 1):
        for chosen in combinations(basic, size):
            on = set(chosen)
            for factor, parts in design.generators.items():
                if len(on.intersection(parts) - {*design.generators}) % 2:
                    on.add(factor)
            found.append(_ordered(design, on))
    return found


def words(design: TwoLevels) -> list[Effect]:
    """Return the constant products of the fraction, shortest first; none in a full design."""
    single = [frozenset((factor, *parts)) for factor, parts in design.generators.items()]
    found = set()
    for size in range(1, len(single) + 1):
        for several in combinations(single, size):
            product: frozenset[str] = frozenset()
            for each in several:
                product ^= each
            found.add(_ordered(design, product))
    return sorted(found, key=lambda word: (len(word), word))


def resolution(design: TwoLevels) -> int | None:
    """Length of the shortest word; None for a full design."""
    return min((len(word) for word in words(design)), default=None)


def estimates(design: TwoLevels) -> list[Estimate]:
    """Return the main effects, then interactions by size, up to the design's order.

    Among effects that are aliases, only the one with the fewest factors is estimated (the first of
    equals): large interactions are taken to be the smaller ones.
    """
    constant, found = words(design), []
    taken = set(constant)  # they are no effects at all
    for size in range(1, min(design.order, len(design.factors)) + 1):
        for factors in combinations(design.factors, size):
            if factors in taken:
                continue
            same = [
                ((-1) ** len(word), _ordered(design, frozenset(factors) ^ frozenset(word)))
                for word in constant
            ]
            taken.update(alias for _, alias in same)
            found.append(Estimate(factors, tuple(sorted(same, key=lambda each: len(each[1])))))
    return found


def check(design: TwoLevels, arms: Sequence[str]) -> None:
    """Make sure that the design holds together and that the arms are its runs."""
    factors, generators = design.factors, design.generators
    if len(set(factors)) < len(factors) or any("+" in each for each in factors):
        raise invalid("design.factors", str(factors), "each once, and without +")
    basic = {each for each in factors if each not in generators}
    for factor, parts in generators.items():
        if factor not in factors or len(set(parts)) < 2 or not set(parts) <= basic:
            came = f"{factor} = {' x '.join(parts)}"
            required = f"a factor, and two or more of those without a generator: {sorted(basic)}"
            raise invalid("design.generators", came, required)
    shortest = resolution(design)
    if shortest is not None and shortest < 3:
        came = f"a fraction of resolution {shortest}: {' x '.join(words(design)[0])} is constant"
        raise invalid("design.generators", came, "resolution 3 at least")
    wanted = {frozenset(each) for each in combinations_of(design) if each}
    if {frozenset(each.split("+")) for each in arms} != wanted or len(arms) != len(wanted):
        names = ", ".join(arm_name(each) for each in combinations_of(design) if each)
        raise invalid("design", f"arms {', '.join(arms)}", f"arms {names}")


def _ordered(design: TwoLevels, factors: Iterable[str]) -> Effect:
    return tuple(sorted(factors, key=design.factors.index))
