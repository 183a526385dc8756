"""The statistics of paired seeds, for results from anywhere; torch is not loaded.

>>> from tilelab.stats import compare
>>> adamw = {0: 3.214, 1: 3.198, 2: 3.221}
>>> muon = {0: 3.101, 1: 3.094, 2: 3.105}
>>> verdict = compare(adamw, muon, smallest_effect=0.02, unit="nats")
>>> print(f"{verdict.label}: {verdict.reason}")
better: -0.111 nats [-0.127, -0.095] (Holm p 0.0011).

``compare_all`` takes several arms, ``compare_groups`` several baselines with their arms as one
family of tests, as the judge of a study does. ``interactions_of`` and ``factorial_effects`` tell
what choices do together, ``detectable``, ``seeds_for_difference`` and ``seeds_for_equivalence``
plan.

Values are a mapping, seed -> metric after the last step. A run that diverged has None or a number
that is not finite. A seed that is not in the mapping has no run yet.

``docs/metrics.md`` defines each number; the studies of ``tilelab.study`` are judged by the same
functions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tilelab.stats.decide import (
    Comparison,
    Judged,
    Rules,
    decided,
    look_by_look,
    look_levels,
    others_of,
)
from tilelab.stats.factorial import check, factor_effects, interactions
from tilelab.stats.paired import (
    Paired,
    critical_t,
    detectable,
    equivalence,
    holm,
    more_seeds,
    paired,
    ratio,
    seeds_for_difference,
    seeds_for_equivalence,
    summary,
)
from tilelab.stats.values import (
    Effect,
    ErrorUsed,
    FactorEffect,
    Interaction,
    Interval,
    Look,
    Ratio,
    SeedResult,
    Status,
    Summary,
    Verdict,
    invalid,
)

__all__ = [
    "Effect",
    "ErrorUsed",
    "FactorEffect",
    "Factorial",
    "Group",
    "Interaction",
    "Interval",
    "Look",
    "Paired",
    "Ratio",
    "SeedResult",
    "Summary",
    "Verdict",
    "compare",
    "compare_all",
    "compare_groups",
    "critical_t",
    "detectable",
    "equivalence",
    "factorial_effects",
    "holm",
    "interactions_of",
    "look_levels",
    "more_seeds",
    "paired",
    "ratio",
    "seeds_for_difference",
    "seeds_for_equivalence",
    "summary",
]

Values = Mapping[int, float | None]
_LEAST_LEVEL = 1e-12  # of a look: 1 less it is still another number than 1


class Factorial(NamedTuple):
    """A factorial of two levels, full or a regular fraction: see ``factorial.TwoLevels``."""

    factors: tuple[str, ...]
    generators: Mapping[str, tuple[str, ...]] = {}
    order: int = 2


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arms of one baseline, for ``compare_groups``; the fields are arguments of ``compare_all``."""

    baseline: Values
    arms: Mapping[str, Values]
    smallest_effect: float
    seeds: Sequence[int] | None = None
    higher_is_better: bool = False
    unit: str = ""
    confidence: float = 0.95
    power: float = 0.8
    looks: Sequence[int] = ()
    rho: float = 2.0
    systems: Collection[str] = ()
    identical: Collection[str] = ()
    error: Literal["own", "pooled"] = "own"


def compare(
    baseline: Values,
    arm: Values,
    *,
    smallest_effect: float,
    seeds: Sequence[int] | None = None,
    higher_is_better: bool = False,
    unit: str = "",
    confidence: float = 0.95,
    power: float = 0.8,
    name: str = "arm",
) -> Verdict:
    """Return the verdict on one arm; arguments as of ``compare_all``."""
    return compare_all(
        baseline,
        {name: arm},
        smallest_effect=smallest_effect,
        seeds=seeds,
        higher_is_better=higher_is_better,
        unit=unit,
        confidence=confidence,
        power=power,
    )[name]


def compare_all(
    baseline: Values,
    arms: Mapping[str, Values],
    *,
    smallest_effect: float,
    seeds: Sequence[int] | None = None,
    higher_is_better: bool = False,
    unit: str = "",
    confidence: float = 0.95,
    power: float = 0.8,
    looks: Sequence[int] = (),
    rho: float = 2.0,
    systems: Collection[str] = (),
    identical: Collection[str] = (),
    error: Literal["own", "pooled"] = "own",
    others: int = 0,
) -> dict[str, Verdict]:
    """Return the verdict on every arm, by the rules of ``decide.py``.

    The effect is the mean over the seeds of arm minus baseline. It is tested against zero (paired
    t) and against ``smallest_effect`` (two one-sided tests); Holm's adjustment is over the arms.

    Args:
        baseline: seed -> value.
        arms: name -> seed -> value.
        smallest_effect: the smallest difference that matters, in the unit of the values; above 0.
        seeds: of every arm; None for all seeds that any of them has.
        higher_is_better: of the values.
        unit: of the values, for the sentences.
        confidence: of intervals; tests are at 1 less this.
        power: of the number of seeds that an undecided arm still needs.
        looks: seeds at each look of a sequential comparison; its last is the number of seeds. Empty
            to look once.
        rho: how the looks share the level: see ``decide.look_levels``.
        systems: arms that are to change nothing; for them ``more_seeds`` shows equivalence.
        identical: arms whose runs ended with the baseline's weights, bit for bit, with every seed.
        error: ``"pooled"`` takes one error for all arms where their variances allow it, which
            ``Verdict.error`` says. It goes neither with looks nor with systems arms.
        others: comparisons of other baselines that share the family: each counts as one that is not
            rejected. ``compare_groups`` steps down over them too, which rejects more.

    Raises:
        InvalidArgument: an argument that is out of range, or names an arm that is not there.
    """
    group = Group(
        baseline=baseline,
        arms=arms,
        smallest_effect=smallest_effect,
        seeds=seeds,
        higher_is_better=higher_is_better,
        unit=unit,
        confidence=confidence,
        power=power,
        looks=looks,
        rho=rho,
        systems=systems,
        identical=identical,
        error=error,
    )
    return compare_groups({"": group}, others=others)[""]


def compare_groups(
    groups: Mapping[str, Group], *, others: int = 0
) -> dict[str, dict[str, Verdict]]:
    """Return the verdicts of several groups that are one family of tests: group -> arm -> verdict.

    Holm's adjustment steps down over the arms of all groups together. A group with looks decides
    by its own values: it takes the arms of the other groups as not rejected, and so do they its
    arms. ``others`` are further comparisons of the family, which count as not rejected.

    Raises:
        InvalidArgument: as ``compare_all``.

    >>> small = {0: 3.214, 1: 3.198, 2: 3.221}, {"muon": {0: 3.101, 1: 3.094, 2: 3.105}}
    >>> large = {0: 2.91, 1: 2.9, 2: 2.93}, {"muon": {0: 2.85, 1: 2.84, 2: 2.86}}
    >>> groups = {
    ...     name: Group(baseline=baseline, arms=arms, smallest_effect=0.02)
    ...     for name, (baseline, arms) in {"small": small, "large": large}.items()
    ... }
    >>> for name, found in compare_groups(groups).items():
    ...     print(name, found["muon"].label, f"{found['muon'].p_holm:.4f}")
    small better 0.0021
    large better 0.0028
    """
    if not groups:
        raise invalid("groups", "none", "a group or more")
    if others < 0:
        raise invalid("others", str(others), "0 or more")
    size = others + sum(len(each.arms) for each in groups.values())
    known = {name: (_comparisons(each), _rules_of(each, size)) for name, each in groups.items()}
    joint = [name for name, each in groups.items() if not each.looks]
    several = len(joint) > 1  # else there is nothing to test first
    tests = {name: decided(*known[name]) if several else [] for name in joint}
    rest = others_of(tests, size - sum(len(groups[name].arms) for name in joint))
    found = {}
    for name, group in groups.items():
        comparisons, rules = known[name]
        if group.looks:
            judged = _looked(group, comparisons, rules, size - len(comparisons))
        else:
            judged = decided(comparisons, rules, rest[name])
        named = zip(group.arms, judged, strict=True)
        found[name] = {arm: each.verdict(arm) for arm, each in named}
    return found


def interactions_of(
    baseline: Values,
    arms: Mapping[str, Values],
    *,
    smallest_effect: float,
    seeds: Sequence[int] | None = None,
    higher_is_better: bool = False,
    unit: str = "",
    confidence: float = 0.95,
) -> tuple[Interaction, ...]:
    """Return what arms named ``a+b`` do beyond the sum of the arms ``a`` and ``b``.

    Arguments as of ``compare_all``; Holm's adjustment is over the interactions.
    """
    every = _seeds_of(baseline, arms, seeds)
    rules = Rules(unit, smallest_effect, confidence, 0.8, 1, higher_is_better)
    lost = any(_status(baseline, seed) == "diverged" for seed in every)
    return interactions(_all_paired_up(baseline, arms, every), every, rules, lost)


def factorial_effects(
    design: Factorial,
    baseline: Values,
    arms: Mapping[str, Values],
    *,
    smallest_effect: float,
    seeds: Sequence[int] | None = None,
    higher_is_better: bool = False,
    unit: str = "",
    confidence: float = 0.95,
) -> tuple[FactorEffect, ...]:
    """Return main effects and interactions of a factorial; arguments as of ``compare_all``.

    Main effects are one family for Holm's adjustment and interactions another. The baseline is the
    combination with all factors off; arms are all the others, named ``a``, ``b``, ``a+b``.

    Raises:
        InvalidArgument: the arms are not those of the design.
    """
    check(design, list(arms))
    every = _seeds_of(baseline, arms, seeds)
    rules = Rules(unit, smallest_effect, confidence, 0.8, 1, higher_is_better)
    lost = any(_status(baseline, seed) == "diverged" for seed in every)
    return factor_effects(design, _all_paired_up(baseline, arms, every), every, rules, lost)


def _comparisons(group: Group) -> list[Comparison]:
    """Check a group, and return the comparison of each arm."""
    every = _seeds_of(group.baseline, group.arms, group.seeds)
    if group.error not in ("own", "pooled"):
        raise invalid("error", repr(group.error), "'own' or 'pooled'")
    if group.error == "pooled" and (group.looks or group.systems):
        required = "own: looks and systems arms have no error in common"
        raise invalid("error", "pooled with looks or systems arms", required)
    for argument, names in (("systems", group.systems), ("identical", group.identical)):
        unknown = sorted(set(names) - set(group.arms))
        if unknown:
            raise invalid(argument, repr(unknown[0]), f"arms: {', '.join(group.arms)}")
    lost = tuple(seed for seed in every if _status(group.baseline, seed) == "diverged")
    return [
        Comparison(
            "systems" if name in group.systems else "training",
            _paired_up(group.baseline, values, every, name in group.identical),
            lost,
        )
        for name, values in group.arms.items()
    ]


def _looked(
    group: Group, comparisons: Sequence[Comparison], rules: Rules, others: int
) -> list[Judged]:
    looks, rho = group.looks, group.rho
    count = len(_seeds_of(group.baseline, group.arms, group.seeds))
    grows = all(one < other for one, other in pairwise(looks))
    if not grows or looks[0] < 2 or looks[-1] != count:
        raise invalid("looks", str(tuple(looks)), f"2 or more, growing, up to {count} seeds")
    levels = look_levels(looks, rho, rules.alpha) if rho > 0 else ()
    if not levels or not all(each > _LEAST_LEVEL for each in levels):
        required = f"a number above 0 that gives each look a level above {_LEAST_LEVEL:g}"
        raise invalid("rho", str(rho), required)
    return look_by_look(comparisons, rules, looks, levels, others)


def _rules_of(group: Group, family: int) -> Rules:
    names = ("unit", "confidence", "power", "higher_is_better", "error")
    shared = {name: getattr(group, name) for name in names}
    return Rules(smallest=group.smallest_effect, family=max(family, 1), **shared)


def _seeds_of(
    baseline: Values, arms: Mapping[str, Values], seeds: Sequence[int] | None
) -> tuple[int, ...]:
    for values in (baseline, *arms.values()):
        if not isinstance(values, Mapping):
            required = "a mapping, seed -> value, such as {0: 3.21, 1: 3.19}"
            raise invalid("values", f"a {type(values).__name__}", required)
    if seeds is None:
        if not any((baseline, *arms.values())):
            raise invalid("values", "none", "a value or more, by seed")
        return tuple(sorted({*baseline, *(seed for values in arms.values() for seed in values)}))
    if not seeds or len(set(seeds)) < len(seeds):
        raise invalid("seeds", str(tuple(seeds)), "at least one, and each once")
    return tuple(seeds)


def _status(values: Values, seed: int) -> Status:
    if seed not in values:
        return "incomplete"
    return "diverged" if _finite(values[seed]) is None else "done"


def _finite(given: float | None) -> float | None:
    value: Any = given
    if hasattr(value, "item"):  # of numpy and torch
        value = value.item()
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise invalid("values", repr(value), "numbers; None or nan for a run that diverged")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # of an integer that no float can hold
        return None


def _paired_up(
    baseline: Values, arm: Values, seeds: Sequence[int], identical: bool = False
) -> tuple[SeedResult, ...]:
    found = []
    for seed in seeds:
        mine, theirs = _finite(arm.get(seed)), _finite(baseline.get(seed))
        difference = None if mine is None or theirs is None else mine - theirs
        if difference is not None and not math.isfinite(difference):
            raise invalid("values", f"{mine:g} and {theirs:g}", "numbers below 8e307")
        same = identical and difference is not None
        found.append(SeedResult(seed, _status(arm, seed), mine, theirs, difference, same))
    return tuple(found)


def _all_paired_up(
    baseline: Values, arms: Mapping[str, Values], seeds: Sequence[int]
) -> dict[str, tuple[SeedResult, ...]]:
    return {name: _paired_up(baseline, values, seeds) for name, values in arms.items()}
