"""Interactions: whether choices that were tried alone and together add up.

An arm named ``a+b`` has the changes of the arms ``a`` and ``b``. For each seed the contrast is
(both - baseline) - (a - baseline) - (b - baseline). For more choices it is the alternating sum over
all subsets: what all of them together do beyond everything that smaller sets explain.

Source: Yates, "The design and analysis of factorial experiments", 1937.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain, combinations

from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import ahead
from tilelab.study.verdict.decide import Rules
from tilelab.study.verdict.result import Interaction, InteractionLabel, SeedResult
from tilelab.study.verdict.stats import Paired, equivalence, holm, paired
from tilelab.study.verdict.text import effect_text, interval_text, p_text

__all__ = ["BROKEN", "PARTIAL", "interactions", "label_of"]


BROKEN: tuple[InteractionLabel, str] = ("diverged", "A run of these arms diverged.")
PARTIAL: tuple[InteractionLabel, str] = (
    "incomplete",
    "Not every run of these arms and of the baseline is there.",
)


@dataclass(frozen=True)
class _Design:
    """An arm that joins others: the parts, and the sign of every arm in its contrast.

    The baseline, the empty set, has ``None`` for a name.
    """

    together: str
    parts: tuple[str, ...]
    signs: Mapping[str | None, int]


def interactions(
    experiment: Experiment,
    per_seed: Mapping[str, tuple[SeedResult, ...]],
    baseline_diverged: bool = False,
) -> tuple[Interaction, ...]:
    """Return every interaction that the experiment's arms can tell, with Holm over them.

    Args:
        experiment: its arms and how it decides.
        per_seed: arm -> its seeds.
        baseline_diverged: whether any run of the baseline did.
    """
    designs = list(_designs([arm.name for arm in experiment.arms]))
    rules = Rules.of(experiment, len(designs))
    contrasts = [_contrasts(design, experiment.seeds, per_seed) for design in designs]
    broken = [baseline_diverged or _broken(design, per_seed) for design in designs]
    # Like an arm, an interaction is tested when it is whole, and counts in the family before.
    wholes = [values if len(values) == len(experiment.seeds) else [] for values in contrasts]
    different = holm([paired(values, rules.confidence).p_value for values in wholes])
    same = holm([equivalence(values, rules.smallest) for values in wholes])
    found = []
    for at, design in enumerate(designs):
        values = [] if broken[at] else contrasts[at]
        seen = paired(values, rules.confidence)
        if broken[at]:
            label, reason = BROKEN
        elif not wholes[at]:
            label, reason = PARTIAL
        else:
            label, reason = label_of(seen, different[at], same[at], rules)
        found.append(
            Interaction(
                arms=design.parts,
                together=design.together,
                label=label,
                n=seen.n,
                effect=seen.mean,
                interval=seen.interval,
                p_value=seen.p_value,
                p_holm=None if broken[at] else different[at],
                reason=reason,
            )
        )
    return tuple(found)


def _designs(names: list[str]) -> Iterable[_Design]:
    by_parts = {frozenset(name.split("+")): name for name in names}
    for name in names:
        parts = tuple(name.split("+"))
        subsets = list(
            chain.from_iterable(combinations(parts, size) for size in range(1, len(parts) + 1))
        )
        arms = [by_parts.get(frozenset(subset)) for subset in subsets]
        if len(parts) < 2 or None in arms or len(set(parts)) < len(parts):
            continue
        signs: dict[str | None, int] = {None: (-1) ** len(parts)}
        for subset, arm in zip(subsets, arms, strict=True):
            signs[arm] = (-1) ** (len(parts) - len(subset))
        yield _Design(name, parts, signs)


def _contrasts(
    design: _Design, seeds: Iterable[int], per_seed: Mapping[str, tuple[SeedResult, ...]]
) -> list[float]:
    """Return the contrast of every seed that all its arms and the baseline have finished.

    The signs of a contrast sum to zero, so differences to the baseline do as well as the metrics.
    """
    known = {
        arm: {each.seed: each.difference for each in per_seed[arm]} for arm in design.signs if arm
    }
    found = []
    for seed in seeds:
        terms = [(design.signs[arm], values[seed]) for arm, values in known.items()]
        if all(difference is not None for _, difference in terms):
            found.append(sum(sign * (difference or 0.0) for sign, difference in terms))
    return found


def _broken(design: _Design, per_seed: Mapping[str, tuple[SeedResult, ...]]) -> bool:
    """Return whether a run of any of its arms diverged."""
    return any(each.status == "diverged" for arm in design.signs if arm for each in per_seed[arm])


def label_of(
    seen: Paired, p_holm: float | None, p_same: float | None, rules: Rules, factors: int = 2
) -> tuple[InteractionLabel, str]:
    """Return the decision about a contrast, and its words.

    Args:
        seen: interval and test of the contrast.
        p_holm: of a difference, adjusted.
        p_same: of equivalence, adjusted.
        rules: how it is decided.
        factors: 1 for the effect of one factor, more for an interaction.
    """
    assert seen.mean is not None
    size = f"{effect_text(seen.mean, rules.smallest)} {rules.unit}"
    if seen.interval is not None:
        size += f" {interval_text(seen.interval, rules.smallest)}"
    alone = factors == 1
    if p_same is not None and p_same <= rules.alpha:
        if alone:
            return "no difference", f"{size}: shown to be smaller than {rules.smallest:g}."
        return "additive", f"{size}: they add up, to within {rules.smallest:g}."
    if p_holm is not None and p_holm <= rules.alpha:
        p = f"(Holm p {p_text(p_holm)})"
        helps = ahead(rules.metric, seen.mean)
        if alone:
            return ("better" if helps else "worse"), f"{size} {p}."
        side: InteractionLabel = "better together" if helps else "worse together"
        return side, f"{size} beyond the sum of their effects {p}."
    what = "a difference" if alone else "an interaction"
    return "undecided", f"{size}: neither {what} nor its absence is shown."
