"""The effects of a factorial design: of each factor, and of what factors do beyond their sum.

For each seed, the effect of a set S of s factors is 2^s / N times a sum over all N runs. Each term
is the metric times the product of the set's signs (+1 for on, -1 for off). For one factor this is
the mean with it minus the mean without it. For two it is (both - one - other + neither), averaged
over the levels of all other factors: what both do together beyond the sum of what each does. (The
convention of Yates divides by a further 2^(s - 1).)

The seeds are the sample, as everywhere: an effect is one number a seed. Main effects are one family
for Holm's adjustment and interactions another, like arms and interactions elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tilelab.study.ask.config import Experiment
from tilelab.study.ask.deciding import Design
from tilelab.study.ask.designs import Estimate, combinations_of, estimates
from tilelab.study.verdict.decide import Rules
from tilelab.study.verdict.factorial import BROKEN, PARTIAL, label_of
from tilelab.study.verdict.result import FactorEffect, SeedResult
from tilelab.study.verdict.stats import equivalence, holm, paired

__all__ = ["factor_effects", "predicted"]

Seeds = Mapping[str, tuple[SeedResult, ...]]


def factor_effects(
    experiment: Experiment, per_seed: Seeds, baseline_diverged: bool
) -> tuple[FactorEffect, ...]:
    """Return every effect that the experiment's design estimates; none where it has no design.

    Args:
        experiment: its design, and how it decides.
        per_seed: arm -> its seeds.
        baseline_diverged: whether any run of the baseline did.
    """
    if experiment.design is None:
        return ()
    found = estimates(experiment.design)
    single = [each for each in found if len(each.factors) == 1]
    joint = [each for each in found if len(each.factors) > 1]
    return tuple(
        effect
        for family in (single, joint)
        for effect in _family(experiment, experiment.design, family, per_seed, baseline_diverged)
    )


def predicted(design: Design, effects: Sequence[FactorEffect], on: Sequence[str]) -> float:
    """Return the metric of a combination of factors less that of the baseline, by some effects.

    Args:
        design: of them.
        effects: those to be taken for true; all others are taken to be zero.
        on: the factors that are on.
    """

    def at(active: Sequence[str]) -> float:
        total = 0.0
        for each in effects:
            off = sum(factor not in active for factor in each.factors)
            total += (each.effect or 0.0) * (-1.0) ** off / 2.0 ** len(each.factors)
        return total

    return at(on) - at(())


def _family(
    experiment: Experiment,
    design: Design,
    family: Sequence[Estimate],
    per_seed: Seeds,
    baseline_diverged: bool,
) -> list[FactorEffect]:
    rules = Rules.of(experiment, max(len(family), 1))
    broken = baseline_diverged or any(
        each.status == "diverged" for seeds in per_seed.values() for each in seeds
    )
    rows = _complete(experiment, per_seed)
    values = [[] if broken else [_contrast(design, each, row) for row in rows] for each in family]
    whole = len(rows) == len(experiment.seeds) and not broken
    seen = [paired(each, rules.confidence) for each in values]
    different = holm([each.p_value if whole else None for each in seen])
    same = holm([equivalence(each, rules.smallest) if whole else None for each in values])
    found = []
    for at, each in enumerate(family):
        if broken or not whole:
            label, reason = BROKEN if broken else PARTIAL
        else:
            label, reason = label_of(seen[at], different[at], same[at], rules, len(each.factors))
        found.append(
            FactorEffect(
                factors=each.factors,
                aliases=tuple(_alias(sign, factors) for sign, factors in each.aliases),
                label=label,
                n=seen[at].n,
                effect=seen[at].mean,
                interval=seen[at].interval,
                p_value=seen[at].p_value if whole else None,
                p_holm=different[at],
                p_equivalence_holm=same[at],
                reason=reason,
            )
        )
    return found


def _complete(experiment: Experiment, per_seed: Seeds) -> list[dict[str, float]]:
    """Arm -> difference to the baseline, of every seed that all arms have finished."""
    known = {arm: {each.seed: each.difference for each in found} for arm, found in per_seed.items()}
    rows = []
    for seed in experiment.seeds:
        row = {arm: values.get(seed) for arm, values in known.items()}
        finished = {arm: value for arm, value in row.items() if value is not None}
        if len(finished) == len(row):
            rows.append(finished)
    return rows


def _contrast(design: Design, estimate: Estimate, row: Mapping[str, float]) -> float:
    """Return the effect with one seed; its signs sum to zero, so differences do for metrics."""
    runs = combinations_of(design)
    by_factors = {frozenset(arm.split("+")): value for arm, value in row.items()}
    total = 0.0
    for on in runs:
        off = sum(factor not in on for factor in estimate.factors)
        total += (-1.0) ** off * (by_factors[frozenset(on)] if on else 0.0)
    return 2.0 ** len(estimate.factors) * total / len(runs)


def _alias(sign: int, factors: Sequence[str]) -> str:
    return f"{'+' if sign > 0 else '-'}{' x '.join(factors)}"
