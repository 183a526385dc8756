"""Error rates over 2,000 simulated studies, decided by what decides real ones.

A run's metric is a sum of effects of

* its seed, the same in all arms, and its arm;
* the held-out text: of all arms alike, and of each arm with this text, which no seed changes. A
  study's effect is that of the arm on its text;
* everything else, with a variance that each arm has of its own, or that all have in common.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tilelab import stats
from tilelab.stats.decide import (
    Comparison,
    Judged,
    Rules,
    decided,
    look_by_look,
    look_levels,
    others_of,
)
from tilelab.stats.values import SeedResult

STUDIES = 2000
SMALLEST = 0.02
TINY = 1e-5  # no test of equivalence stands before that of a difference
SEED_SD, TEXT_SD, ARM_ON_TEXT_SD, RUN_SD, EFFECT_SD = 0.05, 0.1, 0.01, 0.01, 0.03
UNEQUAL = (1.0, 0.5, 2.0, 1.0, 3.0, 0.7, 1.5)
WRONG = ("better", "worse")


def most(share: float = 0.05, studies: int = STUDIES) -> float:
    """A rate of ``share`` is seen below that in 98 of 100 simulations."""
    return share + 2 * math.sqrt(share * (1 - share) / studies)


class Drawn:
    """A simulated study: metrics by arm (the baseline first) and seed, and the true effects."""

    def __init__(
        self, rng: np.random.Generator, sds: Sequence[float], seeds: int, effect_sd: float
    ) -> None:
        arms = len(sds)
        on_text = rng.normal(0, ARM_ON_TEXT_SD, arms) if effect_sd else np.zeros(arms)
        level = rng.normal(0, effect_sd, arms) + on_text + rng.normal(0, TEXT_SD)
        noise = rng.normal(size=(arms, seeds)) * RUN_SD * np.array(sds)[:, None]
        self.values: NDArray[Any] = level[:, None] + rng.normal(0, SEED_SD, seeds) + noise
        self.effects = [float(each) for each in level[1:] - level[0]]

    @property
    def by_seed(self) -> list[dict[int, float | None]]:
        """Of the baseline, then of every arm."""
        return [{at: float(each) for at, each in enumerate(row)} for row in self.values]

    def judged(self, **options: Any) -> dict[str, stats.Verdict]:
        base, *arms = self.by_seed
        named = {f"a{at}": values for at, values in enumerate(arms)}
        return stats.compare_all(base, named, **{"smallest_effect": SMALLEST, **options})

    @property
    def comparisons(self) -> list[Comparison]:
        base, *arms = self.values
        return [
            Comparison(
                "training",
                [
                    SeedResult(at, "done", float(one), float(other), float(one - other), False)
                    for at, (one, other) in enumerate(zip(row, base, strict=True))
                ],
            )
            for row in arms
        ]


def drawn(sds: Sequence[float], seeds: int, effect_sd: float = 0.0) -> Iterator[Drawn]:
    rng = np.random.default_rng(17)
    return (Drawn(rng, sds, seeds, effect_sd) for _ in range(STUDIES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "sds", "seeds"),
    [
        ("own", UNEQUAL, 3),
        ("own", UNEQUAL, 5),
        ("pooled", (1.0,) * 3, 3),
        ("pooled", (1.0,) * 7, 3),
        ("pooled", (1.0,) * 7, 5),
    ],
)
def test_intervals_cover_the_truth_as_often_as_they_say(
    error: str, sds: tuple[float, ...], seeds: int
) -> None:
    hits, count = 0, 0
    for study in drawn(sds, seeds, EFFECT_SD):
        verdicts = study.judged(error=error).values()
        for verdict, truth in zip(verdicts, study.effects, strict=True):
            assert verdict.interval is not None
            hits += verdict.interval.low <= truth <= verdict.interval.high
            count += 1
    print(f"\ncoverage {hits / count:.4f} of {count}")
    assert 0.93 <= hits / count <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "sds", "seeds", "looks"),
    [
        ("own", (1.0,) * 7, 3, ()),
        ("own", UNEQUAL, 3, ()),
        ("pooled", (1.0,) * 3, 3, ()),
        ("pooled", (1.0,) * 7, 3, ()),
        ("pooled", (1.0,) * 7, 5, ()),
        ("own", UNEQUAL, 6, (2, 4, 6)),
    ],
)
def test_any_wrong_verdict_of_an_experiment_is_rare(
    error: str, sds: tuple[float, ...], seeds: int, looks: tuple[int, ...]
) -> None:
    wrong = 0
    for study in drawn(sds, seeds):
        verdicts = study.judged(error=error, looks=looks, smallest_effect=TINY).values()
        wrong += any(each.label in WRONG for each in verdicts)
    print(f"\nfamily-wise error {wrong / STUDIES:.4f}")
    assert wrong / STUDIES <= most()


@pytest.mark.slow
def test_an_arm_that_matters_is_rarely_called_no_difference() -> None:
    """At the edge of what matters, with pooled error: the worst case for equivalence."""
    wrong = 0
    for study in drawn((0.3,) * 7, 3):
        study.values[1:] += SMALLEST
        verdicts = study.judged(error="pooled").values()
        wrong += any(each.label == "no difference" for each in verdicts)
    print(f"\nwrong equivalence {wrong / STUDIES:.4f}")
    assert 0 < wrong / STUDIES <= most()


LOOKS = (3, 6)


@pytest.mark.slow
@pytest.mark.parametrize("real", [0.0, 0.5])
def test_any_wrong_verdict_of_a_study_is_rare(real: float) -> None:
    """Two experiments that step down together, and one with looks; some have real effects."""
    wrong = 0
    sizes = {"one": UNEQUAL, "two": (1.0,) * 5, "looks": UNEQUAL[:4]}
    family = sum(len(each) - 1 for each in sizes.values())
    rng = np.random.default_rng(18)
    for _ in range(STUDIES):
        studies = {name: Drawn(rng, sds, LOOKS[-1], 0.0) for name, sds in sizes.items()}
        if real:
            for each in studies.values():
                each.values[1] += real  # the first arm of each
        compared = {name: each.comparisons for name, each in studies.items()}
        wrong += any(
            each.decision.label in WRONG
            for found in together(compared, family)
            for each in found[1 if real else 0 :]
        )
    print(f"\nfamily-wise error of a study {wrong / STUDIES:.4f}")
    assert wrong / STUDIES <= most()


def together(compared: dict[str, list[Comparison]], family: int) -> list[list[Judged]]:
    """Decide a study of three experiments, as the judge does."""
    rules = Rules("", TINY, 0.95, 0.8, family)
    joint = {name: decided(compared[name], rules) for name in ("one", "two")}
    others = others_of(joint, len(compared["looks"]))
    found = [decided(compared[name], rules, others[name]) for name in joint]
    levels = look_levels(LOOKS, 2.0, rules.alpha)
    rest = family - len(compared["looks"])
    return [*found, look_by_look(compared["looks"], rules, LOOKS, levels, rest)]
