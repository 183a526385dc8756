"""Rules by which an experiment decides beyond fixed arms and seeds, written before its runs.

Each is a part of ``config.Experiment``, and so of its hash; ``docs/metrics.md`` defines them.
``tilelab.stats.factorial`` has the algebra of factorial designs; here is the table of fractions
with the fewest short words.

Source: Box, Hunter and Hunter, "Statistics for experimenters", chapter 6.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from tilelab.stats.decide import look_levels
from tilelab.study.ask.values import Frozen, added
from tilewise.errors import InvalidArgument

_AboveZero = Annotated[float, Field(gt=0)]


class Halving(Frozen):
    """Successive halving: many candidates with a short budget, and the best of them with a longer.

    Rung i (0 for the first) trains ceil(n / eta^i) of an arm's n candidates for
    ``longest / eta^(rungs - 1 - i)`` of the arm's own steps. Each trial is a run of its own from
    the first weights, and its schedule ends where the rung does. A schedule that is cut off has not
    lowered its rate yet, and would rank large rates too low.

    Args:
        eta: one of so many goes on.
        rungs: how often.
        longest: share of a run's steps that the last rung trains.

    Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter
    optimization", AISTATS 2016.
    """

    eta: int = Field(2, ge=2)
    rungs: int = Field(3, ge=2)
    longest: float = Field(1.0, gt=0, le=1)

    def candidates(self, count: int, rung: int) -> int:
        """Return how many of ``count`` candidates a rung trains."""
        return math.ceil(count / math.pow(self.eta, rung))

    def steps(self, steps: int, rung: int) -> int:
        """Steps of a trial of that rung, where a run of the arm takes ``steps``."""
        return max(1, round(self.longest * steps / math.pow(self.eta, self.rungs - 1 - rung)))


class Search(Frozen):
    """Trials whose values Optuna asks for, of one or several paths, one after the other.

    The first third of the trials, three at least, is drawn at random and is the same for all arms.
    Each later one is asked for by a Gaussian process, given the final metrics of all trials of the
    arm before it. The records keep each trial's values: a search goes on from them.

    Args:
        space: path -> (scale, low, high). ``"log"`` and ``"linear"`` are ranges of the value on
            that scale; ``"times"`` is a range of multiples of the arm's own value, on a log scale.
        trials: of every arm.
        seed: of what is drawn.

    Source: Akiba et al., "Optuna: A Next-generation Hyperparameter Optimization Framework", KDD
    2019.
    """

    space: dict[str, tuple[Literal["log", "linear", "times"], float, float]] = Field(min_length=1)
    trials: int = Field(ge=2)
    seed: int = 0

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        for path, (scale, low, high) in self.space.items():
            if not low < high or (scale != "linear" and low <= 0):
                required = "the lower end first, and both above 0 unless linear"
                raise InvalidArgument(f"search.space.{path}", f"{low:g} to {high:g}", required)
        return self

    @property
    def first(self) -> int:
        """The number of trials that are drawn at random."""
        return min(self.trials, max(3, self.trials // 3))


class Sweep(Frozen):
    """Candidates of one value, tried for every arm with an equal budget before the final seeds.

    With a ``search`` the candidates are numbers of its trials, from 1.

    Args:
        path: what is swept.
        values: arm -> candidates; every arm, the baseline too, has equally many.
        multiples: in place of ``values``: every arm's own value times each of these.
        seeds: of the trial runs; none of them is a seed of the experiment.
        halving: None to train every candidate like a run that counts.
        search: in place of all candidates: trials over ranges of several paths.
    """

    path: str = "optimizer.lr"
    values: dict[str, tuple[float, ...]] = Field(default_factory=dict)
    multiples: tuple[float, ...] = added(())
    seeds: tuple[int, ...] = (1000,)
    halving: Halving | None = added(None)
    search: Search | None = added(None)

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.search is not None:
            if self.values or self.multiples or self.halving:
                required = "a search alone: it has its own candidates, of whole runs"
                raise InvalidArgument("sweep.search", "a search with other candidates", required)
            return self
        if bool(self.values) == bool(self.multiples):
            came = "both values and multiples" if self.values else "neither values nor multiples"
            raise InvalidArgument("sweep", came, "candidates by arm, or multiples for all arms")
        if any(each <= 0 for each in self.multiples):
            raise InvalidArgument("sweep.multiples", str(self.multiples), "numbers above 0")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """What is chosen for every arm."""
        return (self.path,) if self.search is None else tuple(self.search.space)

    @property
    def label(self) -> str:
        """The setting that a candidate is a value of, in words."""
        return self.path if self.search is None else f"trials of {' and '.join(self.search.space)}"

    @property
    def rungs(self) -> int:
        """The number of times that candidates are compared; 1 without halving."""
        return 1 if self.halving is None else self.halving.rungs

    def candidates_of(self, count: int, rung: int) -> int:
        """Return how many of an arm's ``count`` candidates a rung trains."""
        return count if self.halving is None else self.halving.candidates(count, rung)

    def steps_of(self, steps: int, rung: int) -> int:
        """Steps of a trial, where a run of the arm that counts takes ``steps``."""
        return steps if self.halving is None else self.halving.steps(steps, rung)


class Design(Frozen):
    """A factorial of two levels, full or a regular fraction, that an experiment's arms make up.

    The arms are called ``a``, ``b``, ``a+b`` after the factors that they have on; the baseline has
    none. In a fraction, a factor with a generator is on where an odd number of the generator's
    factors are. The baseline belongs to this fraction.

    Args:
        factors: names, without ``+``.
        generators: factor -> those whose product it is; empty for the full factorial.
        order: of the largest interactions that are estimated and tested.

    Source: Box, Hunter and Hunter, "Statistics for experimenters", chapters 5 and 6.
    """

    factors: tuple[str, ...] = Field(min_length=2)
    generators: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    order: int = Field(2, ge=1)


class Combine(Frozen):
    """The second stage: a factorial of the factors that survived one at a time, on fresh seeds.

    Factors survive by their verdict and are taken by their effect, the best first. A factor is left
    out if it changes a value that a taken factor changes too.

    Args:
        seeds: of the factorial; none of them is used elsewhere in the experiment.
        keep: ``"better"`` keeps only what was shown to be better; ``"not worse"`` what was not
            shown to be worse and did not diverge.
        most: factors of the factorial.
        runs: arms of it, the baseline too; where all combinations are more, a fraction is run.
        order: of the largest interactions that are estimated and tested.
    """

    seeds: tuple[int, ...] = Field(min_length=1)
    keep: Literal["better", "not worse"] = "not worse"
    most: int = Field(4, ge=2, le=8)
    runs: int = Field(16, ge=4)
    order: int = Field(2, ge=1)


class Confirm(Frozen):
    """The last stage: the winner against the baseline once more, on fresh seeds.

    Args:
        seeds: none of them is used elsewhere in the experiment.
        winner: ``"observed"`` is the arm with the best mean; ``"predicted"`` the combination of
            factors that the effects which were found (Holm) predict to be best, run or not.
    """

    seeds: tuple[int, ...] = Field(min_length=1)
    winner: Literal["observed", "predicted"] = "observed"


class Sequential(Frozen):
    """Seeds are added until every arm is decided, or all of them are spent.

    After ``looks[j]`` seeds the arms that are still open are tested, look j at the level

        alpha_j = alpha (t_j^rho - t_(j-1)^rho)        t_j = looks[j] / looks[-1], t_0 = 0

    where alpha is 1 - confidence. The levels add up to alpha. By Boole's inequality the chance of
    any wrong rejection over all looks is therefore at most alpha, however the looks depend on each
    other. Intervals are at 1 - alpha_j: together they hold at all looks. An arm that is decided
    gets no further seeds.

    Args:
        looks: seeds at each look, more at each; the last is the number of the experiment's seeds.
        rho: 1 spends evenly; more keeps level for later looks (3 is like O'Brien and Fleming's).

    Sources: Lan and DeMets, "Discrete sequential boundaries for clinical trials", Biometrika 70,
    1983 (spending); Kim and DeMets, Biometrika 74, 1987 (this family of functions).
    """

    looks: tuple[int, ...] = Field(min_length=1)
    rho: float = Field(2.0, gt=0)

    def levels(self, alpha: float) -> tuple[float, ...]:
        """alpha_j of every look; they add up to ``alpha``."""
        return look_levels(self.looks, self.rho, alpha)


class Ladder(Frozen):
    """One comparison at several lengths of training, or several sizes of the model.

    Every rung is an experiment of its own, called ``EXPERIMENT.RUNG``. The rungs in ``tuned`` try
    the candidates of the sweep for every arm. A rung's optimum is the lowest point of the parabola
    through the best candidate and its two neighbours, on the logarithm of the value; at an edge it
    is the candidate. The value at a rung lies on the line through the optima, on logarithms of the
    value and of the axis.

    Args:
        rungs: name -> what it changes in every arm, by dotted paths; the smallest rung first.
        axis: what grows: ``"tokens"`` of training, or ``"parameters"`` of the model, for which
            12 layers width^2 stands.
        tuned: one or two of the rungs. With one, its optimum serves at all rungs.
        shared: arms with one value at all rungs, the geometric mean of their optima: then a longer
            run goes on from the stable phase of a shorter one.
        last: further arms of the last rung -> the arm whose value they take.
        multiples: a tuned rung -> those that its sweep has in place of ``sweep.multiples``: the
            best value of a large model may be far from that of a small one.
        spread: rung -> the spread of paired differences that is expected there, in place of the
            experiment's.
        smallest_effect: rung -> the smallest effect that matters there. The experiment's counts
            where it is larger, so that ``--set smallest_effect=`` raises that of every rung.

    Sources: Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
    Durations" (2024), for cool-downs that branch off from one stable phase.
    """

    rungs: dict[str, dict[str, Any]] = Field(min_length=2)
    axis: Literal["tokens", "parameters"] = "tokens"
    tuned: tuple[str, ...] = Field((), max_length=2)
    shared: tuple[str, ...] = ()
    last: dict[str, str] = Field(default_factory=dict)
    multiples: dict[str, tuple[float, ...]] = added({})
    spread: dict[str, _AboveZero] = added({})
    smallest_effect: dict[str, _AboveZero] = added({})


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
