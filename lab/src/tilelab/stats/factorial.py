"""What choices do together: interactions of arms, and the effects of a factorial design.

The seeds are the sample, as everywhere: a contrast is one number a seed. Its signs sum to zero, so
differences to the baseline do as well as the metrics.

**Interactions.** An arm named ``a+b`` has the changes of the arms ``a`` and ``b``. For each seed
the contrast is (both - baseline) - (a - baseline) - (b - baseline). For more choices it is the
alternating sum over all subsets: what all of them together do beyond everything that smaller sets
explain.

**Designs.** For each seed, the effect of a set S of s factors is 2^s / N times a sum over all N
runs. Each term is the metric times the product of the set's signs (+1 for on, -1 for off). For one
factor this is the mean with it minus the mean without it. For two it is (both - one - other +
neither), averaged over the levels of all other factors. (The convention of Yates divides by a
further 2^(s - 1).) Main effects are one family for Holm's adjustment and interactions another.

**Fractions.** A fraction is the part of all combinations on which some products of factors, the
words, are constant. Here it is always the part that has the combination with all
factors off, so that a word of w factors is (-1)^w. Effects whose product is a word are aliases: one
estimate is of both.

Sources: Yates, "The design and analysis of factorial experiments", 1937; Box, Hunter and Hunter,
"Statistics for experimenters", chapter 6.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, Protocol

from tilelab.stats.decide import NO_OTHERS, Examined, Rules, family_tests, size_text
from tilelab.stats.paired import equivalence, paired
from tilelab.stats.values import (
    FactorEffect,
    Interaction,
    InteractionLabel,
    SeedResult,
    invalid,
    p_text,
)

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


Seeds = Mapping[str, tuple[SeedResult, ...]]  # arm -> its seeds


# Of a contrast: how many factors it is of, more than 1 for an interaction, and its value of every
# seed that all its arms and the baseline have finished; None where a run that it needs diverged.
_Contrast = tuple[int, Sequence[float] | None]


def interactions(
    per_seed: Seeds,
    seeds: Sequence[int],
    rules: Rules,
    baseline_diverged: bool = False,
    others: int = 0,
) -> tuple[Interaction, ...]:
    """Return every interaction that the arms can tell, with Holm over them.

    ``others`` are interactions of other experiments in the family; ``rules.family`` is not read.
    """
    joined = list(_joined(list(per_seed)))
    contrasts: list[_Contrast] = []
    for parts, signs in joined:
        arms = {arm: per_seed[arm] for arm in signs}
        values = [sum(sign * row[arm] for arm, sign in signs.items()) for row in _rows(seeds, arms)]
        broken = baseline_diverged or _diverged(arms)
        contrasts.append((len(parts), None if broken else values))
    tested = _tested(contrasts, seeds, rules, others)
    return tuple(
        Interaction(arms=parts, together="+".join(parts), **found)
        for (parts, _), (found, _) in zip(joined, tested, strict=True)
    )


def factor_effects(
    design: TwoLevels,
    per_seed: Seeds,
    seeds: Sequence[int],
    rules: Rules,
    baseline_diverged: bool = False,
    others: tuple[int, int] = (0, 0),
) -> tuple[FactorEffect, ...]:
    """Return every effect that a design estimates; arguments as of ``interactions``.

    ``others`` counts, of other experiments, the comparisons in the family of the main effects, and
    the interactions in that of the interactions.
    """
    broken = baseline_diverged or _diverged(per_seed)
    rows = [] if broken else _rows(seeds, per_seed)
    effects = []
    for joint in (False, True):
        family = [each for each in estimates(design) if (len(each.factors) > 1) == joint]
        contrasts: list[_Contrast] = [
            (len(each.factors), None if broken else [_effect(design, each, row) for row in rows])
            for each in family
        ]
        tested = _tested(contrasts, seeds, rules, others[joint])
        for estimate, (found, p_equivalence_holm) in zip(family, tested, strict=True):
            aliases = tuple(
                f"{'+' if sign > 0 else '-'}{' x '.join(factors)}"
                for sign, factors in estimate.aliases
            )
            fields = {"factors": estimate.factors, "aliases": aliases, **found}
            effects.append(FactorEffect(**fields, p_equivalence_holm=p_equivalence_holm))
    return tuple(effects)


def predicted(effects: Sequence[FactorEffect], on: Sequence[str]) -> float:
    """Return the metric of a combination of factors less that of the baseline, by these effects."""

    def at(active: Sequence[str]) -> float:
        total = 0.0
        for each in effects:
            off = sum(factor not in active for factor in each.factors)
            total += (each.effect or 0.0) * (-1.0) ** off / 2.0 ** len(each.factors)
        return total

    return at(on) - at(())


def counted(names: Sequence[str]) -> int:
    """Return how many interactions arms of these names can tell."""
    return sum(1 for _ in _joined(list(names)))


def _joined(names: list[str]) -> Iterable[tuple[tuple[str, ...], dict[str, int]]]:
    """What arms join that are there too, with the sign of every arm in the contrast."""
    by_parts = {frozenset(name.split("+")): name for name in names}
    for name in names:
        parts = tuple(name.split("+"))
        sizes = range(1, len(parts) + 1)
        sets = [frozenset(each) for size in sizes for each in combinations(parts, size)]
        if 1 < len(parts) == len(set(parts)) and all(each in by_parts for each in sets):
            yield parts, {by_parts[each]: (-1) ** (len(parts) - len(each)) for each in sets}


def _rows(seeds: Sequence[int], per_seed: Seeds) -> list[dict[str, float]]:
    """Arm -> difference to the baseline, of every seed that all these arms have finished."""
    known = {arm: {each.seed: each.difference for each in found} for arm, found in per_seed.items()}
    rows = []
    for seed in seeds:
        row = {arm: values.get(seed) for arm, values in known.items()}
        finished = {arm: value for arm, value in row.items() if value is not None}
        if len(finished) == len(row):
            rows.append(finished)
    return rows


def _diverged(per_seed: Seeds) -> bool:
    return any(each.status == "diverged" for seeds in per_seed.values() for each in seeds)


def _effect(design: TwoLevels, estimate: Estimate, row: Mapping[str, float]) -> float:
    runs = combinations_of(design)
    by_factors = {frozenset(arm.split("+")): value for arm, value in row.items()}
    total = 0.0
    for on in runs:
        off = sum(factor not in on for factor in estimate.factors)
        total += (-1.0) ** off * (by_factors[frozenset(on)] if on else 0.0)
    return 2.0 ** len(estimate.factors) * total / len(runs)


def _tested(
    family: Sequence[_Contrast], seeds: Sequence[int], rules: Rules, others: int
) -> list[tuple[dict[str, Any], float | None]]:
    """Return the fields of an ``Effect`` with its label, and the p-value of equivalence (Holm).

    A contrast that is not whole is not tested, but counts in the family.
    """
    values = [each or [] for _, each in family]
    wholes = [each if len(each) == len(seeds) else None for each in values]
    tests = family_tests(
        [paired(each, rules.confidence) for each in values],
        [equivalence(each, rules.smallest) for each in values],
        [each is not None for each in wholes],
        NO_OTHERS.and_unknown(others, others),
    )
    found = []
    for contrast, test, whole in zip(family, tests, wholes, strict=True):
        label, reason = _decide(contrast, test, rules, whole is not None)
        found.append(({"label": label, "reason": reason, **test.shown}, test.p_equivalence_holm))
    return found


def _decide(
    contrast: _Contrast, test: Examined, rules: Rules, whole: bool
) -> tuple[InteractionLabel, str]:
    seen, p_holm, p_same = test.paired, test.p_holm, test.p_equivalence_holm
    factors, values = contrast
    if values is None:
        return "diverged", "A run of these arms diverged."
    if not whole:
        return "incomplete", "Not every run of these arms and of the baseline is there."
    assert seen.mean is not None
    size = size_text(seen.mean, seen.interval, rules)
    alone = factors == 1
    if p_same is not None and p_same <= rules.alpha:
        if alone:
            return "no difference", f"{size}: shown to be smaller than {rules.smallest:g}."
        return "additive", f"{size}: they add up, to within {rules.smallest:g}."
    if p_holm is not None and p_holm <= rules.alpha:
        p = f"(Holm p {p_text(p_holm)})"
        helps = rules.helps(seen.mean)
        if alone:
            return ("better" if helps else "worse"), f"{size} {p}."
        side: InteractionLabel = "better together" if helps else "worse together"
        return side, f"{size} beyond the sum of their effects {p}."
    what = "a difference" if alone else "an interaction"
    return "undecided", f"{size}: neither {what} nor its absence is shown."
