"""The registry of recipes: by name, from a file, with options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilelab.study import recipes
from tilelab.study.ask.config import Study
from tilelab.study.recipes.arms import factorial, one_at_a_time
from tilewise.errors import InvalidArgument

MINE = '''
from __future__ import annotations
from dataclasses import dataclass
from tilelab.study.ask.config import Arm, Experiment, Model, RunConfig, Study

def mine(*, width: int = 32, seeds: int = 2):
    """My own question.

    At length.
    """
    experiment = Experiment(
        name="one", question="?", baseline=RunConfig(model=Model(width=width)),
        arms=(Arm(name="wsd", changes={"schedule": "wsd"}),), seeds=range(seeds),
        smallest_effect=0.1,
    )
    return Study(name="mine", question="?", experiments=(experiment,))

@dataclass
class Settings:  # looks its own module up
    width: int

def needs(width): ...
def nothing(): ...
def typo(): return RunConfig(modle=Model())
def wrong(): return mine().experiments[0].config_of("wsdd")
seven = 7
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "my_study.py"
    path.write_text(MINE)
    return path


def test_the_packages_recipes_by_name() -> None:
    by_length = ("listops", "long-documents")
    others = ("ladder", "kernels", "laptop", "laptop-full", "wikitext", "longer-context")
    factors = ("gpt2-factorial", "screening")
    assert recipes.names() == (*others, *factors, "fine-tuning", *by_length, "h200", "gpu30")
    found = recipes.find("longer-context")
    assert found.name == "longer-context"
    assert found.options["seeds"] == 3
    assert found.summary.startswith("Contexts of 512")


def test_a_function_of_a_file(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = recipes.find(f"{mine}:mine")
    assert found.name == f"{mine}:mine"
    assert found.summary == "My own question."
    assert dict(found.options) == {"width": 32, "seeds": 2}
    study = found.study(width=64)
    assert isinstance(study, Study)
    assert study.experiments[0].baseline.model.width == 64
    assert study.experiments[0].seeds == (0, 1)
    assert "mine" not in recipes.names()
    monkeypatch.chdir(mine.parent)
    assert recipes.find("my_study.py:mine").study().name == "mine"


def test_options_that_do_not_fit_are_named(mine: Path) -> None:
    found = recipes.find(f"{mine}:mine")
    with pytest.raises(InvalidArgument, match=r"widht: .*one of width, seeds.*Did you mean"):
        found.study(widht=3)
    with pytest.raises(InvalidArgument, match=r"model\.width: got 33"):
        found.study(width=33)
    with pytest.raises(InvalidArgument, match="none: it has no options"):
        recipes.find(f"{mine}:nothing").study(width=3)


@pytest.mark.parametrize("value", ["x", 1.5, True, None, [3]])
def test_an_option_has_the_type_of_its_standard_value(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"seeds: .*a value of type int"):
        recipes.find("kernels").study(seeds=value)


@pytest.mark.parametrize(("steps", "seeds"), [(0, 3), (-5, 3), (5, 0)])
def test_numbers_that_make_no_study_are_refused(steps: int, seeds: int) -> None:
    for name in ("kernels", "laptop", "laptop-full", "longer-context"):
        with pytest.raises(InvalidArgument, match=r"steps|seeds"):
            recipes.find(name).study(steps=steps, seeds=seeds)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mien", r"a function of that file: mine, .*Did you mean 'mine'\?"),
        ("seven", "a function of that file"),
        ("needs", "arguments without a standard value: width"),
        ("", "a function of that file"),
    ],
)
def test_a_function_that_cannot_be_a_recipe(mine: Path, function: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        recipes.find(f"{mine}:{function}")
    with pytest.raises(InvalidArgument, match="which is no file"):
        recipes.find(f"{mine}.py:mine")
    program = mine.with_name("train.py")
    program.write_text("raise SystemExit(2)")  # as argparse does with the words of the study
    with pytest.raises(InvalidArgument, match=r"train\.py: got a program.*Your own training"):
        recipes.find(str(program))
    with pytest.raises(InvalidArgument, match=r"or file\.py:function.*Did you mean 'laptop'\?"):
        recipes.find("labtop")


def test_a_function_that_returns_something_else(mine: Path) -> None:
    with pytest.raises(InvalidArgument, match="a NoneType from the function; required: a tile"):
        recipes.find(f"{mine}:nothing").study()
    with pytest.raises(InvalidArgument, match=r"modle: .*Did you mean 'model'\?"):
        recipes.find(f"{mine}:typo").study()
    with pytest.raises(KeyError, match="wsdd"):  # an error of their own is shown as it is
        recipes.find(f"{mine}:wrong").study()


LION = {"optimizer": "lion"}
WSD = {"schedule": {"name": "wsd"}}
CLIP = {"training.clip": 0.5}


def test_one_at_a_time_is_an_arm_for_each_factor() -> None:
    arms = one_at_a_time({"lion": LION, "wsd": WSD}, kind="systems")
    assert [(arm.name, arm.changes, arm.kind) for arm in arms] == [
        ("lion", LION, "systems"),
        ("wsd", WSD, "systems"),
    ]


def test_a_factorial_has_every_combination_once() -> None:
    arms = {arm.name: arm.changes for arm in factorial({"lion": LION, "wsd": WSD, "clip": CLIP})}
    assert arms == {
        "lion": LION,
        "wsd": WSD,
        "clip": CLIP,
        "lion+wsd": LION | WSD,
        "lion+clip": LION | CLIP,
        "wsd+clip": WSD | CLIP,
        "lion+wsd+clip": LION | WSD | CLIP,
    }
    assert {arm.kind for arm in factorial({"lion": LION})} == {"training"}


@pytest.mark.parametrize("other", [{"optimizer": "sgd"}, {"optimizer.lr": 0.1}])
def test_factors_of_the_same_value_cannot_be_combined(other: dict[str, Any]) -> None:
    for factors in ({"lion": LION, "other": other}, {"other": other, "lion": LION}):
        with pytest.raises(InvalidArgument, match="which another factor changes too"):
            factorial(factors)
    # Names that only begin alike are different.
    assert len(factorial({"a": {"training.clip": 1}, "b": {"training.clipping": 1}})) == 3
