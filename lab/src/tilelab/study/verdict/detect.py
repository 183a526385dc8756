"""The smallest effect that a design can detect, by the expected spread and then by the seen one.

Holm's first step compares the clearest of m comparisons with alpha / m. A design of n seeds needs

    |t| > t_(1 - alpha / (2 m))          with n - 1 degrees of freedom, k (n - 1) for a pooled error

and finds an effect of spread x delta / sqrt(n) with the wished power, delta by the noncentral t
distribution. A sequential experiment is judged by its last look. A main effect of a factorial of N
runs has 2 / N of the variance of a difference of two runs.

**Families.** A family is the comparisons of a study that share its error rate. Where
``Study.correction`` is ``"experiment"``, each experiment is a family. Where it is ``"study"``, one
family has

* every arm of every experiment, and of every rung of a ladder;
* the main effects of every design. Its arms are combinations, which are adjusted among themselves:
  what a design decides are its effects.

Interactions are a second family. Stages that follow are chosen by earlier results and run on fresh
seeds: the ``combine`` of all experiments are a family, and so are the ``confirm``. They are counted
as many as they may become.

**Apart.** What an experiment with looks, a design or later stages does next follows from its
labels, which must not wait for other experiments. So Holm steps down among its own comparisons
alone, and takes all others of the family as not rejected. The first wrong rejection anywhere then
still has a p-value of at most its level over the number of true hypotheses: their sum is at most
alpha.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tilelab.stats.decide import NO_OTHERS, Others
from tilelab.stats.factorial import counted, estimates
from tilelab.stats.paired import critical_t, detectable, seeds_for_difference
from tilelab.study.ask.config import Experiment, Study
from tilelab.study.ask.metrics import METRICS
from tilelab.study.verdict.result import ExperimentVerdict, Sensitivity
from tilelab.study.verdict.stages import stand_ins
from tilelab.study.verdict.text import count, percent
from tilewise.errors import InvalidArgument


class Family(NamedTuple):
    """The comparisons that share the error rate of an experiment's."""

    size: int  # its own are among them
    others: Others = NO_OTHERS  # of other experiments
    interactions: int = 0  # of other experiments


Families = Mapping[str, Family]  # by the name of an experiment, a rung or a stage


def alone(experiment: Experiment) -> Family:
    """Return the family of an experiment that shares it with no other."""
    return Family(_comparisons(experiment))


def apart(experiment: Experiment) -> bool:
    """Return whether its decisions follow from its own records alone: see the top."""
    rules = (experiment.sequential, experiment.design, experiment.combine, experiment.confirm)
    return any(each is not None for each in rules)


def families_of(study: Study) -> dict[str, Family]:
    """Return the families of all experiments, rungs and stages, with others that are not known."""
    members = list(_members(study))
    if study.correction == "experiment":
        return {each.name: alone(each) for _, each in members}
    sizes, joint = Counter[str](), Counter[str]()
    for kind, each in members:
        sizes[kind] += _comparisons(each)
        joint[kind] += _interactions(each)
    found = {}
    for kind, each in members:
        others = sizes[kind] - _comparisons(each)
        unknown = NO_OTHERS.and_unknown(others, others)
        found[each.name] = Family(sizes[kind], unknown, joint[kind] - _interactions(each))
    return found


def _members(study: Study) -> Iterator[tuple[str, Experiment]]:
    """Yield every experiment that a study may have, with the kind of its family."""
    for experiment in study.experiments:
        for each in experiment.rungs.values() or (experiment,):
            yield "", each
        for each in stand_ins(experiment):
            yield each.name.rpartition(".")[2], each


def _comparisons(experiment: Experiment) -> int:
    design = experiment.design
    return len(experiment.tested) if design is None else len(design.factors)


def _interactions(experiment: Experiment) -> int:
    if experiment.sequential is not None:
        return 0
    if experiment.design is not None:
        return sum(len(each.factors) > 1 for each in estimates(experiment.design))
    return counted([arm.name for arm in experiment.tested])


LARGEST_T = 13.0  # two seeds and one arm ask for 12.7: a design that asks for more tests nothing
OPTION = "--underpowered"
_MOST_SEEDS = 1000


class _Design(NamedTuple):
    seeds: int
    comparisons: int
    alpha: float
    power: float
    arms: int  # that its error is pooled over; 1 for each arm's own
    share: float  # of the spread of a difference that the spread of its comparisons is

    @property
    def critical(self) -> float:
        return critical_t(self.seeds, self.comparisons, self.alpha, self.arms)

    def detects(self, spread: float) -> float:
        level = self.alpha / self.comparisons
        return detectable(self.share * spread, self.seeds, level, self.power, self.arms)

    def fails(self, spread: float | None, smallest: float) -> bool:
        if spread is None:
            return self.critical > LARGEST_T
        return self.detects(spread) > smallest * (1 + 1e-5)


def _design(experiment: Experiment, comparisons: int, *, pooled: bool | None = None) -> _Design:
    alpha = 1 - experiment.confidence
    if experiment.sequential is not None:
        alpha = experiment.sequential.levels(alpha)[-1]
    crossed = experiment.design is not None
    pooled = experiment.error == "pooled" if pooled is None else pooled
    return _Design(
        len(experiment.seeds),
        max(comparisons, 1),
        alpha,
        experiment.power,
        len(experiment.tested) if pooled and not crossed and experiment.tested else 1,
        math.sqrt(2 / (len(experiment.tested) + 1)) if crossed else 1.0,
    )


def sensitivity(
    experiment: Experiment, family: Family, spreads: Sequence[float], *, pooled: bool
) -> Sensitivity:
    """Return what a design could have detected, by the spreads of its comparisons that were seen.

    Their root mean square stands for all of them. A design's are those of its main effects.
    """
    design = _design(experiment, family.size, pooled=pooled)._replace(share=1.0)
    seen = math.hypot(*spreads) / math.sqrt(len(spreads)) if spreads else None
    found = None if not seen else design.detects(seen)
    critical = design.critical if math.isfinite(design.critical) else None
    return Sensitivity(design.comparisons, critical, seen, found)


def planned_words(experiment: Experiment, comparisons: int) -> str:
    """Return what a design needs and can detect, in a sentence or two.

    Without an expected spread, the smallest detectable effect is in units of the spread. With a
    pooled error, the second sentence says what each arm's own error detects: verdicts use it where
    the variances of the arms differ.
    """
    words = _needs(experiment, comparisons)
    design, spread = _design(experiment, comparisons), experiment.spread
    if design.seeds < 2:
        return words
    if spread is None:
        unit, smallest = METRICS[experiment.metric].unit, experiment.smallest_effect
        largest = smallest / design.detects(1.0)
        return (
            f"{words} No spread is given: it detects {smallest:g} {unit}, the smallest effect that "
            f"matters, only if the spread is {largest:.2g} or less."
        )
    if design.arms == 1:
        return words
    own = _design(experiment, comparisons, pooled=False)
    return (
        f"{words} If the variances of the arms differ, it needs |t| > {own.critical:.1f} and "
        f"detects {own.detects(spread):.2g}."
    )


def _needs(experiment: Experiment, comparisons: int) -> str:
    design = _design(experiment, comparisons)
    if design.seeds < 2:
        return "One seed: nothing is tested."
    tests = "a test" if design.comparisons == 1 else f"the first of {design.comparisons} tests"
    pooled = " (pooled error)" if design.arms > 1 else ""
    words = f"{count(design.seeds, 'seed')}: {tests} needs |t| > {design.critical:.1f}{pooled}"
    power = f"with power {percent(experiment.power)}"
    if experiment.spread is None:
        times = design.detects(1.0)
        found = f"{times:.1f}" if times < 100 else f"{times:,.0f}"
        return f"{words} and detects {found} times the spread of paired differences {power}."
    found = f"{design.detects(experiment.spread):.2g} {METRICS[experiment.metric].unit}"
    return f"{words} and detects {found} {power}, for an expected spread of {experiment.spread:g}."


def detected_words(planned: Experiment, verdict: ExperimentVerdict, correction: str) -> str:
    """Return the family of an experiment and what it could have detected, in a sentence or two."""
    seen = verdict.sensitivity
    assert seen is not None
    tests = "a single comparison" if seen.comparisons == 1 else f"{seen.comparisons} comparisons"
    where = "study" if correction == "study" else "experiment"
    effects = ", the main effects of its design among them" if planned.design is not None else ""
    words = f"Holm's adjustment is over {tests} of the {where}{effects}"
    if seen.critical_t is not None:
        words += f": the first test needs |t| > {seen.critical_t:.1f}"
    words += "."
    unit, share = METRICS[verdict.metric].unit, percent(planned.power)
    if planned.spread is not None:
        words += f" Before the runs: {planned_words(planned, seen.comparisons)}"
    if seen.detectable is not None and seen.spread is not None:
        words += (
            f" With the spread that was seen ({seen.spread:.2g}) it could detect "
            f"{seen.detectable:.2g} {unit} with power {share}."
        )
    return f"{words} {verdict.error.words}" if verdict.error is not None else words


def designs_of(study: Study) -> Iterator[tuple[Experiment, Family]]:
    """Yield every experiment, rung and stage that a study may have, with its family."""
    families = families_of(study)
    for _, each in _members(study):
        if each.arms:
            yield each, families[each.name]


def plan_lines(study: Study) -> list[str]:
    """Return what every design of a study can detect, one line each; equal ones together."""
    found: dict[str, list[str]] = {}
    for each, family in designs_of(study):
        found.setdefault(planned_words(each, family.size), []).append(each.name)
    return [f"{', '.join(names)}: {words}" for words, names in found.items()]


def check_designs(study: Study) -> None:
    """Refuse a study that cannot detect what it asks; one seed, which tests nothing, is let be.

    Raises:
        InvalidArgument: with ``Experiment.spread``, the design detects only more than the smallest
            effect that matters; without, its first test asks for |t| above ``LARGEST_T``.
    """
    for each, family in designs_of(study):
        design = _design(each, family.size)
        if design.seeds < 2 or not design.fails(each.spread, each.smallest_effect):
            continue
        unit, came = METRICS[each.metric].unit, _needs(each, family.size).rstrip(".")
        if each.spread is None:
            required = f"a design whose first test needs |t| of {LARGEST_T:g} at most"
        else:
            required = f"a design that detects {each.smallest_effect:g} {unit}, the smallest effect"
        cures = "; or ".join(_cures(study, each, design))
        fix = f"{cures[:1].upper()}{cures[1:]}; or start it all the same with {OPTION}."
        raise InvalidArgument(f"{each.name}.seeds", came, required, fix)


def _cures(study: Study, experiment: Experiment, design: _Design) -> Iterator[str]:
    """Yield what would make a design do, each by itself."""
    spread, smallest = experiment.spread, experiment.smallest_effect

    def does(other: _Design) -> bool:
        return not other.fails(spread, smallest)

    needed = _seeds(design, spread, smallest)
    if needed is not None:
        yield f"take {needed} seeds"
    pooled = _design(experiment, design.comparisons, pooled=True)
    may = not experiment.alone and experiment.sequential is None
    if may and design.arms == 1 < pooled.arms and does(pooled):
        yield 'set error="pooled"'
    fewer = next((n for n in range(design.comparisons - 1, 0, -1) if does(_to(design, n))), None)
    if fewer is not None:
        yield f"compare {count(fewer, 'arm')} in all"
    apart = len(experiment.tested) if experiment.design is None else len(experiment.design.factors)
    if study.correction == "study" and apart < design.comparisons and does(_to(design, apart)):
        yield 'set correction="experiment" of the study'
    if spread is not None:
        yield f"raise smallest_effect to {_rounded_up(design.detects(spread)):g}"


def _to(design: _Design, comparisons: int) -> _Design:
    return design._replace(comparisons=comparisons)


def _seeds(design: _Design, spread: float | None, smallest: float) -> int | None:
    """Return how many seeds would do; None for more than anybody runs."""
    if spread is not None:
        level = design.alpha / design.comparisons
        share = design.share * spread
        found = seeds_for_difference(share, smallest, level, design.power, design.arms)
        return found if found <= _MOST_SEEDS else None
    more = range(design.seeds + 1, _MOST_SEEDS)
    return next((n for n in more if design._replace(seeds=n).critical <= LARGEST_T), None)


def _rounded_up(value: float) -> float:
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(value / unit) * unit
