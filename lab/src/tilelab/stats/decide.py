"""The decision about one comparison, and its words.

In this order, the first that holds:

1. *diverged*: a seed of the arm ended because a number was not finite;
2. *incomplete*: a seed of the arm or of the baseline is missing;
3. *no difference*: all seeds ended with the same weights bit for bit, or the equivalence tests
   (Holm) show an effect smaller than the smallest one that matters;
4. *better* or *worse*: the paired t test (Holm) rejects an effect of zero;
5. *undecided*: neither; with the number of seeds that would decide it.

So an effect that is surely not zero but surely too small to matter is no difference.

**Pooled error.** ``Rules.error = "pooled"`` takes one error for all arms of an experiment, with
k (n - 1) degrees of freedom for k arms and n seeds: ``paired.pooled_spread``. Where a run diverged
or is missing, each arm has its own. Where Cochran's test says at 5 % that variances differ, each
test and interval is the more cautious of both. So a choice between two errors that is made on the
same numbers cannot raise the error rate above that of either.

Sequential comparisons: seeds are added until every arm is decided, or all of them are spent.

``look_levels`` has the levels. At a look, Holm's adjustment is over the arms at the look's
level. The family shrinks only by the arms that an earlier look rejected. The first wrong rejection
of all then has a p-value of at most the look's level over the number of arms for which the
hypothesis is true. These levels add up over looks and arms to alpha.

A look is taken when every open arm and the baseline have all of its seeds. Runs beyond the look are
not looked at, so the decision depends on the records alone and not on who ran when.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tilelab.stats.paired import Paired, equivalence, holm, more_seeds, paired, pooled_spread
from tilelab.stats.values import (
    ErrorUsed,
    Interval,
    Label,
    Look,
    SeedResult,
    Verdict,
    effect_text,
    interval_text,
    invalid,
    p_text,
    seeds_text,
)

VARIANCES_DIFFER = 0.05  # a p-value of Cochran's test up to that says so


class Others(NamedTuple):
    """Tests that share the family of some comparisons: their p-values, None for one to come."""

    different: Sequence[float | None] = ()
    same: Sequence[float | None] = ()  # of equivalence

    def and_unknown(self, different: int, same: int) -> Others:
        """Return these and so many that are not known."""
        return Others([*self.different, *[None] * different], [*self.same, *[None] * same])


NO_OTHERS = Others()


def others_of(tests: Mapping[str, Sequence[Judged]], unknown: int = 0) -> dict[str, Others]:
    """Return, for each of some experiments that step down together, the tests of all others.

    ``tests`` has the comparisons by experiment, each tested with any family. ``unknown`` further
    ones count as not rejected.
    """
    p_values = {
        name: [(each.p_value, each.test.p_equivalence) for each in found]
        for name, found in tests.items()
    }
    found = {}
    for name in p_values:
        rest = [each for other, known in p_values.items() if other != name for each in known]
        others = Others([each for each, _ in rest], [each for _, each in rest])
        found[name] = others.and_unknown(unknown, unknown)
    return found


@dataclass(frozen=True)
class Rules:
    """The decision rules of an experiment."""

    unit: str  # of the metric, in words; may be empty
    smallest: float  # effect that matters
    confidence: float  # of intervals
    power: float  # of further seeds
    family: int  # comparisons that share the error of the experiment
    higher_is_better: bool = False
    error: Literal["own", "pooled"] = "own"

    def __post_init__(self) -> None:
        if not 0 < self.smallest < math.inf:
            required = "a number above 0: the smallest difference of the values that matters"
            raise invalid("smallest_effect", str(self.smallest), required)
        for name in ("confidence", "power"):
            if not 0.5 < getattr(self, name) < 1:
                raise invalid(name, str(getattr(self, name)), "a share between 0.5 and 1")

    def helps(self, effect: float) -> bool:
        """Return whether a difference of the metric is an improvement."""
        return effect > 0 if self.higher_is_better else effect < 0

    @property
    def alpha(self) -> float:
        """The level of every test, over its family."""
        return 1 - self.confidence


@dataclass(frozen=True)
class Comparison:
    """A comparison to decide."""

    kind: Literal["training", "systems"]
    seeds: Sequence[SeedResult]  # every seed of the experiment
    baseline_diverged: Sequence[int] = ()  # seeds with which the baseline diverged
    lost: bool = False  # no runs, because every value of its sweep diverged

    @property
    def differences(self) -> list[float]:
        """The differences of the seeds that both have finished."""
        return [each.difference for each in self.seeds if each.difference is not None]

    @property
    def diverged(self) -> tuple[int, ...]:
        """The seeds with which the arm diverged."""
        return tuple(each.seed for each in self.seeds if each.status == "diverged")

    @property
    def whole(self) -> bool:
        """Whether both have every seed: only then the comparison is tested."""
        return len(self.differences) == len(self.seeds)

    @property
    def identical(self) -> bool:
        """Whether every pair of runs that have finished ended with the same weights."""
        pairs = [each for each in self.seeds if each.difference is not None]
        return bool(pairs) and all(each.identical for each in pairs)


@dataclass(frozen=True)
class Examined:
    """The tests of a comparison; None for what cannot be tested."""

    paired: Paired
    p_holm: float | None  # of a difference
    p_equivalence: float | None
    p_equivalence_holm: float | None

    @property
    def shown(self) -> dict[str, Any]:
        """The fields of ``values.Effect`` that it decides."""
        seen = self.paired
        values = {"n": seen.n, "effect": seen.mean, "interval": seen.interval}
        tested = self.p_holm is not None  # not where a run is missing
        return {**values, "p_value": seen.p_value if tested else None, "p_holm": self.p_holm}


@dataclass(frozen=True)
class Decision:
    """The label, the sentence, and the seeds that an undecided comparison still needs."""

    label: Label
    reason: str
    more_seeds: int | None = None


class Judged(NamedTuple):
    """A comparison, its tests, what was decided, and of a sequential one at which look."""

    compared: Comparison
    test: Examined
    decision: Decision
    look: Look | None = None
    error: ErrorUsed | None = None

    @property
    def p_value(self) -> float | None:
        """The p-value of the difference, not adjusted; None where it is not tested."""
        return self.test.paired.p_value if self.compared.whole else None

    def verdict(self, arm: str) -> Verdict:
        """Return it as the verdict on an arm of that name."""
        compared, test, decision, look, error = self
        return Verdict(
            arm=arm,
            label=decision.label,
            reason=decision.reason,
            **test.shown,
            p_equivalence=test.p_equivalence,
            p_equivalence_holm=test.p_equivalence_holm,
            more_seeds=decision.more_seeds,
            per_seed=tuple(compared.seeds),
            diverged=compared.diverged,
            identical=compared.identical,
            look=look,
            error=error,
        )


def decided(
    comparisons: Sequence[Comparison], rules: Rules, others: Others = NO_OTHERS
) -> list[Judged]:
    """Make all tests of one family, and decide by them.

    Where a seed diverged, the effect of the others says nothing about the arm: it has none. An
    incomplete comparison is not tested, but counts in the family. ``others`` are comparisons that
    are not among these and are in the family too.
    """
    error = _error(comparisons, rules)
    effects, same = [], []
    for each in comparisons:
        gone = each.diverged or each.baseline_diverged
        values = [] if gone else each.differences
        effect, p_same = _tested(values, rules, error, len(comparisons))
        effects.append(replace(effect, n=len(each.differences)))
        same.append(p_same)
    tests = family_tests(effects, same, [each.whole for each in comparisons], others)
    return [
        Judged(each, test, _with_error(_decide(each, test, rules, error), error), None, error)
        for each, test in zip(comparisons, tests, strict=True)
    ]


def _error(comparisons: Sequence[Comparison], rules: Rules) -> ErrorUsed | None:
    """Return which error the tests take, and why; None where each arm's own was asked for."""
    if rules.error == "own":
        return None
    if any(each.diverged or each.baseline_diverged or not each.whole for each in comparisons):
        return ErrorUsed("own", None, None, "Each arm's own error: a run diverged or is missing.")
    rows = [each.differences for each in comparisons]
    seeds = len(rows[0]) if rows else 0
    if seeds < 2:
        return ErrorUsed("own", None, None, "Each arm's own error: there is one seed.")
    if len(rows) == 1:
        return ErrorUsed("own", None, None, "Its own error: there is no other arm.")
    spread, p_value = pooled_spread(rows)
    freedom = len(rows) * (seeds - 1)
    p = f"Cochran p {p_text(p_value)}"
    if spread == 0:
        return ErrorUsed("own", spread, freedom, "Each arm's own error: nothing varies.")
    if p_value <= VARIANCES_DIFFER:
        words = f"Own or pooled error, the more cautious: the arms' variances differ ({p})."
        return ErrorUsed("own", spread, freedom, words)
    return ErrorUsed(
        "pooled", spread, freedom, f"Pooled error, {freedom} degrees of freedom ({p})."
    )


def _tested(
    values: Sequence[float], rules: Rules, error: ErrorUsed | None, arms: int
) -> tuple[Paired, float | None]:
    """Return the paired test of some differences, and the p-value of equivalence."""
    own = paired(values, rules.confidence), equivalence(values, rules.smallest)
    if error is None or not error.spread or len(values) < 2:
        return own
    pooled = (
        paired(values, rules.confidence, error.spread, arms),
        equivalence(values, rules.smallest, error.spread, arms),
    )
    if error.kind == "pooled":
        return pooled
    wider = max(own, pooled, key=lambda each: _width(each[0]))[0]
    p_values = [each.p_value for each, _ in (own, pooled) if each.p_value is not None]
    same = [each for _, each in (own, pooled) if each is not None]
    return replace(wider, p_value=max(p_values)), max(same)


def _width(effect: Paired) -> float:
    assert effect.interval is not None
    return effect.interval.high - effect.interval.low


def _with_error(decision: Decision, error: ErrorUsed | None) -> Decision:
    if error is None or decision.label in ("diverged", "incomplete"):
        return decision
    return replace(decision, reason=f"{decision.reason} {error.words}")


def family_tests(
    effects: Sequence[Paired],
    same: Sequence[float | None],
    whole: Sequence[bool],
    others: Others = NO_OTHERS,
) -> list[Examined]:
    """Adjust the tests of some effects; those of one that is not whole are not made."""
    different = [
        each.p_value if there else None for each, there in zip(effects, whole, strict=True)
    ]
    tested = [each if there else None for each, there in zip(same, whole, strict=True)]
    p_holm = holm([*different, *others.different])[: len(different)]
    p_same = holm([*tested, *others.same])[: len(tested)]
    return [Examined(*row) for row in zip(effects, p_holm, tested, p_same, strict=True)]


def _decide(
    comparison: Comparison, test: Examined, rules: Rules, error: ErrorUsed | None
) -> Decision:
    """Return the label of a comparison by the order above, with its sentence."""
    if comparison.lost:
        return Decision("diverged", "Every value of its sweep diverged, so no run could count.")
    if comparison.diverged:
        return Decision("diverged", _diverged_text(comparison))
    if any(each.status == "incomplete" for each in comparison.seeds):
        return Decision("incomplete", _incomplete_text(comparison, rules, test.paired))
    if comparison.baseline_diverged:
        seeds = seeds_text(comparison.baseline_diverged)
        return Decision(
            "undecided", f"The baseline diverged with {seeds}: nothing to compare with."
        )
    if not comparison.whole:
        done = len(comparison.differences)
        missing = f"The baseline has finished {done} of {len(comparison.seeds)} seeds."
        return Decision("incomplete", missing)
    return _of_whole(comparison, test, rules, error)


def _of_whole(
    comparison: Comparison, test: Examined, rules: Rules, error: ErrorUsed | None
) -> Decision:
    effect, interval = test.paired.mean, test.paired.interval
    assert effect is not None
    size = size_text(effect, interval, rules)
    if comparison.identical:
        count = test.paired.n
        seeds = "the one seed" if count == 1 else f"all {count} seeds"
        return Decision("no difference", f"Identical weights, bit for bit, with {seeds}.")
    if test.p_equivalence_holm is not None and test.p_equivalence_holm <= rules.alpha:
        return Decision(
            "no difference",
            f"{size}: shown to be smaller than {rules.smallest:g}, the smallest effect that "
            f"matters (equivalence, Holm p {p_text(test.p_equivalence_holm)}).",
        )
    if test.p_holm is not None and test.p_holm <= rules.alpha:
        assert interval is not None
        label: Label = "better" if rules.helps(effect) else "worse"
        reason = f"{size} (Holm p {p_text(test.p_holm)})."
        if min(abs(interval.low), abs(interval.high)) < rules.smallest:
            reason += (
                f" It may be smaller than {rules.smallest:g}, the smallest effect that matters."
            )
        return Decision(label, reason)
    return _undecided(comparison, size, rules, error)


def _undecided(
    comparison: Comparison, size: str, rules: Rules, error: ErrorUsed | None
) -> Decision:
    values = comparison.differences
    pooling: tuple[float, int] | tuple[()] = ()
    if error is not None and error.kind == "pooled":
        assert error.spread is not None
        assert error.freedom is not None
        pooling = error.spread, error.freedom // (len(values) - 1)
    systems = comparison.kind == "systems"
    # Holm's strictest level: it holds for whichever of the arms turns out to be the clearest.
    level = rules.alpha / rules.family
    more = more_seeds(values, rules.smallest, level, rules.power, systems, *pooling)
    if len(values) < 2:
        reason = f"{size}: one seed has no error bar. Two at least are needed."
    else:
        wanted = "to show that nothing changed" if systems else "to decide it"
        seeds = "1 more seed" if more == 1 else f"{more:,} more seeds"
        reason = (
            f"{size}: neither a difference nor its absence is shown. About {seeds} {wanted} "
            f"(power {rules.power:.0%}, as the seeds vary so far)."
        )
    return Decision("undecided", reason, more)


def size_text(effect: float, interval: Interval | None, rules: Rules) -> str:
    """Return an effect with its unit and interval."""
    text = f"{effect_text(effect, rules.smallest)} {rules.unit}".rstrip()
    return text if interval is None else f"{text} {interval_text(interval, rules.smallest)}"


def _diverged_text(comparison: Comparison) -> str:
    diverged = comparison.diverged
    text = (
        f"Diverged with {len(diverged)} of {len(comparison.seeds)} seeds ({seeds_text(diverged)})"
    )
    both = [seed for seed in diverged if seed in comparison.baseline_diverged]
    return f"{text}; so did the baseline with {seeds_text(both)}." if both else f"{text}."


def _incomplete_text(comparison: Comparison, rules: Rules, so_far: Paired) -> str:
    done = sum(each.status == "done" for each in comparison.seeds)
    text = f"{done} of {len(comparison.seeds)} seeds are done"
    if so_far.mean is None:
        return f"{text}."
    return f"{text}; so far {size_text(so_far.mean, so_far.interval, rules)}."


def look_levels(looks: Sequence[int], rho: float, alpha: float) -> tuple[float, ...]:
    """Return alpha_j of every look; they add up to ``alpha``.

        alpha_j = alpha (t_j^rho - t_(j-1)^rho)        t_j = looks[j] / looks[-1], t_0 = 0

    Sources: Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70,
    1983 (spending); Kim and DeMets, Biometrika 74, 1987 (this family of functions).
    """
    spent = [0.0, *(alpha * (look / looks[-1]) ** rho for look in looks)]
    return tuple(after - before for before, after in pairwise(spent))


def look_by_look(
    compared: Sequence[Comparison],
    rules: Rules,
    looks: Sequence[int],
    levels: Sequence[float],
    others: int = 0,
) -> list[Judged]:
    """Return the decisions about all arms of a sequential experiment, as far as its runs have come.

    Each is compared with all of the experiment's seeds, run or not, and cut to those that its look
    asks for. ``levels`` of the looks add up to ``rules.alpha``. ``others`` are comparisons of other
    experiments in the family; they count as not rejected.
    """
    unknown = NO_OTHERS.and_unknown(others, others)
    found: dict[int, Judged] = {}
    for number, (count, level) in enumerate(zip(looks, levels, strict=True), 1):
        left = [at for at in range(len(compared)) if at not in found]
        cut = [_first(compared[at], count) for at in left]
        look = Look(number, len(looks), level)
        family = unknown.and_unknown(*_others(found))
        tested = decided(cut, replace(rules, confidence=1 - level), family)
        judged = dict(zip(left, tested, strict=True))
        if any(each.decision.label == "incomplete" for each in tested):
            return _in_order({**found, **{at: _waiting(each, look) for at, each in judged.items()}})
        last = number == len(looks)
        found |= {
            at: _with_look(each, look)
            for at, each in judged.items()
            if last or each.decision.label != "undecided" or each.compared.baseline_diverged
        }
        if len(found) == len(compared):
            break
    return _in_order(found)


def _first(compared: Comparison, count: int) -> Comparison:
    seeds = tuple(compared.seeds[:count])
    known = {each.seed for each in seeds}
    diverged = tuple(seed for seed in compared.baseline_diverged if seed in known)
    return replace(compared, seeds=seeds, baseline_diverged=diverged)


def _others(found: dict[int, Judged]) -> tuple[int, int]:
    """Arms of earlier looks that still count: for the tests of a difference, and of equivalence."""
    labels = [each.decision.label for each in found.values()]
    same = labels.count("no difference")
    different = labels.count("better") + labels.count("worse")
    return len(labels) - different, len(labels) - same


def _waiting(each: Judged, look: Look) -> Judged:
    """Nothing is decided before the look is taken, but for what diverged."""
    label = each.decision.label
    if label == "diverged":
        return each._replace(look=look)
    if label == "incomplete":
        reason = f"Look {look.number} of {look.of}: {each.decision.reason}"
    else:
        reason = f"Look {look.number} of {look.of} waits for the other arms."
    unknown = replace(each.test, p_holm=None, p_equivalence=None, p_equivalence_holm=None)
    return each._replace(test=unknown, decision=Decision("incomplete", reason), look=look)


def _with_look(each: Judged, look: Look) -> Judged:
    decision, seeds = each.decision, len(each.compared.seeds)
    said = f"Look {look.number} of {look.of}, {seeds} seeds, level {look.level:.2g}."
    decision = replace(decision, reason=f"{decision.reason} {said}")
    return each._replace(decision=decision, look=look)


def _in_order(found: dict[int, Judged]) -> list[Judged]:
    return [found[at] for at in sorted(found)]
