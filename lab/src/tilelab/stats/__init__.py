"""The statistics of paired seeds, for results from anywhere; torch is not loaded.

>>> from tilelab.stats import compare
>>> adamw = {0: 3.214, 1: 3.198, 2: 3.221}
>>> muon = {0: 3.101, 1: 3.094, 2: 3.105}
>>> verdict = compare(adamw, muon, smallest_effect=0.02, unit="nats")
>>> print(f"{verdict.label}: {verdict.reason}")
better: -0.111 nats [-0.127, -0.095] (Holm p 0.0011).

``compare_all`` takes several arms, ``interactions_of`` and ``factorial_effects`` tell what choices
do together, ``detectable``, ``seeds_for_difference`` and ``seeds_for_equivalence`` plan.
``docs/metrics.md`` defines each number; the studies of ``tilelab.study`` are judged by the same
functions.
"""

from tilelab.stats.compare import (
    Factorial,
    compare,
    compare_all,
    factorial_effects,
    interactions_of,
)
from tilelab.stats.decide import look_levels
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
    Summary,
    Verdict,
)

__all__ = [
    "Effect",
    "ErrorUsed",
    "FactorEffect",
    "Factorial",
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
