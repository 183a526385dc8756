"""Arms from factors."""

from __future__ import annotations

from typing import Any

import pytest

from tilelab.study.recipes.arms import factorial, one_at_a_time
from tilewise.errors import InvalidArgument

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


def test_values_whose_names_only_begin_alike_are_different() -> None:
    assert len(factorial({"a": {"training.clip": 1}, "b": {"training.clipping": 1}})) == 3
