"""Verdicts on plain values: by hand, and those of every stored study.

The simulation decides 2,000 studies as real ones are decided, for the error rates.

A run's metric is a sum of effects of

* its seed, the same in all arms, and its arm;
* the held-out text: of all arms alike, and of each arm with this text, which no seed changes. A
  study's effect is that of the arm on its text;
* everything else, with a variance that each arm has of its own, or that all have in common.
"""

from __future__ import annotations

import doctest
import math
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conftest import ROOT
from tilelab import stats
from tilelab.study.ask.config import Experiment
from tilelab.study.ask.metrics import METRICS
from tilelab.study.records.events import RunRecord
from tilelab.study.records.store import read_records, read_study
from tilelab.study.verdict import text as words
from tilelab.study.verdict.judge import unfolded
from tilelab.study.verdict.measures import final_metric
from tilewise.errors import InvalidArgument

BASE = {0: 2.0, 1: 2.1, 2: 2.2}


def moved(*by: float) -> dict[int, float | None]:
    """The baseline's values, each moved."""
    return {seed: value + each for (seed, value), each in zip(BASE.items(), by, strict=True)}


def test_arms_are_decided_together() -> None:
    arms: dict[str, dict[int, float | None]] = {
        "good": moved(-0.099, -0.116, -0.12),
        "same": moved(0.004, 0.005, 0.006),
        "wide": moved(0.05, -0.05, 0.0),
        "lost": {**moved(0, 0, 0), 1: float("nan")},
        "late": {0: 2.0},
    }
    found = stats.compare_all(BASE, arms, smallest_effect=0.02, unit="bits per byte")
    labels = {name: each.label for name, each in found.items()}
    assert labels == {
        "good": "better",
        "same": "no difference",
        "wide": "undecided",
        "lost": "diverged",
        "late": "incomplete",
    }
    alone = stats.compare(BASE, arms["good"], smallest_effect=0.02)
    assert alone.p_value == found["good"].p_value == alone.p_holm
    assert found["good"].p_holm == pytest.approx(5 * (alone.p_value or 0)), "one family of five"
    more = found["wide"].more_seeds or 0
    assert more == stats.more_seeds([0.05, -0.05, 0.0], 0.02, 0.05 / 5, 0.8)
    higher = stats.compare(BASE, arms["good"], smallest_effect=0.02, higher_is_better=True)
    assert higher.label == "worse"


def test_groups_step_down_together() -> None:
    """Holm over all arms, by hand: the smallest p-value times 3, the next times 2, and so on."""
    clear, weak = moved(-0.099, -0.1, -0.101), moved(-0.05, -0.062, -0.038)
    options: dict[str, Any] = {"baseline": BASE, "smallest_effect": 0.001}
    first = stats.Group(arms={"clear": clear}, **options)
    second = stats.Group(arms={"weak": weak, "wide": moved(0.05, -0.05, 0.0)}, **options)
    found = stats.compare_groups({"one": first, "two": second})
    raw = {arm: each.p_value or 0.0 for group in found.values() for arm, each in group.items()}
    assert raw["clear"] < raw["weak"] < raw["wide"]
    assert found["one"]["clear"].p_holm == pytest.approx(3 * raw["clear"])
    assert found["two"]["weak"].p_holm == pytest.approx(2 * raw["weak"])
    assert found["two"]["wide"].p_holm == pytest.approx(raw["wide"])
    apart = stats.compare_all(BASE, second.arms, smallest_effect=0.001, others=1)
    assert apart["weak"].p_holm == pytest.approx(3 * raw["weak"]), "others are not rejected"
    assert (apart["weak"].label, found["two"]["weak"].label) == ("undecided", "better")
    assert apart["wide"].more_seeds == found["two"]["wide"].more_seeds, "at Holm's first step"

    more = stats.compare_groups({"one": first, "two": second}, others=2)
    assert more["one"]["clear"].p_holm == pytest.approx(5 * raw["clear"])
    looks = stats.Group(arms={"clear": clear}, looks=(2, 3), **options)
    beside = stats.compare_groups({"looks": looks, "two": second})
    assert beside["two"] == apart, "looks are not known to the others"
    assert beside["looks"] == stats.compare_all(
        BASE, {"clear": clear}, smallest_effect=0.001, looks=(2, 3), others=2
    )
    with pytest.raises(InvalidArgument, match="groups: got none; required: a group or more"):
        stats.compare_groups({})


def test_effects_of_a_factorial() -> None:
    arms = {"a": moved(-0.1, -0.1, -0.11), "b": moved(-0.2, -0.21, -0.2)}
    arms["a+b"] = moved(-0.1, -0.11, -0.1)
    rule: dict[str, Any] = {"smallest_effect": 0.02}
    (together,) = stats.interactions_of(BASE, arms, **rule)
    assert (together.together, together.label) == ("a+b", "worse together")
    assert together.effect == pytest.approx((0.2 + 0.2 + 0.21) / 3)
    found = stats.factorial_effects(stats.Factorial(("a", "b")), BASE, arms, **rule)
    by_factors = {each.factors: each.effect for each in found}
    assert by_factors["a",] == pytest.approx((-0.31 + 0.3) / 6)
    assert by_factors["a", "b"] == pytest.approx(together.effect)
    with pytest.raises(InvalidArgument, match="design: got arms a, b; required: arms a, b, a"):
        stats.factorial_effects(
            stats.Factorial(("a", "b")), BASE, {"a": arms["a"], "b": arms["b"]}, **rule
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smallest_effect": 0.0}, "smallest_effect: got 0.0; required: a number above 0"),
        ({"confidence": 95}, "confidence: got 95"),
        ({"seeds": (0, 0)}, "seeds: got (0, 0)"),
        ({"looks": (2, 4)}, "looks: got (2, 4); required: 2 or more, growing, up to 3 seeds"),
        ({"systems": ["b"]}, "systems: got 'b'; required: arms: a"),
        ({"looks": (2, 3), "rho": math.nan}, "rho: got nan; required: a number above 0"),
        ({"looks": (2, 3), "rho": 3000}, "rho: got 3000; required: a number above 0 that gives"),
        ({"error": "poled"}, "error: got 'poled'; required: 'own' or 'pooled'"),
        ({"others": -1}, "others: got -1; required: 0 or more"),
        ({"arms": {"a": [1.0, 2.0]}}, "values: got a list; required: a mapping, seed -> value"),
        ({"arms": {"a": {0: "low"}}}, "values: got 'low'; required: numbers"),
        ({"baseline": {}, "arms": {"a": {}}}, "values: got none; required: a value or more"),
        ({"baseline": {0: 1e308}, "arms": {"a": {0: -1e308}}}, "required: numbers below 8e307"),
    ],
)
def test_what_cannot_be_compared(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        stats.compare_all(
            **{"baseline": BASE, "arms": {"a": BASE}, "smallest_effect": 0.1, **changes}
        )


def test_values_of_arrays_and_of_any_size() -> None:
    arm = {0: 0.7, 1: 2.5, 2: 2.8}
    expected = stats.compare(BASE, arm, smallest_effect=0.1)
    arrays = {seed: np.array(value) for seed, value in arm.items()}
    assert stats.compare(BASE, arrays, smallest_effect=0.1) == expected  # type: ignore[arg-type]
    large = {0: 10**400, 1: 1.0, 2: 1.0}
    assert stats.compare(BASE, large, smallest_effect=0.1).label == "diverged"
    for scale in (1e-200, 1e200):
        values = ({seed: scale * each for seed, each in one.items()} for one in (BASE, arm))
        found = stats.compare(*values, smallest_effect=scale / 10)
        assert found.p_value == pytest.approx(expected.p_value)
        assert len(found.reason) < 200, "no hundreds of digits"
    assert stats.compare(BASE, arm, smallest_effect=1e-300).label == expected.label


def test_an_incomplete_comparison_is_not_tested() -> None:
    some = {0: 0.7, 1: 2.5}
    found = stats.compare(BASE, some, smallest_effect=0.1)
    assert (found.label, found.n, found.p_value, found.p_holm) == ("incomplete", 2, None, None)
    (joint,) = stats.interactions_of(BASE, {"a": BASE, "b": BASE, "a+b": some}, smallest_effect=0.1)
    assert (joint.label, joint.n, joint.p_value) == ("incomplete", 2, None)


def test_the_example_of_the_package() -> None:
    assert doctest.testmod(stats) == (0, 9)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys, tilelab.stats as stats\n"
        "print(stats.compare({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.4}, smallest_effect=0.1).label)\n"
        "print(*({'torch', 'tilewise', 'pydantic'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["undecided", ""]


STORED = sorted((ROOT / "benchmarks/studies").glob("*/records.tar.gz"))


@pytest.mark.parametrize("archive", STORED, ids=lambda path: path.parent.name)
def test_the_verdicts_of_stored_studies(tmp_path: Path, archive: Path) -> None:
    """From the runs' last metrics alone, as the stored report prints them."""
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    records, folder = read_records(tmp_path), archive.parent
    study = read_study(folder).study
    stages, _ = unfolded(study, records)
    verdicts = (folder / "report.md").read_text().partition("## Verdicts")[2]
    sections = verdicts.partition("## Evidence")[0].split("\n### ")[1:]
    assert len(sections) == len(stages) > 0
    groups = {each.name: group_of(each, records) for each, _ in stages}
    if study.correction == "study":
        decided_by = stats.compare_groups(groups)
    else:
        decided_by = {
            name: stats.compare_groups({name: each})[name] for name, each in groups.items()
        }
    for (experiment, _), section in zip(stages, sections, strict=True):
        printed, found = rows_of(section), decided_by[experiment.name]
        controls = [arm.name for arm in experiment.arms if arm.kind == "control"]
        assert list(printed) == [*found, *controls]
        assert found
        for arm, verdict in found.items():
            assert_printed(verdict, printed[arm])


def rows_of(section: str) -> dict[str, list[str]]:
    """Arm -> the cells of its row in a stored report: verdict, effect, interval, p, seeds."""
    found = {}
    for line in section.splitlines():
        name, *cells = (cell.strip().replace("\\", "") for cell in line.strip("| ").split(" | "))
        if len(cells) > 5 and cells[0][:1] in set("✓✗=?!…~"):
            found[name] = cells[:5]
    return found


RAISED = str.maketrans(
    "\N{SUPERSCRIPT MINUS}\N{SUPERSCRIPT ZERO}\N{SUPERSCRIPT ONE}\N{SUPERSCRIPT TWO}"
    "\N{SUPERSCRIPT THREE}\N{SUPERSCRIPT FOUR}\N{SUPERSCRIPT FIVE}\N{SUPERSCRIPT SIX}"
    "\N{SUPERSCRIPT SEVEN}\N{SUPERSCRIPT EIGHT}\N{SUPERSCRIPT NINE}\N{MINUS SIGN}",
    "-0123456789-",
)


def numbers(cell: str) -> list[tuple[float, float]]:
    """The numbers of a cell, each with half a unit of its last digit."""
    found = []
    for each in re.split(r"[\[\], ]+", cell.translate(RAISED)):
        digits, _, power = each.partition("\N{MULTIPLICATION SIGN}10")
        if digits and digits != "\N{EN DASH}":
            unit = 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))
            found.append((float(digits) * 10.0 ** int(power or 0), 0.501 * unit))
    return found


def assert_printed(verdict: stats.Verdict, cells: list[str]) -> None:
    label, effect, interval, p, seeds = cells
    words_of = label[2:].removesuffix(", not learnt")
    equal = words_of.endswith(", equal losses")
    assert ("no difference" if equal else words_of) == verdict.label
    assert p == words.p_value(verdict.p_holm)
    more = re.search(r"needs ([\d,]+) more", seeds)
    assert (int(more[1].replace(",", "")) if more else None) == verdict.more_seeds
    ends = verdict.interval
    known = [verdict.effect, *((ends.low, ends.high) if ends is not None else ())]
    printed = numbers(effect) + numbers(interval)
    assert len(printed) == len(known)
    for (said, within), value in zip(printed, known, strict=True):
        assert value == pytest.approx(said, abs=within)


def group_of(experiment: Experiment, records: dict[str, RunRecord]) -> stats.Group:
    """The arms of an experiment by its runs' last metrics; controls are in no family."""

    def runs(arm: str) -> dict[int, RunRecord]:
        names = {seed: f"{experiment.name}/{arm}/seed-{seed}" for seed in experiment.seeds}
        return {seed: records[name] for seed, name in names.items() if name in records}

    def values(arm: str) -> dict[int, float | None]:
        return {seed: final_metric(each, experiment.metric) for seed, each in runs(arm).items()}

    def weights(arm: str) -> list[str]:
        return [each.weights_sha256 for each in runs(arm).values()]

    base = experiment.baseline_name
    others = [arm.name for arm in experiment.arms if arm.kind != "control"]
    metric, rule = METRICS[experiment.metric], experiment.sequential
    return stats.Group(
        baseline=values(base),
        arms={arm: values(arm) for arm in others},
        smallest_effect=experiment.smallest_effect,
        seeds=experiment.seeds,
        higher_is_better=metric.higher_is_better,
        unit=metric.unit,
        confidence=experiment.confidence,
        power=experiment.power,
        looks=() if rule is None else rule.looks,
        rho=2.0 if rule is None else rule.rho,
        systems=[arm.name for arm in experiment.arms if arm.kind == "systems"],
        error=experiment.error,
        identical=[arm for arm in others if weights(arm) == weights(base)],
    )


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

    def group(self, **options: Any) -> stats.Group:
        base, *arms = self.by_seed
        named = {f"a{at}": values for at, values in enumerate(arms)}
        return stats.Group(baseline=base, arms=named, **{"smallest_effect": TINY, **options})

    def judged(self, **options: Any) -> dict[str, stats.Verdict]:
        group = self.group(**{"smallest_effect": SMALLEST, **options})
        return stats.compare_groups({"": group})[""]


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
@pytest.mark.parametrize(
    ("row", "sds"),
    [
        ("6 arms of unequal variance", UNEQUAL),
        ("one of 6 arms with 3 times the standard deviation", (*(1.0,) * 6, 3.0)),
        ("the baseline with 3 times the standard deviation", (3.0, *(1.0,) * 6)),
    ],
)
def test_pooled_error_of_unequal_arms_errs_as_often_as_the_page_says(
    row: str, sds: tuple[float, ...]
) -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    (cell,) = re.findall(rf"pooled error, 3 or 5 seeds, {row} \| \| (.*) % \|", page)
    for said, seeds in zip(cell.split(" and "), (3, 5), strict=True):
        studies = (each.judged(error="pooled", smallest_effect=TINY) for each in drawn(sds, seeds))
        wrong = sum(any(each.label in WRONG for each in found.values()) for found in studies)
        print(f"\nfamily-wise error {wrong / STUDIES:.4f} with {seeds} seeds")
        stated = float(said.strip("*")) / 100
        assert wrong / STUDIES == pytest.approx(stated, abs=0.001)
        assert said.startswith("**") == (wrong / STUDIES > most()), (
            "bold: above by more than chance"
        )


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
    rng = np.random.default_rng(18)
    for _ in range(STUDIES):
        studies = {name: Drawn(rng, sds, LOOKS[-1], 0.0) for name, sds in sizes.items()}
        if real:
            for each in studies.values():
                each.values[1] += real  # the first arm of each
        groups = {
            name: each.group(looks=LOOKS if name == "looks" else ())
            for name, each in studies.items()
        }
        wrong += any(
            verdict.label in WRONG
            for found in stats.compare_groups(groups).values()
            for verdict in list(found.values())[1 if real else 0 :]
        )
    print(f"\nfamily-wise error of a study {wrong / STUDIES:.4f}")
    assert wrong / STUDIES <= most()
