"""Statistics of paired differences: intervals, tests, equivalence, and how many seeds decide.

The seeds are the sample. For each seed, the arm and the baseline see the same initial weights and
the same batches; their difference is one observation. ``docs/metrics.md`` has the definitions.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from tilelab.stats.values import Interval, Ratio, Summary, invalid

SAME_WITH_EVERY_SEED = "The difference is the same with every seed: do the seeds change anything?"
ALWAYS_THE_SAME = "Every seed ended with the baseline's value: is the change in use?"
_NO_SPREAD = 1e-9  # of an effect: rounding of differences that do not vary
_MOST_RATIO = 1e9  # of spread to effect: its square is beyond any number of seeds
SEEDS_LIMIT = 10_000  # more seeds than that are not counted exactly: nobody runs them


@dataclass(frozen=True)
class Paired:
    """The paired t test of some differences."""

    n: int  # differences
    mean: float | None  # None for none
    spread: float | None  # sample standard deviation
    interval: Interval | None  # these three None for fewer than two
    p_value: float | None  # two-sided, of a mean of zero


def paired(
    differences: Sequence[float], confidence: float, spread: float | None = None, arms: int = 1
) -> Paired:
    """Return the paired t interval and test.

    Differences that do not vary at all give the limit of a vanishing spread: an interval of one
    point, and a p-value of 0 (of 1 where they are all zero).

    Args:
        differences: one a seed.
        confidence: of the interval.
        spread: standard deviation that stands in for that of the differences; None for their own.
        arms: that the spread is pooled over: it has arms (n - 1) degrees of freedom.

    Source: Student, "The probable error of a mean", Biometrika 6, 1908.
    """
    _check("differences", differences)
    _check_share("confidence", confidence)
    n = len(differences)
    if n == 0:
        return Paired(0, None, None, None, None)
    mean = statistics.fmean(differences)
    if n == 1:
        return Paired(1, mean, None, None, None)
    spread = _spread(differences) if spread is None else spread
    error, freedom = spread / math.sqrt(n), arms * (n - 1)
    half = float(_special().stdtrit(freedom, (1 + confidence) / 2)) * error
    p_value = 2 * _upper_tail(abs(mean), error, freedom) if mean else 1.0
    return Paired(n, mean, spread, Interval(mean - half, mean + half), p_value)


def constant(effect: Paired) -> bool:
    """Return whether two or more differences do not vary, by more than rounding, and are not 0."""
    mean, spread = effect.mean, effect.spread
    return bool(mean) and spread is not None and spread < _NO_SPREAD * abs(mean or 0.0)


def equivalence(
    differences: Sequence[float], margin: float, spread: float | None = None, arms: int = 1
) -> float | None:
    """Return the p-value of two one-sided t tests: of a mean at least ``margin`` away from zero.

    Small values say that the mean lies within ``(-margin, margin)``. It is the larger of the two
    one-sided p-values; None for fewer than two differences. ``spread`` and ``arms`` are as of
    ``paired``.

    Source: Schuirmann, "A comparison of the two one-sided tests procedure and the power approach",
    Journal of Pharmacokinetics and Biopharmaceutics 15, 1987.
    """
    _check("differences", differences)
    _check_above_0("margin", margin)
    n = len(differences)
    if n < 2:
        return None
    spread = _spread(differences) if spread is None else spread
    mean, error, freedom = statistics.fmean(differences), spread / math.sqrt(n), arms * (n - 1)
    ends = margin - mean, margin + mean
    return max(_upper_tail(each, error, freedom) for each in ends)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Adjust p-values by Holm's step-down method, in their order.

    A None is a test that is planned but cannot be made yet. It stays None and counts as one of the
    family, so today's decision does not depend on what is still missing.

    Source: Holm, "A simple sequentially rejective multiple test procedure", Scandinavian Journal of
    Statistics 6, 1979.
    """
    for each in p_values:
        if each is not None and not 0 <= each <= 1:
            raise invalid("p_values", str(each), "p-values, from 0 to 1; None for one to come")
    order = sorted((p, at) for at, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, at) in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p))
        adjusted[at] = largest
    return adjusted


def critical_t(seeds: int, comparisons: int, alpha: float, arms: int = 1) -> float:
    """Return the ``|t|`` that the first step of Holm's method asks for; infinite for one seed.

    t_(1 - alpha / (2 comparisons)) with arms (seeds - 1) degrees of freedom.
    """
    _check_share("alpha", alpha)
    if comparisons < 1:
        raise invalid("comparisons", str(comparisons), "1 or more")
    if seeds < 2:
        return math.inf
    return _critical(arms * (seeds - 1), alpha / (2 * comparisons))


def detectable(spread: float, seeds: int, alpha: float, power: float, arms: int = 1) -> float:
    """Return the smallest mean difference that the two-sided paired t test finds with that power.

    The inverse of ``seeds_for_difference``, by the noncentral t distribution; infinite for one
    seed. ``spread`` is the standard deviation of paired differences. For Holm's first step,
    ``alpha`` is the level over the comparisons. ``arms`` is as of ``paired``.
    """
    _check_share("alpha", alpha)
    _check_share("power", power)
    if not 0 <= spread < math.inf:
        raise invalid("spread", str(spread), "a number, 0 or more")
    if seeds < 2:
        return math.inf
    low, high = 0.0, 1.0
    while _power(high, seeds, alpha / 2, arms) < power:
        low, high = high, 2 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        if _power(middle, seeds, alpha / 2, arms) < power:
            low = middle
        else:
            high = middle
    return spread * high


def seeds_for_difference(
    spread: float, effect: float, alpha: float, power: float, arms: int = 1
) -> int:
    """Seeds so that the two-sided paired t test finds a mean difference of ``effect``.

    The normal approximation ((z_(1 - alpha/2) + z_power) spread / effect)^2 is the first guess; the
    noncentral t distribution then gives the smallest number with at least the wished power. It is 2
    or more; beyond ``SEEDS_LIMIT`` the normal approximation. ``arms`` is as of ``paired``.
    """
    return _seeds(spread, effect, alpha / 2, power, arms)


def seeds_for_equivalence(
    spread: float, gap: float, alpha: float, power: float, arms: int = 1
) -> int:
    """Seeds so that two one-sided tests show equivalence of a mean ``gap`` inside the margin.

    Each test gets half of what may fail, which is on the safe side.
    """
    return _seeds(spread, gap, alpha, (1 + power) / 2, arms)


def more_seeds(
    differences: Sequence[float],
    smallest: float,
    alpha: float,
    power: float,
    equivalence_wanted: bool = False,
    spread: float | None = None,
    arms: int = 1,
) -> int:
    """Return how many further seeds an undecided comparison needs, 1 or more.

    So many seeds find a difference of ``smallest`` with the wished power, taking the spread seen so
    far for the true one. Where there are that many already, the truth lies near the edge of what
    matters. Then the seeds have to show either a difference of the size seen, or equivalence,
    whichever is sooner. Fewer than two differences have no spread: then the number is what is
    missing to two. With ``equivalence_wanted`` the seeds that show equivalence count, where the
    mean seen allows it. ``spread`` and ``arms`` are as of ``paired``.
    """
    _check("differences", differences)
    _check_above_0("smallest", smallest)
    n = len(differences)
    if n < 2:
        return 2 - n
    mean = abs(statistics.fmean(differences))
    spread = _spread(differences) if spread is None else spread
    same = None
    if mean < smallest:
        same = seeds_for_equivalence(spread, smallest - mean, alpha, power, arms)
    if equivalence_wanted and same is not None:
        return max(same - n, 1)
    needed = seeds_for_difference(spread, smallest, alpha, power, arms)
    if needed <= n:
        ways = [same] if same is not None else []
        if mean > 0:
            ways.append(seeds_for_difference(spread, mean, alpha, power, arms))
        needed = min(ways)
    return max(needed - n, 1)


def ratio(pairs: Sequence[tuple[float, float]], confidence: float) -> Ratio | None:
    """Return the geometric mean ratio of first to second, with a t interval on the logarithms.

    None without a pair, or where a value is not above 0 or not finite.
    """
    if not pairs or not all(0 < each < math.inf for pair in pairs for each in pair):
        return None
    logs = paired([_log_ratio(arm, base) for arm, base in pairs], confidence)
    assert logs.mean is not None
    ends = logs.interval
    interval = Interval(exp(ends.low), exp(ends.high)) if ends is not None else None
    return Ratio(exp(logs.mean), interval, logs.n)


def _log_ratio(arm: float, base: float) -> float:
    value = arm / base
    return math.log(value) if 0 < value < math.inf else math.log(arm) - math.log(base)


def summary(values: Sequence[float]) -> Summary | None:
    """Return the mean and sample standard deviation; None without a value.

    Values that are not finite have no spread.
    """
    if not values:
        return None
    finite = all(map(math.isfinite, values))
    spread = _spread(values) if len(values) > 1 and finite else None
    return Summary(statistics.fmean(values), tuple(values), spread)


def pooled_spread(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return the pooled standard deviation of a paired difference, and whether variances differ.

    Randomized blocks: the baseline and k arms are the treatments, the n seeds are the blocks. With
    r the residuals after means of blocks and treatments,

        MS = sum r^2 / (k (n - 1))          spread = sqrt(2 MS)

    The second number is the p-value of Cochran's C: the largest of the treatments' sums of r^2 over
    the sum of all. Under equal variances a treatment's share, times (k + 1) / k, has the
    distribution Beta((n - 1) / 2, (k - 1)(n - 1) / 2). Bonferroni's bound is over the k + 1
    treatments. It is 1 for one arm, whose differences have one variance.

    ``rows`` are the differences of each arm to the baseline, by seed: 1 or more of 2 or more.

    Sources: Fisher, "The Design of Experiments", chapter 4; Cochran, "The distribution of the
    largest of a set of estimated variances as a fraction of their total", Annals of Eugenics 11,
    1941.
    """
    k, n = len(rows), len(rows[0])
    top = max(abs(each) for row in rows for each in row) or 1.0  # else squares may overflow
    # Less the baseline: blocks' own levels cancel.
    table = [[0.0] * n, *([each / top for each in row] for row in rows)]
    blocks = [statistics.fmean(column) for column in zip(*table, strict=True)]
    whole = statistics.fmean(blocks)
    squares = []
    for row in table:
        own = statistics.fmean(row)
        residuals = (y - own - b + whole for y, b in zip(row, blocks, strict=True))
        squares.append(sum(each**2 for each in residuals))
    total = sum(squares)
    spread = top * math.sqrt(2 * total / (k * (n - 1)))
    if k == 1 or total == 0:
        return spread, 1.0
    share = min(1.0, max(squares) / total * (k + 1) / k)
    half = (n - 1) / 2
    tail = float(_special().betaincc(half, (k - 1) * half, share))
    return spread, min(1.0, (k + 1) * tail)


def _check(argument: str, values: Sequence[float]) -> None:
    for each in values:
        if not math.isfinite(each):
            raise invalid(argument, str(each), "finite numbers: a run that diverged has no place")


def _check_above_0(argument: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise invalid(argument, str(value), "a number above 0")


def _check_share(argument: str, value: float) -> None:
    if not 0 < value < 1:
        raise invalid(argument, str(value), "a share between 0 and 1")


def _spread(values: Sequence[float]) -> float:
    """Return the sample standard deviation; exactly 0 for equal values, however the mean rounds."""
    return 0.0 if min(values) == max(values) else statistics.stdev(values)


@cache
def _special() -> ModuleType:
    """Return ``scipy.special``, which takes a quarter of a second to load: the first test does."""
    from scipy import special

    return special  # type: ignore[no-any-return]


def _critical(freedom: int, tail: float) -> float:
    return -float(_special().stdtrit(freedom, tail))  # of a small tail, exact


def _upper_tail(distance: float, error: float, freedom: int) -> float:
    """P(T >= distance / error); of a vanishing error its limit."""
    if error == 0:
        return 0.0 if distance > 0 else 1.0
    return float(_special().stdtr(freedom, -distance / error))


def _power(ratio: float, seeds: int, tail: float, arms: int) -> float:
    """P(T' > t_(1 - tail)), T' noncentral with sqrt(n) ratio; the effect is ratio x spread."""
    freedom = arms * (seeds - 1)
    shift, least = math.sqrt(seeds) * ratio, _critical(freedom, tail)
    power = float(1 - _special().nctdtr(freedom, shift, least))
    if math.isnan(power):  # beyond a shift of 1e5: its noise of 1 is nothing
        power = float(_special().chdtr(freedom, freedom * (shift / least) ** 2))
    return power


def _seeds(spread: float, effect: float, tail: float, power: float, arms: int) -> int:
    """Return the smallest number of seeds with at least the wished power."""
    for name, share in (("alpha", tail), ("power", power)):
        _check_share(name, share)
    _check_above_0("effect", effect)
    if not 0 <= spread < math.inf:
        raise invalid("spread", str(spread), "a number, 0 or more")
    if spread == 0:
        return 2
    z = float(_special().ndtri(1 - tail) + _special().ndtri(power))
    guess = min(z * spread / effect, _MOST_RATIO) ** 2
    n = max(2, math.ceil(min(guess, SEEDS_LIMIT)))
    while n < SEEDS_LIMIT:
        if _power(effect / spread, n, tail, arms) >= power:
            return n
        n += 1
    return max(SEEDS_LIMIT, math.ceil(guess))


def exp(value: float) -> float:
    """e^value, infinite where a float cannot hold it."""
    return math.exp(value) if value < 700 else math.inf
