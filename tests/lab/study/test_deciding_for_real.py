"""Studies that decide in stages, with real training: what is run, in which order, and resumed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.study.in_process import page_of, quickly, records, run, verdicts
from tests.lab.study.test_end_to_end import assert_same
from tests.lab.study.train.toys import text

pytestmark = pytest.mark.slow

RECIPE = '''
from pathlib import Path

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
    return run(f"{place / 'recipe.py'}:{name}", place / out, kill, ("--underpowered",))


def _stage(name: str) -> tuple[int, int]:
    """The stages follow one another; in each come trials by rung, then the seeds that count."""
    first, _, last = name.split("/")
    rung = re.search(r"-rung-(\d)-", last)
    return ["", "combine", "confirm"].index(first.partition(".")[2]), int(rung[1]) if rung else 9


# Of each run that is killed, a pattern of its name: one in every stage.
DESIGNED = (
    "two/dropout/sweep-.*-rung-0-seed-90",
    "two/adamw/sweep-.*-rung-1-seed-90",
    "two/adamw.dropout/seed-1",
    r"two\.confirm/.*/seed-21",
)
GROWN = (
    "one/dropout/seed-1",
    "one/dropout/seed-2",
    r"one\.combine/dropout/seed-10",
    r"one\.confirm/.*/seed-20",
)


@pytest.mark.parametrize(
    ("name", "kills", "words"),
    [
        ("designed", DESIGNED, ("two.confirm", "optimizer.lr", "adamw+dropout")),
        ("grown", GROWN, ("one.combine", "one.confirm", "diverged", "Look 1 of 2")),
    ],
)
def test_stages_in_their_order_and_killed_in_each_with_the_same_bits(
    name: str, kills: tuple[str, ...], words: tuple[str, ...], place: Path
) -> None:
    status, started = study(place, name, f"whole-{name}")
    assert status == 0
    stages = [_stage(each) for each in started]
    assert stages == sorted(stages)
    whole, found = records(place / f"whole-{name}"), verdicts(place / f"whole-{name}")
    assert whole.keys() == set(started)
    if name == "designed":
        # Of each arm three trials, the better two for longer, two seeds; the winner's two pairs.
        assert len(started) == 4 * (3 + 2 + 2) + 2 * 2
    if name == "grown":
        arms = {each["arm"]: each for each in found[0]["arms"]}
        assert arms["wild"]["label"] == "diverged"
        assert "one/wild/seed-2" not in started  # it was decided at the first look
        # Two seeds cannot tell so little from nothing: there was a second look.
        assert arms["dropout"]["look"]["number"] == 2
    before, (winner,) = found[-2:][0]["arms"], found[-1]["arms"]
    assert winner["effect"] < -0.1
    assert winner["arm"] in [each["arm"] for each in before]
    page = page_of(place / f"whole-{name}")
    assert [each for each in words if each not in page] == []

    out, began = f"killed-{name}", list[str]()
    for kill in kills:
        status, started = study(place, name, out, kill)
        assert status is None, f"{kill} is no run"
        began += started
    status, started = study(place, name, out)
    assert status == 0
    again = records(place / out)
    assert_same(again, whole)
    # What was killed was taken up from its checkpoint, and nothing else was begun twice.
    assert len([*began, *started]) == len(whole) + len(kills)
    twice = [each for each in again.values() if len(each.starts) > 1]
    assert len(twice) == len(kills)
    for each in twice:
        assert [start.from_step for start in each.starts] == [0, len(each.steps) // 2]
    assert _decided(verdicts(place / out)) == _decided(found)
    assert study(place, name, out) == (0, []), "nothing is left to do"


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
