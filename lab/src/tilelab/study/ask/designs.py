"""Factorial designs of two levels: their runs, and which effects a fraction cannot tell apart.

In the usual coding a factor is +1 where it is on and -1 where it is off. A fraction is the part of
all combinations on which some products of factors, the words, are constant. Here it is always the
part that has the combination with all factors off, so that a word of w factors is (-1)^w. Effects
whose product is a word are aliases: one estimate is of both.

Source: Box, Hunter and Hunter, "Statistics for experimenters", chapter 6 (the table of fractions
with the fewest short words too).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from tilelab.study.ask.deciding import Design
from tilewise.errors import InvalidArgument

__all__ = ["Estimate", "arm_name", "changes_of", "check", "combinations_of", "estimates"]
__all__ += ["fraction", "resolution", "words"]

Effect = tuple[str, ...]

# (factors, factors with generators) -> their generators, by letters in the order of the factors.
_FRACTIONS = {
    (3, 1): {"C": "AB"},
    (4, 1): {"D": "ABC"},
    (5, 1): {"E": "ABCD"},
    (5, 2): {"D": "AB", "E": "AC"},
    (6, 1): {"F": "ABCDE"},
    (6, 2): {"E": "ABC", "F": "BCD"},
    (6, 3): {"D": "AB", "E": "AC", "F": "BC"},
    (7, 1): {"G": "ABCDEF"},
    (7, 2): {"F": "ABCD", "G": "ABDE"},
    (7, 3): {"E": "ABC", "F": "BCD", "G": "ACD"},
    (7, 4): {"D": "AB", "E": "AC", "F": "BC", "G": "ABC"},
    (8, 1): {"H": "ABCDEFG"},
    (8, 2): {"G": "ABCD", "H": "ABEF"},
    (8, 3): {"F": "ABC", "G": "ABD", "H": "BCDE"},
    (8, 4): {"E": "BCD", "F": "ACD", "G": "ABC", "H": "ABD"},
}


class Estimate(NamedTuple):
    """An effect that the design estimates."""

    factors: Effect  # one: the main effect; more: their interaction
    aliases: tuple[tuple[int, Effect], ...]  # what it cannot be told apart from, with signs


def arm_name(factors: Iterable[str]) -> str:
    """Return the arm that has these factors on; empty for the baseline."""
    return "+".join(factors)


def combinations_of(design: Design) -> list[Effect]:
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


def words(design: Design) -> list[Effect]:
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


def resolution(design: Design) -> int | None:
    """Length of the shortest word; None for a full design."""
    return min((len(word) for word in words(design)), default=None)


def estimates(design: Design) -> list[Estimate]:
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


def fraction(factors: Sequence[str], runs: int, order: int = 2) -> Design:
    """Return the largest design of these factors with at most so many runs.

    Raises:
        InvalidArgument: even the smallest fraction that tells main effects apart has more.
    """
    names, count = tuple(factors), len(factors)
    if 2**count <= runs:
        return Design(factors=names, order=order)
    letters = dict(zip("ABCDEFGH", names, strict=False))
    for less in range(1, count):
        if 2 ** (count - less) <= runs and (count, less) in _FRACTIONS:
            generators = {
                letters[factor]: tuple(letters[part] for part in parts)
                for factor, parts in _FRACTIONS[count, less].items()
            }
            return Design(factors=names, generators=generators, order=order)
    required = f"runs enough for {count} factors, or fewer factors"
    raise InvalidArgument("runs", str(runs), required)


def check(design: Design, arms: Sequence[str]) -> None:
    """Make sure that the design holds together and that the arms are its runs."""
    factors, generators = design.factors, design.generators
    if len(set(factors)) < len(factors) or any("+" in each for each in factors):
        raise InvalidArgument("design.factors", str(factors), "each once, and without +")
    basic = {each for each in factors if each not in generators}
    for factor, parts in generators.items():
        if factor not in factors or len(set(parts)) < 2 or not set(parts) <= basic:
            came = f"{factor} = {' x '.join(parts)}"
            required = f"a factor, and two or more of those without a generator: {sorted(basic)}"
            raise InvalidArgument("design.generators", came, required)
    shortest = resolution(design)
    if shortest is not None and shortest < 3:
        came = f"a fraction of resolution {shortest}: {' x '.join(words(design)[0])} is constant"
        raise InvalidArgument("design.generators", came, "resolution 3 at least")
    wanted = {frozenset(each) for each in combinations_of(design) if each}
    if {frozenset(each.split("+")) for each in arms} != wanted or len(arms) != len(wanted):
        names = ", ".join(arm_name(each) for each in combinations_of(design) if each)
        raise InvalidArgument("design", f"arms {', '.join(arms)}", f"arms {names}")


def changes_of(design: Design, arms: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return what each factor alone changes; the arms that show it need not have it alone.

    A factor's changes are those that all arms with it share: in a design of resolution 3 or more
    no other factor is on in all of them.

    Raises:
        InvalidArgument: an arm changes something else than its factors together do, or two factors
            change the same path: then nobody said what one of them changes.
    """
    found: dict[str, dict[str, Any]] = {}
    for factor in design.factors:
        one, *others = (changes for arm, changes in arms.items() if factor in arm.split("+"))
        found[factor] = {
            path: value
            for path, value in one.items()
            if all(path in each and each[path] == value for each in others)
        }
    paths = [path for changes in found.values() for path in changes]
    for arm, changes in arms.items():
        together = {path: value for each in arm.split("+") for path, value in found[each].items()}
        if together != dict(changes) or len(set(paths)) < len(paths):
            came = f"{arm}, which is not the sum of what its factors change in other arms"
            required = "arms from which it follows what each factor changes alone"
            raise InvalidArgument("design", came, required)
    return found


def _ordered(design: Design, factors: Iterable[str]) -> Effect:
    return tuple(sorted(factors, key=design.factors.index))
