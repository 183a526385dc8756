"""Arms from factors: each alone, or each alone and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Literal

from tilelab.study.ask.config import Arm
from tilelab.study.ask.values import overlap
from tilewise.errors import InvalidArgument

Factors = Mapping[str, Mapping[str, Any]]


def one_at_a_time(
    factors: Factors, kind: Literal["training", "systems"] = "training"
) -> tuple[Arm, ...]:
    """Return one arm for each factor.

    Args:
        factors: name of the arm -> what it changes, by dotted paths.
        kind: of all these arms.
    """
    return tuple(
        Arm(name=name, changes=dict(changes), kind=kind) for name, changes in factors.items()
    )


def factorial(factors: Factors) -> tuple[Arm, ...]:
    """Return all 2^k - 1 combinations of k factors: ``lion``, ``wsd``, ``lion+wsd``.

    With the baseline, which has none of them, that is a full factorial design: it shows what each
    factor does alone and whether they add up.

    Args:
        factors: name -> what it changes, by dotted paths; names without ``+``.

    Raises:
        InvalidArgument: two factors that change the same value cannot be combined.
    """
    arms = []
    for size in range(1, len(factors) + 1):
        for together in combinations(factors, size):
            changes: dict[str, Any] = {}
            for name in together:
                for path in factors[name]:
                    if any(overlap(path, other) for other in changes):
                        came = f"{path}, which another factor changes too"
                        required = "factors that change different values"
                        raise InvalidArgument(name, came, required)
                changes.update(factors[name])
            arms.append(Arm(name="+".join(together), changes=changes))
    return tuple(arms)
