"""Studies that decide in stages, with real training: what is run, in which order, and resumed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.in_process import page_of, quickly, records, run, verdicts
from tests.lab.study.test_end_to_end import assert_same
from tests.lab.study.train.toys import text
from tilelab.study.records.events import RunRecord

pytestmark = pytest.mark.slow

RECIPE = '''
from pathlib import Path

from tilelab.study import recipes
from tilelab.study.ask import overrides
from tilelab.study.ask.config import *
from tilelab.study.recipes.arms import factorial

ADAMW = {"optimizer": {"name": "adamw", "lr": 0.004}}
DROPOUT = {"model.dropout.residual": 0.2}
RUN = RunConfig(
    model=Model(layers=2, heads=2, width=32, context=32),
    data=Data(source=str(Path(__file__).with_name("text.txt"))),
    optimizer=Optimizer(name="sgd", lr=0.001),
    training=Training(batch=4),
    budget=Budget(steps=12),
    evaluation=Evaluation(every=6, windows=4),
)

def designed() -> Study:
    """A factorial whose rates are tuned by successive halving, and its winner again."""
    experiment = Experiment(
        name="two",
        question="?",
        baseline=RUN,
        arms=factorial({"adamw": ADAMW, "dropout": DROPOUT}),
        seeds=(0, 1),
        smallest_effect=0.02,
        sweep=Sweep(multiples=(0.5, 1, 2), seeds=(90,), halving=Halving(eta=2, rungs=2)),
        design=Design(factors=("adamw", "dropout")),
        confirm=Confirm(seeds=(20, 21)),
    )
    return Study(name="designed", question="?", experiments=(experiment,))

def grown() -> Study:
    """Seeds until decided, the factorial of the survivors, and its winner again."""
    experiment = Experiment(
        name="one",
        question="?",
        baseline=RUN,
        arms=(
            Arm(name="adamw", changes=ADAMW),
            Arm(name="dropout", changes=DROPOUT),
            Arm(name="wild", changes={"optimizer.lr": 1e30, "training.clip": 0.0}),
        ),
        seeds=(0, 1, 2),
        smallest_effect=1e-5,
        sequential=Sequential(looks=(2, 3)),
        combine=Combine(seeds=(10, 11)),
        confirm=Confirm(seeds=(20, 21)),
    )
    return Study(name="grown", question="?", experiments=(experiment,))

def screened() -> Study:
    """The shipped recipe with a model of a few weights."""
    study = recipes.find("screening").study(steps=8, seeds=3, fresh_seeds=2)
    small = ("model.layers=1", "model.heads=2", "model.width=16", "model.context=32")
    less = ("training.batch=4", "evaluation.windows=4", f"data.source={RUN.data.source}")
    return overrides.apply(study, (*small, *less, "sweep.multiples=1,2"))
'''


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the recipes and their text; caches go there too."""
    folder = tmp_path_factory.mktemp("deciding")
    (folder / "text.txt").write_bytes(text(8000))
    (folder / "recipe.py").write_text(RECIPE)
    with quickly(folder):
        yield folder


def study(place: Path, name: str, out: str, kill: str = "") -> tuple[int | None, list[str]]:
    return run(f"{place / 'recipe.py'}:{name}", place / out, kill)


def final(record: RunRecord) -> float:
    found = record.evaluations[-1].bits_per_byte
    assert found is not None
    return found


def rate(record: RunRecord) -> float:
    found: float = record.start.config["optimizer"]["lr"]
    return found


def _stage(name: str) -> int:
    """Trials by rung, then the seeds that count, then the stages that follow."""
    first, _, last = name.split("/")
    rung = re.search(r"-rung-(\d)-", last)
    later = {"combine": 3, "confirm": 4}.get(first.partition(".")[2], 2)
    return int(rung[1]) if rung else later


def test_tuned_crossed_and_confirmed(place: Path) -> None:
    status, started = study(place, "designed", "designed")
    assert status == 0
    # Of each arm three trials, the better two for longer, two seeds; and the winner's two pairs.
    assert len(started) == len(set(started)) == 4 * (3 + 2 + 2) + 2 * 2
    stages = [_stage(name) for name in started]
    assert stages == sorted(stages)

    found = records(place / "designed")
    assert found.keys() == set(started)
    arms = ("baseline", "adamw", "dropout", "adamw+dropout")
    tuned: dict[str, float] = {}
    for arm in arms:
        trials = [each for name, each in found.items() if f"two/{arm}/sweep" in name]
        short, long = (
            {rate(each): final(each) for each in trials if len(each.steps) == steps}
            for steps in (6, 12)
        )
        assert sorted(long) == sorted(sorted(short, key=lambda each: short[each])[:2])
        tuned[arm] = min(long, key=lambda each: long[each])
        for seed in (0, 1):
            counts = found[f"two/{arm}/seed-{seed}"]
            assert (rate(counts), len(counts.steps)) == (tuned[arm], 12)

    two, confirmed = verdicts(place / "designed")
    assert {each["arm"]: each["chosen"] for each in two["sweeps"]} == tuned
    means = {
        arm: statistics.fmean(final(found[f"two/{arm}/seed-{seed}"]) for seed in (0, 1))
        for arm in arms
    }
    neither, adamw, dropout, both = means.values()
    assert adamw < neither - 0.1  # it learns, and the choice matters
    effects = {"+".join(each["factors"]): each["effect"] for each in two["effects"]}
    assert effects == pytest.approx(
        {
            "adamw": (adamw + both - neither - dropout) / 2,
            "dropout": (dropout + both - neither - adamw) / 2,
            "adamw+dropout": both - adamw - dropout + neither,
        }
    )

    winner = min(arms, key=lambda arm: means[arm])
    (only,) = confirmed["arms"]
    assert (only["arm"], [each["seed"] for each in only["per_seed"]]) == (winner, [20, 21])
    for arm in ("baseline", winner):
        again = [found[f"two.confirm/{arm}/seed-{seed}"] for seed in (20, 21)]
        assert {rate(each) for each in again} == {tuned[arm]}
    assert only["label"] in ("better", "undecided")
    page = page_of(place / "designed")
    for words in ("two.confirm", "optimizer.lr", "adamw+dropout"):
        assert words in page

    # Nothing is left to do, whoever asks again.
    assert study(place, "designed", "designed") == (0, [])


def test_seeds_are_added_and_survivors_go_on(place: Path) -> None:
    status, started = study(place, "grown", "grown")
    assert status == 0
    stages = [_stage(name) for name in started]
    assert stages == sorted(stages)
    one, combined, confirmed = verdicts(place / "grown")
    arms = {each["arm"]: each for each in one["arms"]}
    assert arms["wild"]["label"] == "diverged"
    assert "one/wild/seed-2" not in started  # it was decided at the first look
    for arm in ("adamw", "dropout"):
        decided_first = arms[arm]["look"]["number"] == 1
        assert (f"one/{arm}/seed-2" in started) == (not decided_first)
        assert arms[arm]["label"] not in ("incomplete", "diverged")
    # Two seeds cannot tell so little from nothing: there was a second look.
    assert arms["dropout"]["look"]["number"] == 2
    # Both go on, with all their combinations, on seeds of their own.
    assert [each["arm"] for each in combined["arms"]] == ["adamw", "dropout", "adamw+dropout"]
    seeds = {each["seed"] for arm in combined["arms"] for each in arm["per_seed"]}
    assert seeds == {10, 11}
    (only,) = confirmed["arms"]
    best = min(combined["arms"], key=lambda each: each["effect"])
    assert only["arm"] == best["arm"]
    assert {each["seed"] for each in only["per_seed"]} == {20, 21}
    assert only["effect"] < -0.1
    page = page_of(place / "grown")
    for words in ("one.combine", "one.confirm", "diverged", "Look 1 of 2"):
        assert words in page


def test_the_recipe_screening_goes_from_six_choices_to_a_winner(place: Path) -> None:
    status, started = study(place, "screened", "screened")
    assert status == 0
    stages = [name.partition("/")[0] for name in started]
    assert stages == sorted(stages)
    assert set(stages) == {"choices", "choices.combine", "choices.confirm"}
    first, *others = verdicts(place / "screened")
    alone = [each["arm"] for each in first["arms"]]
    assert alone == ["muon", "wsd", "rotary", "rms", "qk-norm", "dropout"]
    assert all(each["look"]["number"] == 1 for each in first["arms"])
    able = [each["arm"] for each in first["arms"] if each["label"] not in ("worse", "diverged")]
    combined = next(each for each in others if each["experiment"] == "choices.combine")
    factors = {part for each in combined["arms"] for part in each["arm"].split("+")}
    assert len(factors) == min(4, len(able)) >= 2
    assert factors <= set(able)
    assert len(combined["arms"]) == (7 if len(factors) > 2 else 3)
    confirmed = next(each for each in others if each["experiment"] == "choices.confirm")
    (winner,) = confirmed["arms"]
    assert winner["arm"] == min(combined["arms"], key=lambda each: each["effect"])["arm"]
    assert [each["seed"] for each in winner["per_seed"]] == [100, 101]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        (
            "designed",
            (
                "two/dropout/sweep-.*-rung-0-seed-90",
                "two/adamw/sweep-.*-rung-1-seed-90",
                "two/adamw.dropout/seed-1",
                r"two\.confirm/.*/seed-21",
            ),
        ),
        (
            "grown",
            (
                "one/dropout/seed-1",
                "one/dropout/seed-2",
                r"one\.combine/dropout/seed-10",
                r"one\.confirm/.*/seed-20",
            ),
        ),
    ],
)
def test_killed_in_every_stage_it_ends_with_the_same_bits(
    name: str, kills: tuple[str, ...], place: Path
) -> None:
    assert study(place, name, f"whole-{name}")[0] == 0
    out, began = f"killed-{name}", list[str]()
    for kill in kills:
        status, started = study(place, name, out, kill)
        assert status is None, f"{kill} is no run"
        began += started
    status, started = study(place, name, out)
    assert status == 0
    found = records(place / out)
    assert_same(found, records(place / f"whole-{name}"))
    # What was killed was taken up from its checkpoint, and nothing else was begun twice.
    assert len([*began, *started]) == len(found) + len(kills)
    again = [each for each in found.values() if len(each.starts) > 1]
    assert len(again) == len(kills)
    for each in again:
        assert [start.from_step for start in each.starts] == [0, len(each.steps) // 2]
    assert _decided(verdicts(place / out)) == _decided(verdicts(place / f"whole-{name}"))


def _decided(found: list[dict[str, Any]]) -> object:
    """What was found, without what it took."""
    return [
        [(each["experiment"], each["sweeps"], each["effects"], each["follows"]) for each in found],
        [
            (arm["arm"], arm["label"], arm["reason"], arm["effect"], arm["interval"])
            for each in found
            for arm in each["arms"]
        ],
    ]
